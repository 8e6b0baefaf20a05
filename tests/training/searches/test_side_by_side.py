"""`search_side_by_side`: everyone searches at once, one that raises ends alone, and Ctrl-C ends everyone."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from fake_measurer import chain_problem

from rlplace.errors import InvalidValue
from rlplace.measure.problem import Plan
from rlplace.report.console import Progress, make_progress
from rlplace.search.methods import METHODS, Method, register_method
from rlplace.search.task import BestSoFar, Budget, Task
from rlplace.session.session_records import MethodResult
from rlplace.training.searches import search_all as side_by_side
from rlplace.training.tracking import NoTracker

PROBLEM = chain_problem(4)
LONG_S = 600.0
"""A budget that no test waits for."""


def meet(task: Task, barrier: threading.Barrier, device: int) -> None:
    """Ends only where another method runs at the same time."""
    barrier.wait(timeout=LONG_S)
    task.score(np.full((1, 4), device, dtype=np.int32))
    task.tell({"loss": float(device)})


def fail(task: Task, failed: threading.Event) -> None:
    """Raises after one placement."""
    task.score(np.ones((1, 4), dtype=np.int32))
    failed.set()
    raise ValueError("no such thing")


def refuse(task: Task) -> None:
    raise InvalidValue("groups", 4, "at least 5")


def after(task: Task, failed: threading.Event) -> None:
    """Scores once another method raises."""
    assert failed.wait(timeout=LONG_S)
    task.score(np.zeros((1, 4), dtype=np.int32))


def go_on(task: Task, begun: threading.Event) -> None:
    """Searches until it is stopped."""
    while not task.is_spent:
        task.score(np.zeros((1, 4), dtype=np.int32))
        begun.set()


@pytest.fixture(autouse=True)
def _methods() -> Iterator[None]:
    made = {"meet-a": meet, "meet-b": meet, "fail": fail, "refuse": refuse, "after": after, "go-on": go_on}
    for name, solve in made.items():
        register_method(Method(name, solve, "search", "a test"))
    yield
    for name in made:
        METHODS.unregister(name)


class Notes(NoTracker):
    """Keeps what is told of the best so far."""

    def __init__(self) -> None:
        self.told: list[tuple[str, BestSoFar, float]] = []

    def log_best_so_far(self, method: str, best: BestSoFar, single_s: float) -> None:
        self.told.append((method, best, single_s))


def run(
    methods: Mapping[str, Mapping[str, object]],
    told: list[tuple[str, float]],
    tracker: NoTracker | None = None,
    progress: Progress | None = None,
) -> dict[str, MethodResult]:
    def on_best(method: str, plan: Plan, step_time_s: float) -> None:
        told.append((method, step_time_s))

    return side_by_side.search_side_by_side(
        methods,
        PROBLEM,
        Budget(seconds=LONG_S),
        seed=0,
        progress=progress or make_progress(is_quiet=True),
        tracker=tracker or NoTracker(),
        single_s=8.0,
        on_best=on_best,
    )


def test_all_methods_search_at_the_same_time() -> None:
    barrier, told = threading.Barrier(2), []
    notes = Notes()
    methods = {"meet-a": {"barrier": barrier, "device": 1}, "meet-b": {"barrier": barrier, "device": 0}}
    found = run(methods, told, notes)
    plans = {name: result.plan for name, result in found.items()}
    assert plans["meet-a"] is not None
    assert plans["meet-a"].devices.tolist() == [1, 1, 1, 1]
    assert {name: result.num_scored for name, result in found.items()} == {"meet-a": 1, "meet-b": 1}
    assert told[0][1] == pytest.approx(4.0)
    for name, result in found.items():
        assert result.history == (BestSoFar(1, 0, 0.0, pytest.approx(4.0)),)
        assert 0 < result.history[0].seconds <= result.seconds
        assert result.single_s == 8.0
        assert [(best, single_s) for method, best, single_s in notes.told if method == name] == [
            (result.history[0], 8.0)
        ]


def test_one_that_raises_ends_alone_and_what_it_had_found_counts(capsys: pytest.CaptureFixture[str]) -> None:
    failed, told = threading.Event(), []
    found = run({"after": {"failed": failed}, "fail": {"failed": failed}}, told, progress=make_progress())
    assert found["after"].failure is None
    assert found["after"].num_scored == 1
    assert found["fail"].failure is not None
    assert found["fail"].failure.why.startswith("ValueError: no such thing (")
    assert found["fail"].plan is not None
    assert found["fail"].plan.devices.tolist() == [1, 1, 1, 1]
    assert "fail raised ValueError: no such thing (" in capsys.readouterr().err


def test_one_that_does_not_fit_the_problem_ends_everyone() -> None:
    with pytest.raises(InvalidValue, match="at least 5"):
        run({"go-on": {"begun": threading.Event()}, "refuse": {}}, [])


def test_ctrl_c_ends_everyone_and_tells_the_best_first(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, told = threading.Event(), []
    wait = side_by_side.wait

    def interrupted(futures: object, *rest: object) -> object:
        if rest:
            begun.wait(LONG_S)
            raise KeyboardInterrupt
        return wait(futures)  # type: ignore[arg-type]

    monkeypatch.setattr(side_by_side, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run({"go-on": {"begun": begun}}, told)
    assert told == [("go-on", pytest.approx(4.0))]


class FakeJournal:
    """Keeps every state that it is told, and always wants one."""

    def __init__(self) -> None:
        self.states: list[MethodResult] = []
        self.is_due = True

    def keep(self, state: MethodResult) -> None:
        self.states.append(state)


def search(
    methods: Mapping[str, Mapping[str, object]],
    budget: Budget,
    keepers: Mapping[str, FakeJournal],
    before: Mapping[str, MethodResult] | None = None,
) -> dict[str, MethodResult]:
    return side_by_side.search_side_by_side(
        methods,
        PROBLEM,
        budget,
        seed=0,
        progress=make_progress(is_quiet=True),
        tracker=NoTracker(),
        before=before,
        keepers=keepers,  # type: ignore[arg-type]
    )


def interrupt_once(begun: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = side_by_side.wait

    def interrupted(futures: object, *rest: object) -> object:
        if rest:
            begun.wait(LONG_S)
            monkeypatch.setattr(side_by_side, "wait", wait)
            raise KeyboardInterrupt
        return wait(futures)  # type: ignore[arg-type]

    monkeypatch.setattr(side_by_side, "wait", interrupted)


def test_an_interrupted_search_of_seconds_goes_on_with_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, journal = threading.Event(), FakeJournal()
    interrupt_once(begun, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        search({"go-on": {"begun": begun}}, Budget(seconds=LONG_S), {"go-on": journal})
    (state,) = journal.states
    assert not state.is_done
    assert state.num_scored > 0
    assert state.plan is not None
    assert state.plan.devices.tolist() == [0, 0, 0, 0]
    assert 0 < state.seconds < LONG_S
    nearly = dataclasses.replace(state, seconds=LONG_S - 0.05)
    found = search({"go-on": {"begun": begun}}, Budget(seconds=LONG_S), {"go-on": journal}, {"go-on": nearly})["go-on"]
    assert found.num_scored >= state.num_scored
    assert LONG_S <= found.seconds < 2 * LONG_S
    assert found.history == state.history
    last = journal.states[-1]
    assert last.is_done
    again = search({"go-on": {"begun": begun}}, Budget(seconds=LONG_S), {"go-on": journal}, {"go-on": last})["go-on"]
    assert (again.num_scored, again.seconds, again.history) == (found.num_scored, found.seconds, found.history)


def test_an_interrupted_search_of_evaluations_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, journal = threading.Event(), FakeJournal()
    interrupt_once(begun, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        search({"go-on": {"begun": begun}}, Budget(10**9), {"go-on": journal})
    assert not journal.states
    part = MethodResult(budget=50.0, num_scored=20)
    found = search({"go-on": {"begun": begun}}, Budget(50), {"go-on": journal}, {"go-on": part})["go-on"]
    assert found.num_scored == 50
    assert journal.states[-1].budget == 50
