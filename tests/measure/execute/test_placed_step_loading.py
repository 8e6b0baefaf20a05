"""A placed step that is loaded, unloaded and loaded again."""

from __future__ import annotations

import contextlib
import gc
import weakref

import numpy as np
import pytest
import torch
from core_hosts import process_host
from naive_plan import naive_plan
from placed_steps import GANG_HOST, alternating, single
from rank_threads import rank_residents, rank_threads
from small_models import CASES
from torch import Tensor

from rlplace.errors import RunnerError
from rlplace.graphs import capture
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.residents import Residents


def training(name: str = "batch_norm_train") -> OpGraph:
    torch.manual_seed(0)
    case = CASES[name]()
    return capture(case.model, case.inputs, case.loss_fn, "adam")


def step_of(graph: OpGraph, crew: Crew, *, is_traced: bool = False) -> tuple[PlacedStep, Residents]:
    residents = Residents(graph, GANG_HOST)
    plan = naive_plan(graph, alternating(graph, 3))
    return PlacedStep(graph, GANG_HOST, plan, residents, crew, is_traced=is_traced), residents


@pytest.fixture
def crew(crews: dict[str, Crew]) -> Crew:
    return crews["gang"]


def test_it_is_loaded_when_it_first_runs_or_before(crew: Crew) -> None:
    step, residents = step_of(training(), crew)
    assert not step.is_loaded
    assert residents.made == frozenset(), "nothing is held before"
    step.run()
    assert step.is_loaded
    assert residents.made == step.needs
    other, residents = step_of(training(), crew)
    other.load()
    assert other.is_loaded
    assert residents.made == other.needs


@pytest.mark.slow
@pytest.mark.parametrize("is_traced", [False, True])
def test_unloading_lets_go_of_every_tensor(is_traced: bool, crew: Crew) -> None:
    """By reference counts alone: memory is needed now, not when a collector comes by."""
    step, residents = step_of(training(), crew, is_traced=is_traced)
    step.run()
    tensors = [weakref.ref(residents.tensor(op, 0)) for op in require_program(step._graph).sources]
    states = [weakref.ref(state.moments[0]) for state in residents._states.values()]
    result = weakref.ref(step.result)
    gc.collect()
    gc.disable()
    try:
        step.unload()
        assert result() is None
        assert all(each() is not None for each in tensors), "they are there for others"
        residents.keep_only(())
        assert [each() for each in (*tensors, *states)] == [None] * (len(tensors) + len(states))
    finally:
        gc.enable()


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("has_ranks", [False, True])
def test_a_step_that_is_gone_has_let_go_of_every_tensor(is_traced: bool, has_ranks: bool, crew: Crew) -> None:
    """By reference counts alone: the collector would free them in any thread, and late."""
    graph, host = training(), process_host(3) if has_ranks else GANG_HOST
    with rank_threads(graph, host) if has_ranks else contextlib.nullcontext(crew) as workers:
        residents = rank_residents(graph, host, workers) if has_ranks else Residents(graph, host)
        plan = naive_plan(graph, alternating(graph, 3))
        step = PlacedStep(graph, host, plan, residents, workers, is_traced=is_traced)
        step.run()
        held = [residents._tensors.values(), (state.moments[0] for state in residents._states.values())]
        tensors = [weakref.ref(each) for own in held for each in own] + [weakref.ref(step.result)]
        gc.collect()
        gc.disable()
        try:
            del step, residents, held
            assert [each() for each in tensors] == [None] * len(tensors)
        finally:
            gc.enable()


def test_it_goes_on_where_it_was_if_its_residents_stayed(crew: Crew) -> None:
    graph = training()
    losses: dict[bool, list[Tensor]] = {}
    for is_unloaded in (False, True):
        step, _ = step_of(graph, crew)
        losses[is_unloaded] = []
        for number in range(3):
            step.run(number)
            losses[is_unloaded].append(step.result.clone())
            if is_unloaded:
                step.unload()
                assert not step.is_loaded
    assert all(torch.equal(*pair) for pair in zip(losses[False], losses[True], strict=True))
    assert len({float(loss) for loss in losses[True]}) == 3


def test_residents_made_anew_are_as_at_capture(crew: Crew) -> None:
    step, residents = step_of(training(), crew)
    losses = []
    for _ in range(2):
        step.run(0)
        losses.append(step.result.clone())
        step.unload()
        residents.keep_only(())
    assert torch.equal(*losses)


def test_there_is_no_last_step_to_tell_about_when_it_is_not_loaded(crew: Crew) -> None:
    step, _ = step_of(training(), crew, is_traced=True)
    for _ in range(2):
        with pytest.raises(RunnerError, match="not loaded"):
            _ = step.result
        with pytest.raises(RunnerError, match="not loaded"):
            step.timeline()
        step.run()
        assert np.any(step.timeline().op_end_s > 0)
        step.unload()


def test_a_step_that_cannot_be_loaded_holds_nothing_and_says_why(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = training()
    step, residents = step_of(graph, crew)
    make, made = residents._original, []

    def original(op: int) -> Tensor:
        if len(made) == 3:
            raise torch.OutOfMemoryError("no memory for parameters")
        made.append(weakref.ref(make(op)))
        return make(op)

    monkeypatch.setattr(residents, "_original", original)
    with pytest.raises(RunnerError, match="could not be loaded: OutOfMemoryError: no memory for parameters") as failed:
        step.run()
    assert isinstance(failed.value.__cause__, torch.OutOfMemoryError)
    assert not step.is_loaded
    kept = [weakref.ref(tensor) for tensor in residents._tensors.values()]
    residents.keep_only(())
    assert [each() for each in kept] == [None] * 3, "the error does not hold them either"
    monkeypatch.setattr(residents, "_original", make)
    step.run()
    assert torch.isfinite(step.result)


def test_what_it_needs_is_where_its_ops_are(crew: Crew) -> None:
    graph = training("linear")
    step = PlacedStep(graph, GANG_HOST, single(graph), Residents(graph, GANG_HOST), crew)
    updates = [op for op, target in enumerate(graph.targets) if target.startswith("update.")]
    assert step.needs == {(op, "cpu") for op in (*require_program(graph).sources, *updates)}
