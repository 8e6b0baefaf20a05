"""A step in two parts computes what the whole one does, whatever is between them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from naive_plan import naive_plan, random_devices
from placed_steps import GANG_HOST, HOST
from small_models import CASES, Case
from torch import Tensor

from rlplace.errors import RunnerError
from rlplace.export.placed.graphs import carried_plan
from rlplace.export.placed.placed_module import backward_ops
from rlplace.graphs.capturing.capture import CapturedModule, as_call, capture_module
from rlplace.graphs.interpreter import require_program
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.residents import Residents
from rlplace.measure.execute.two_part_step import TwoPartStep
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Plan


@pytest.fixture(scope="module", params=[HOST, GANG_HOST], ids=["cores", "gang"])
def placing(request: pytest.FixtureRequest) -> Iterator[tuple[Host, Crew]]:
    crew = Crew(request.param.devices)
    yield request.param, crew
    crew.stop()


def two_parts(captured: CapturedModule, host: Host, crew: Crew, seed: int) -> tuple[TwoPartStep, Plan]:
    graph = captured.graph
    generator = np.random.default_rng(seed)
    start = naive_plan(graph, random_devices(graph, host.num_devices, generator))
    last = backward_ops(graph)
    plan = carried_plan(graph, start, graph, last=last)
    late = {
        graph.num_ops + k for k, tensor in enumerate(plan.transfer_tensor.tolist()) if graph.tensor_op[tensor] in last
    }
    return TwoPartStep(graph, host, plan, Residents(graph, host), crew, second=last | late), plan


def sources_of(captured: CapturedModule, kind: str, values: list[Tensor]) -> dict[int, Tensor]:
    sources = require_program(captured.graph).sources
    return {op: values[int(source.key)] for op, source in sources.items() if source.kind == kind}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "tied", "attention", "lstm", "batch_norm_shared", "transformer_layer"])
def test_two_first_parts_may_wait_for_their_second(name: str, placing: tuple[Host, Crew]) -> None:
    case: Case = CASES[name]()
    args, kwargs = as_call(case.inputs)
    captured = capture_module(case.model, args, kwargs, has_backward=True)
    inputs = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    given = sources_of(captured, "input", inputs)
    for seed in range(3):
        step, _ = two_parts(captured, *placing, seed)
        waiting = [step.run_first(given, 0) for _ in range(2)]
        found = []
        for outputs, kept in reversed(waiting):
            seeds = [torch.ones_like(outputs[position]) for position in captured.with_gradient]
            found.append(step.run_second(sources_of(captured, "target", seeds), kept, 0))
            assert kept == []
        names = list(require_program(captured.graph).gradients)
        outputs = [
            leaf for leaf in torch.utils._pytree.tree_leaves(case.model(*args, **kwargs)) if isinstance(leaf, Tensor)
        ]
        ends = [output for output in outputs if output.requires_grad]
        parameters = dict(case.model.named_parameters())
        expected = torch.autograd.grad(
            ends, [parameters[each] for each in names], [torch.ones_like(end) for end in ends]
        )
        for gradients in found:
            for each, ours, theirs in zip(names, gradients, expected, strict=True):
                torch.testing.assert_close(ours, theirs, msg=each)
        for tensor in (*waiting[0][0], *found[0]):
            assert not tensor.is_inference()
            assert not tensor.requires_grad


def test_a_part_that_failed_leaves_nothing_behind(placing: tuple[Host, Crew]) -> None:
    case = CASES["linear"]()
    captured = capture_module(case.model, case.inputs, {}, has_backward=True)
    step, _ = two_parts(captured, *placing, 0)
    (op,) = sources_of(captured, "input", [case.inputs[0]])
    with pytest.raises(RunnerError, match="shape"):
        step.run_first({op: torch.ones(3, 7, dtype=torch.float64)}, 0)
    outputs, kept = step.run_first({op: case.inputs[0]}, 0)
    torch.testing.assert_close(outputs[0], case.model(*case.inputs).detach())
    assert len(kept) == placing[0].num_devices
