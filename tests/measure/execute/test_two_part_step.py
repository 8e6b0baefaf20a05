"""A step in two parts computes what the whole one does, whatever is between them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from naive_plan import naive_plan, random_devices
from placed_steps import GANG_HOST, HOST
from rank_threads import rank_threads
from small_models import CASES, Case
from torch import Tensor

from rlplace.errors import RunnerError
from rlplace.export.placed.graphs import carried_plan
from rlplace.export.placed.placed_module import backward_ops
from rlplace.graphs.capturing.capture import CapturedModule, as_call, capture_module
from rlplace.graphs.interpreter import require_program
from rlplace.measure.execute import rank_processes
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.rank_processes import RankCrew
from rlplace.measure.execute.residents import Residents
from rlplace.measure.execute.shared_heap import Layout
from rlplace.measure.execute.two_part_step import TwoPartStep
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Plan


@pytest.fixture(scope="module", params=[HOST, GANG_HOST], ids=["cores", "gang"])
def placing(request: pytest.FixtureRequest) -> Iterator[tuple[Host, Crew]]:
    crew = Crew(request.param.devices)
    yield request.param, crew
    crew.stop()


def split_plan(captured: CapturedModule, host: Host, seed: int) -> tuple[Plan, frozenset[int]]:
    """A random plan whose backward is at the end, and the items of that."""
    graph = captured.graph
    generator = np.random.default_rng(seed)
    start = naive_plan(graph, random_devices(graph, host.num_devices, generator))
    last = backward_ops(graph)
    plan = carried_plan(graph, start, graph, last=last)
    sent = enumerate(plan.transfer_tensor.tolist())
    return plan, last | {graph.num_ops + k for k, tensor in sent if graph.tensor_op[tensor] in last}


def two_parts(captured: CapturedModule, host: Host, crew: Crew, seed: int) -> tuple[TwoPartStep, Plan]:
    plan, second = split_plan(captured, host, seed)
    graph = captured.graph
    return TwoPartStep(graph, host, plan, Residents(graph, host), crew, second=second), plan


def linear() -> tuple[Case, CapturedModule, Tensor]:
    case = CASES["linear"]()
    return case, capture_module(case.model, case.inputs, {}, has_backward=True), case.inputs[0]


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
    case, captured, given = linear()
    step, _ = two_parts(captured, *placing, 0)
    (op,) = sources_of(captured, "input", [given])
    with pytest.raises(RunnerError, match="shape"):
        step.run_first({op: torch.ones(3, 7, dtype=torch.float64)}, 0)
    outputs, kept = step.run_first({op: case.inputs[0]}, 0)
    torch.testing.assert_close(outputs[0], case.model(*case.inputs).detach())
    assert len(kept) == placing[0].num_devices


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What serves ranks: one for each, in the order in which they began."""
    made: list[Any] = []

    class Served(rank_processes._Rank):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(rank_processes, "_Rank", Served)
    return made


def ranks_step(captured: CapturedModule, ranks: RankCrew, seed: int) -> TwoPartStep:
    """A step in two parts whose sources are in memory that all ranks share."""
    graph = captured.graph
    plan, second = split_plan(captured, HOST, seed)
    return TwoPartStep(graph, HOST, plan, Residents(graph, HOST, heap=ranks.heap), ranks, second=second)


@pytest.mark.parametrize("name", ["linear", "tied", "batch_norm_train", "attention"])
def test_ranks_run_the_parts_that_threads_run_to_the_bit(name: str) -> None:
    """Two first parts wait, and the last one goes on first."""
    case: Case = CASES[name]()
    args, kwargs = as_call(case.inputs)
    captured = capture_module(case.model, args, kwargs, has_backward=True)
    inputs = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    crew = Crew(HOST.devices)
    with rank_threads(captured.graph, HOST) as ranks:
        for seed in range(3):
            both = two_parts(captured, HOST, crew, seed)[0], ranks_step(captured, ranks, seed)
            found = []
            for step in both:
                waiting = [
                    (number, step.run_first(sources_of(captured, "input", values), number))
                    for number, values in enumerate((inputs, [each.flip(0) for each in inputs]))
                ]
                for number, (outputs, kept) in reversed(waiting):
                    seeds = [torch.ones_like(outputs[position]) for position in captured.with_gradient]
                    found.append([*outputs, *step.run_second(sources_of(captured, "target", seeds), kept, number)])
            half = len(found) // 2
            for threads, processes in zip(found[:half], found[half:], strict=True):
                for one, other in zip(threads, processes, strict=True):
                    assert torch.equal(one, other)
                    assert one.stride() == other.stride()
    crew.stop()


def test_what_a_first_part_was_given_stays_until_its_second(served: list[Any]) -> None:
    """The caller lets go of it at once, and others take all memory that is free."""
    case, captured, given = linear()
    parameters = dict(case.model.named_parameters())
    wanted = [parameters[name] for name in require_program(captured.graph).gradients]
    expected = torch.autograd.grad(case.model(given).sum(), wanted)
    with rank_threads(captured.graph, HOST) as ranks:
        for seed in range(4):
            step = ranks_step(captured, ranks, seed)
            outputs, kept = step.run_first(sources_of(captured, "input", [given.clone()]), 0)
            gc.collect()
            others = [ranks.heap.empty(Layout.of(given)).fill_(7) for _ in range(8)]
            seeds = sources_of(captured, "target", [torch.ones_like(outputs[0])])
            for ours, theirs in zip(step.run_second(seeds, kept, 0), expected, strict=True):
                torch.testing.assert_close(ours, theirs)
            assert all((each == 7).all() for each in others)
            assert served[0]._kept == {}


def test_a_first_part_without_a_second_is_let_go_of_everywhere(served: list[Any]) -> None:
    _, captured, given = linear()
    with rank_threads(captured.graph, HOST) as ranks:
        step = ranks_step(captured, ranks, 0)
        waiting = [step.run_first(sources_of(captured, "input", [given]), number) for number in range(4)]
        assert {number for _, number in served[0]._kept} == {0, 1, 2, 3}
        del waiting[1], waiting[2]
        gc.collect()
        outputs, kept = step.run_first(sources_of(captured, "input", [given]), 4)
        assert {number for _, number in served[0]._kept} == {0, 2, 4}
        step.run_second(sources_of(captured, "target", [torch.ones_like(outputs[0])]), kept, 4)
        assert {number for _, number in served[0]._kept} == {0, 2}
        step.unload()
        assert served[0]._steps == {}


def test_a_part_that_failed_on_ranks_leaves_nothing_behind(served: list[Any]) -> None:
    _, captured, given = linear()
    with rank_threads(captured.graph, HOST) as ranks:
        step = ranks_step(captured, ranks, 1)
        expected, kept = step.run_first(sources_of(captured, "input", [given]), 0)
        with pytest.raises(RunnerError, match=r"size|shape"):
            step.run_first(sources_of(captured, "input", [torch.ones(3, 7, dtype=torch.float64)]), 1)
        outputs, _ = step.run_first(sources_of(captured, "input", [given]), 2)
        assert torch.equal(outputs[0], expected[0])
        seeds = sources_of(captured, "target", [torch.ones_like(outputs[0])])
        assert all(each.isfinite().all() for each in step.run_second(seeds, kept, 0))


def test_threads_remember_no_part_that_was_dropped(placing: tuple[Host, Crew]) -> None:
    _, captured, given = linear()
    step, _ = two_parts(captured, *placing, 0)
    for number in range(5):
        step.run_first(sources_of(captured, "input", [given]), number)
    gc.collect()
    assert len(step._dropped) <= 1
