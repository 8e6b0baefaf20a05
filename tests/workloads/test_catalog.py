"""Every named workload: its step is the eager step, op by op, over two devices, and in micro-batches."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from core_hosts import core_host
from naive_plan import naive_plan, random_devices
from rank_threads import rank_residents, rank_threads
from tiny_workloads import TEXTS, TINY
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from rlplace.errors import CaptureError, InvalidValue, MissingExtra
from rlplace.export.formats import check_export
from rlplace.graphs import capture, run_graph
from rlplace.graphs.capturing.capture import as_call
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.micro_batching.loss_verdict import judge_loss
from rlplace.graphs.micro_batching.slices import plan_slices
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.optimizers import OPTIMIZERS, torch_optimizer
from rlplace.graphs.program import LossVerdict, Slicing
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.residents import Residents
from rlplace.workloads import CATALOG, Workload, build, parse_workload, without_memory

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


def quickly(names: Iterable[str]) -> list[Any]:
    """The recurrent one and the one of tables; the others, whose models take seconds to build, are slow."""
    return [name if name in ("nmt", "dlrm") else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", quickly(TEXTS))
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


ODD = {
    "bert": "layers=1,width=16,heads=2,batch=3,tokens=6,vocab=19",
    "clip": "layers=1,width=12,heads=2,text_width=8,text_heads=2,shared_width=6,image_size=32,patch_size=16,"
    "batch=3,tokens=5,vocab=19",
    "dlrm": "tables=3,max_rows=11,width=4,dense=5,lookups=2,hidden=16,batch=5",
    "gpt2": "layers=1,width=16,heads=2,batch=3,tokens=6,vocab=19",
    "inception_v3": "batch=4,image_size=75,classes=3",
    "llama": "layers=1,width=16,heads=4,kv_heads=2,mlp=24,batch=3,tokens=6,vocab=19",
    "mixtral": "layers=1,width=16,heads=4,kv_heads=2,mlp=12,experts=4,batch=3,tokens=6,vocab=19",
    "nmt": "layers=2,units=8,vocab=11,steps=3,batch=3",
    "resnet50": "batch=4,image_size=64,width=8,classes=3",
    "rnnlm": "layers=1,units=8,vocab=11,steps=3,batch=3",
    "t5": "layers=1,width=16,heads=2,batch=3,tokens=6,target_tokens=5,vocab=19",
    "vit": "layers=1,width=12,heads=2,batch=3,image_size=32,patch_size=16,classes=3",
    "whisper": "layers=1,width=16,heads=2,batch=3,mels=5,frames=12,tokens=6,vocab=19",
}
NORMS = ("inception_v3", "resnet50")
SLOW = (*NORMS, "llama", "t5", "whisper", "bert")


def captured(name: str, count: int) -> OpGraph:
    work = build(parse_workload(f"{name}@{ODD[name]}"))
    return capture(
        work.model,
        work.inputs,
        work.loss_fn,
        work.optimizer,
        targets=work.targets,
        micro_batches=count,
        batch_dims=work.batch_dims,
        loss=work.loss,
    )


def trains_as_eager_does(name: str) -> None:
    graph = captured(name, 2)
    micro = require_program(graph).origin.micro
    assert micro.equals_whole == (name not in (*NORMS, "mixtral"))
    generator = np.random.default_rng(0)
    plan = naive_plan(graph, random_devices(graph, 2, generator), generator)
    assert check_export(graph, HOST, plan, num_steps=2).ok


def test_every_name_but_one_is_cut_here() -> None:
    assert ODD.keys() == CATALOG.keys() - {"evoformer"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ODD if name not in SLOW])
def test_in_micro_batches_it_trains_as_eager_does(name: str) -> None:
    trains_as_eager_does(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_others_train_as_eager_does_too(name: str) -> None:
    trains_as_eager_does(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "dlrm"])
def test_tables_have_one_gradient_a_lookup_of_all_micro_batches(name: str) -> None:
    target = "aten.embedding_dense_backward.default"
    numbers = [sum(each == target for each in captured(name, count).targets) for count in (1, 2, 3)]
    assert numbers[0] == numbers[1] == numbers[2] > 0


def test_a_model_without_a_batch_is_not_cut() -> None:
    work = build(parse_workload("evoformer@blocks=1,sequences=3,residues=4,msa_width=8,pair_width=6,heads=2"))
    with pytest.raises(InvalidValue, match="batch"):
        capture(work.model, work.inputs, work.loss_fn, work.optimizer, micro_batches=2, batch_dims=work.batch_dims)


@pytest.mark.slow
def test_models_without_memory_are_cut_too() -> None:
    """The same graph: a joined loss is captured of outputs that nobody computed."""
    with without_memory():
        work = build(parse_workload(f"clip@{ODD['clip']}"))
    graph = capture(
        work.model, work.inputs, work.loss_fn, work.optimizer, targets=work.targets, micro_batches=2, loss="joined"
    )
    assert graph.fingerprint == captured("clip", 2).fingerprint


KINDS = {**dict.fromkeys(TINY, "separate"), "clip": "joined", "mixtral": "accumulated", "multi": "separate"}
NORMALISED = {"inception_v3", "resnet50"}
OTHERS = [name for name in TEXTS if name not in ("evoformer", "inception_v3")]
"""All but what has no batch and what takes long in float64."""


def built(name: str) -> Workload:
    return build(parse_workload(re.sub(r"batch=\d+", "batch=5", TEXTS[name])))


def slicing_of(workload: Workload, count: int) -> Slicing:
    args, kwargs = as_call(workload.inputs)
    return plan_slices(workload.model, args, kwargs, workload.loss_fn, (), count, workload.batch_dims)


def judged(workload: Workload, count: int, asked: str) -> LossVerdict:
    args, kwargs = as_call(workload.inputs)
    slicing = slicing_of(workload, count)
    return judge_loss(workload.model, args, kwargs, workload.loss_fn, (), slicing, asked=asked)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_the_loss_is_what_the_workload_says(name: str) -> None:
    workload = built(name)
    verdict = judged(workload, 3, workload.loss)
    assert (verdict.kind, verdict.weights, verdict.is_checked) == (KINDS[name], "mean", True)
    assert verdict.normalises_batch == (name in NORMALISED)


def test_a_workload_without_a_batch_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"expected one with a batch to cut into 2 for Evoformer.*K = 1"):
        slicing_of(build(parse_workload(TEXTS["evoformer"])), 2)


@pytest.mark.slow
def test_experts_route_over_the_whole_batch() -> None:
    with pytest.raises(CaptureError, match=r"aten\.topk\.default in model\.layers\.0\.mlp\.experts \(Experts\)"):
        judged(build(parse_workload("mixtral@capacity=60,batch=4,width=16,mlp=8,vocab=19,layers=1")), 2, "auto")


@pytest.mark.slow
def test_images_and_texts_are_compared_over_the_whole_batch() -> None:
    assert judged(built("clip"), 2, "auto").kind == "joined"
    with pytest.raises(InvalidValue, match="loss is 'separate', expected 'joined'"):
        judged(built("clip"), 2, "separate")


@pytest.mark.parametrize("name", quickly(TEXTS))
def test_tensors_are_cut_where_their_batch_is(name: str) -> None:
    """Another batch makes other shapes, and where."""
    if name == "evoformer":
        return
    texts = [re.sub(r"batch=\d+", f"batch={batch}", TEXTS[name]) for batch in (7, 9)]
    first, second = (build(parse_workload(text)) for text in texts)
    values = [work.inputs.values() if isinstance(work.inputs, dict) else work.inputs for work in (first, second)]
    expected = []
    for one, other in zip(*values, strict=True):
        differing = [dim for dim, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if a != b]
        expected += differing
    assert slicing_of(first, 3) == Slicing(tuple(expected), (3, 2, 2))


def test_time_first_workloads_are_cut_along_the_batch_where_it_is_as_long_as_the_time() -> None:
    for name in ("nmt", "rnnlm"):
        workload = build(parse_workload(re.sub(r"batch=\d+", "batch=3", TEXTS[name])))
        assert set(slicing_of(workload, 3).dims) == {1}
    assert slicing_of(build(parse_workload(re.sub(r"batch=\d+", "batch=3", TEXTS["dlrm"]))), 3).dims == (0, 1, 0)


def test_several_workloads_with_batches_of_different_size_are_refused() -> None:
    workload = build(parse_workload(f"multi:clip@{TINY['clip']},rnnlm@{TINY['rnnlm']}"))
    with pytest.raises(InvalidValue, match=r"clip\.input_ids of 3.*rnnlm\.0 of 2.*expected tensors of the same batch"):
        slicing_of(workload, 2)
