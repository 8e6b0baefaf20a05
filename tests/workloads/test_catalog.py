"""Every named workload: its captured step is the eager step, run op by op and over two devices at random."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from core_hosts import core_host
from naive_plan import naive_plan, random_devices
from rank_threads import rank_residents, rank_threads
from tiny_workloads import TEXTS, TINY
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from rlplace.errors import MissingExtra
from rlplace.graphs import capture, run_graph
from rlplace.graphs.capturing.capture import as_call
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.optimizers import OPTIMIZERS, torch_optimizer
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.residents import Residents
from rlplace.workloads import CATALOG, Workload, build, parse_workload

HOST = core_host(2)
NUM_STEPS = 2


@dataclass
class Eager:
    """The losses of some eager steps, and the gradients and the buffers of the first."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    made = Crew(HOST.devices)
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """So that sums are taken in one order, wherever an op runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run_eager(workload: Workload) -> Eager:
    assert workload.loss_fn is not None
    assert workload.optimizer is not None
    model, inputs = copy.deepcopy((workload.model, workload.inputs))
    args, kwargs = as_call(inputs)
    trained = [p for p in model.parameters() if p.requires_grad]
    stepper = torch_optimizer(OPTIMIZERS[workload.optimizer], trained)
    eager = Eager()
    for step in range(NUM_STEPS):
        stepper.zero_grad()
        loss = workload.loss_fn(model(*args, **kwargs))
        loss.backward()
        eager.losses.append(loss.detach())
        if step == 0:
            named = model.named_parameters()
            eager.gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
            eager.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        stepper.step()
    return eager


def relative(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest value; gradients that are zero but for rounding count as zero."""
    return float((actual - expected).abs().max()) / max(float(expected.abs().max()), 1e-3)


def equals_eager(text: str, crew: Crew) -> None:
    workload = build(parse_workload(text))
    eager = run_eager(workload)
    graph = capture(workload.model, workload.inputs, workload.loss_fn, workload.optimizer)
    captured = run_graph(graph)
    assert relative(captured.result, eager.losses[0]) <= 1e-5
    assert captured.gradients.keys() == eager.gradients.keys()
    for name, gradient in eager.gradients.items():
        assert relative(captured.gradients[name], gradient) <= 1e-4, name
    for name, buffer in eager.buffers.items():
        assert relative(captured.state[name], buffer) <= 1e-4, name
    placed_equals(graph, eager, captured.state, crew)


def placed_equals(graph: OpGraph, eager: Eager, first_state: dict[str, Tensor], crew: Crew) -> None:
    generator = np.random.default_rng(0)
    plan = naive_plan(graph, random_devices(graph, 2, generator), generator)
    assert len(set(plan.devices.tolist())) == 2
    residents = Residents(graph, HOST)
    placed = PlacedStep(graph, HOST, plan, residents, crew)
    with rank_threads(graph, HOST) as ranks:
        shared = PlacedStep(graph, HOST, plan, rank_residents(graph, HOST, ranks), ranks)
        losses = []
        for step, _ in enumerate(eager.losses):
            shared.run(step)
            losses.append(shared.result)
    for step, loss in enumerate(eager.losses):
        placed.run(step)
        assert relative(placed.result, loss) <= 1e-5
        assert torch.equal(losses[step], placed.result), "over shared memory it is the same to the bit"
        if step > 0:
            continue
        for op, source in require_program(graph).sources.items():
            if source.kind in ("parameter", "buffer"):
                assert torch.equal(residents.tensor(op, int(plan.devices[op])), first_state[source.key]), source.key


def test_every_name_is_tested_here() -> None:
    assert TINY.keys() == CATALOG.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TEXTS if name != "inception_v3"])  # its `small` is hardly larger
def test_captured_and_placed_it_equals_eager(name: str, crew: Crew) -> None:
    equals_eager(TEXTS[name], crew)


@pytest.mark.slow
@pytest.mark.parametrize("name", CATALOG)
def test_small_captured_and_placed_it_equals_eager(name: str, crew: Crew) -> None:
    equals_eager(f"{name}@small", crew)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "embedding", "head"),
    [
        ("bert", "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
        ("gpt2", "transformer.wte.weight", "lm_head.weight"),
        ("t5", "shared.weight", "lm_head.weight"),
        ("whisper", "model.decoder.embed_tokens.weight", "proj_out.weight"),
    ],
)
def test_tied_parameters_are_one(name: str, embedding: str, head: str) -> None:
    """Embedding and head share a tensor: it lives once, and is updated once, by the sum of both gradients."""
    workload = build(parse_workload(TEXTS[name]))
    assert workload.model.get_parameter(head) is workload.model.get_parameter(embedding)
    graph = capture(workload.model, workload.inputs, workload.loss_fn, workload.optimizer)
    keys = [source.key for source in require_program(graph).sources.values()]
    assert keys.count(embedding) == 1
    assert head not in keys
    assert [update for update in graph.names if update.startswith("update") and update.endswith(embedding)] == [
        f"update_{embedding}"
    ]


@pytest.mark.parametrize("name", TEXTS)
def test_labels_are_inputs_and_nothing_is_random(name: str) -> None:
    """The same inputs give the same loss, other inputs another one."""
    one, same, other = (build(parse_workload(TEXTS[name]), seed=seed) for seed in (1, 1, 2))
    assert one.optimizer == "adam"
    losses = []
    for workload, inputs in ((one, one.inputs), (same, same.inputs), (one, other.inputs)):
        args, kwargs = as_call(inputs)
        assert workload.loss_fn is not None
        losses.append(workload.loss_fn(copy.deepcopy(workload.model)(*args, **kwargs)).detach())
    assert losses[0].shape == ()
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2])


# Parameters as published, or counted by hand from the paper's figures.
PUBLISHED = {
    "bert": 110_106_428,  # 109,482,240 of BERT-base, and its two heads
    "clip": 151_277_313,
    "gpt2": 124_439_808,
    "inception_v3": 27_161_264,
    "llama": 6_738_415_616,
    "mixtral": 46_702_792_704,
    "resnet50": 25_557_032,
    "t5": 222_903_552,
    "vit": 86_567_656,
    "whisper": 72_593_920,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CATALOG)
def test_paper_size_takes_no_memory_and_has_the_published_parameters(name: str) -> None:
    with FakeTensorMode():
        workload = build(parse_workload(f"{name}@paper"))
    parameters = list(workload.model.parameters())
    assert all(isinstance(parameter.data, FakeTensor) for parameter in parameters)
    if name in PUBLISHED:
        assert sum(parameter.numel() for parameter in parameters) == PUBLISHED[name]


def test_without_transformers_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name, family in CATALOG.items():
        if family.extra:
            with pytest.raises(MissingExtra, match=r"rlplace\[zoo\]"):
                build(parse_workload(name))


@pytest.mark.slow
def test_naming_and_listing_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from rlplace.workloads import CATALOG, parse_workload;"
        "[(each.config.small(), each.config.paper(), parse_workload(f'{name}@paper').config())"
        " for name, each in CATALOG.items()];"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
