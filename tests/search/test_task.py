"""`Task`: what is counted, who is told, and when a host may still be asked.

What a row says of a method that raised.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import numpy as np
import pytest
from fake_measurer import CountingMeasurer, TimingMeasurer, chain_problem
from micrographs import op_graph
from numpy.typing import NDArray
from random_problems import plain_host

from rlplace.env.rewards import Scorer, make_reward
from rlplace.errors import InvalidValue, RunnerError, UnknownName
from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.methods import METHODS, Method, SearchResult, find, register_method
from rlplace.search.task import MOST_LETTERS, BestSoFar, Budget, Failure, Simulating, Task

PROBLEM = chain_problem(3)


class Host(CountingMeasurer):
    """A host that closes after so many batches."""

    def __init__(self, batches: int) -> None:
        super().__init__(PROBLEM, wanted=[0, 1, 1])
        self.left = batches

    @property
    def seconds_left(self) -> float:
        return self.left - len(self.batches)

    def promising(self, count: int) -> NDArray[np.int32]:
        return np.zeros((0, 3), dtype=np.int32)


class Notes:
    def __init__(self) -> None:
        self.rows: list[list[int]] = []
        self.figures: list[dict[str, float]] = []

    def scored(self, placements: NDArray[np.int32], step_s: NDArray[np.float64]) -> None:
        self.rows += placements.tolist()

    def learned(self, figures: Mapping[str, float]) -> None:
        self.figures.append(dict(figures))


def rows(*placements: list[int]) -> NDArray[np.int32]:
    return np.array(placements, dtype=np.int32)


def test_the_observer_sees_what_counted_and_nothing_else() -> None:
    notes = Notes()
    timer = TimingMeasurer(PROBLEM, wanted=[0, 1, 1])
    task = Task(PROBLEM, timer, Budget(evaluations=2), observer=notes)
    assert task.score(rows([0, 0, 0], [0, 1, 1], [1, 1, 1])).tolist() == [3.0, 1.0, np.inf]
    assert notes.rows == [[0, 0, 0], [0, 1, 1]]
    task.tell({"loss": 0.5})
    assert notes.figures == [{"loss": 0.5}]


def test_history_says_what_was_spent_wherever_the_best_improved(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=10.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr("rlplace.search.task.time", clock)
    timer = TimingMeasurer(PROBLEM, wanted=[0, 1, 1], failing=[1, 0, 0])
    task = Task(PROBLEM, timer, Budget(evaluations=9, measurements=5), host=Host(batches=9))
    assert (task.best_s, task.history) == (np.inf, [])
    task.score(rows([1, 0, 0]))  # does not fit: no improvement
    clock.now_s = 12.0
    task.score(rows([0, 0, 0], [1, 1, 1]))
    task.measure(rows([0, 0, 0], [1, 1, 1]))
    task.score(rows([0, 0, 0]))  # as short as the best was at first, and longer than it is
    clock.now_s = 12.5
    task.score(rows([0, 1, 1]))
    assert [best.to_list() for best in task.history] == [[3, 0, 2.0, 2.0], [5, 2, 2.5, 1.0]]
    assert task.best_s == 1.0
    assert SearchResult.of(task).history == tuple(task.history)
    assert task.history[0] == BestSoFar(3, 0, 99.0, 2.0)  # seconds are not compared
    assert task.history[0] != BestSoFar(3, 1, 2.0, 2.0)


def test_simulating_and_measuring_are_measurers_that_count() -> None:
    host = Host(batches=9)
    timer = TimingMeasurer(PROBLEM, wanted=[0, 1, 1], failing=[1, 0, 0])
    task = Task(PROBLEM, timer, Budget(evaluations=9, measurements=3), host=host)
    statuses = [m.status for m in Simulating(task).measure(rows([0, 1, 1], [1, 0, 0]))]
    assert (statuses, task.evaluations) == (["ok", "oom"], 2)
    assert [m.step_time_s for m in task.measure(rows([0, 1, 1], [0, 0, 0]))] == [1.0, 3.0]
    assert task.measurements_left == 1
    assert len(task.measure(rows([0, 1, 1], [0, 0, 0]))) == 1
    assert task.measure(rows([0, 1, 1])) == []
    assert task.measurements == 3


def test_a_placement_that_does_not_fit_counts_once_where_it_is_rewarded() -> None:
    task = Task(PROBLEM, TimingMeasurer(PROBLEM, wanted=[0, 1, 1], failing=[1, 0, 0]), Budget(evaluations=9))
    scores = Scorer(Simulating(task), make_reward("log_speedup", 1.0), deterministic=True).score(rows([1, 0, 0]))
    assert (scores.status, task.evaluations) == (("oom",), 1)


def test_a_host_whose_time_is_up_is_not_asked() -> None:
    task = Task(PROBLEM, TimingMeasurer(PROBLEM, [0, 0, 0]), Budget(measurements=5), host=Host(batches=1))
    task.measure(rows([0, 0, 0]))
    assert task.measurements_left == 0
    late = rows([0, 0, 0], [0, 1, 1])  # chosen while it was open: who asked for two gets two
    assert len(task.measure(late)) == 2
    assert Task(PROBLEM, TimingMeasurer(PROBLEM, [0, 0, 0]), Budget(measurements=5)).measurements_left == 0


def test_budgets_are_checked() -> None:
    with pytest.raises(InvalidValue, match="measurements"):
        Budget(measurements=-1)


class Learned:
    def save(self, path: object) -> None:
        """Nothing."""


def place_everything_on_one(task: Task, device: int = 0) -> Learned:
    task.score(np.full((1, 3), device, dtype=np.int32))
    return Learned()


def test_a_seed_is_not_negative() -> None:
    with pytest.raises(InvalidValue, match="seed is -1"):
        find(PROBLEM, "anneal", Simulator(PROBLEM), Budget(evaluations=4), seed=-1)


def test_a_registered_method_is_found_like_any_other() -> None:
    register_method(Method("all-on-one", place_everything_on_one, "baseline", "a test"))
    try:
        found = find(PROBLEM, "all-on-one", TimingMeasurer(PROBLEM, [0, 1, 1]), device=1)
        assert found.devices is not None
        assert found.devices.tolist() == [1, 1, 1]
        assert (found.step_time_s, found.evaluations) == (2.0, 1)
        assert isinstance(found.learned, Learned)
        with pytest.raises(InvalidValue, match="taken"):
            register_method(Method("all-on-one", place_everything_on_one, "baseline", "again"))
    finally:
        METHODS.unregister("all-on-one")
    with pytest.raises(UnknownName, match="portfolio"):
        find(PROBLEM, "portfoli", TimingMeasurer(PROBLEM, [0, 0, 0]))


def test_a_mistake_in_a_method_is_told_with_its_name() -> None:
    method = Method("too-short", lambda task: task.score_groups(np.zeros((1, 2), dtype=np.int32)), "search", "a test")
    with pytest.raises(InvalidValue, match=r"length is \(1, 2\), expected 3 devices") as caught:
        method.run(Task(PROBLEM, TimingMeasurer(PROBLEM, [0, 0, 0])))
    assert caught.value.__notes__ == ["It happened in method 'too-short'."]


def forked_task(evaluations: float = 10) -> Task:
    """Two ops of one second that read one of a second; the second of them is read by one of three, on device 1."""
    graph = op_graph([[], [0], [0], [2]], 0)
    times_s = np.repeat(np.array([[1.0], [1.0], [1.0], [3.0]]), 2, axis=1)
    problem = Problem(graph, plain_host(2), Costs(times_s, "given"), Grouping(np.arange(4)))
    return Task(problem, Simulator(problem, threads=1), Budget(evaluations))


DEVICES = np.array([0, 0, 0, 1], dtype=np.int32)
LATE = np.array([3.0, 2.0, 1.0, 0.0])
"""Priorities under which the op that another device waits for comes second."""


def test_an_answer_keeps_the_order_that_it_was_scored_in() -> None:
    task = forked_task()
    assert task.score_ordered(DEVICES, LATE) == 6.0
    assert task.best_plan is not None
    late = task.best_plan
    assert task.score(DEVICES).tolist() == [5.0]  # by upward rank
    assert task.best_plan is None
    assert task.score_plan(late) == 6.0
    assert (task.best_s, task.best_plan, task.evaluations) == (5.0, None, 3)


def test_a_plan_that_is_best_is_the_answer() -> None:
    task = forked_task()
    late = task.timer.plan(DEVICES, LATE)  # type: ignore[attr-defined]
    assert task.score_plan(late) == 6.0
    assert task.best_plan is late
    assert SearchResult.of(task).plan is late


def test_placements_are_scored_by_the_tasks_priorities() -> None:
    task = forked_task()
    task.priorities = LATE
    assert task.score(DEVICES).tolist() == [6.0]
    assert task.score(DEVICES, np.array([7.0])).tolist() == [6.0]
    assert task.best_plan is not None
    assert task.timer.retime(task.best_plan).step_time_s == 6.0  # type: ignore[attr-defined]


def test_plans_count_as_evaluations() -> None:
    task = forked_task(evaluations=1)
    assert task.score_ordered(DEVICES) == 5.0
    assert task.score_ordered(DEVICES) == np.inf
    assert task.evaluations == 1


def test_a_timer_that_plans_nothing_scores_its_own_order() -> None:
    task = Task(PROBLEM, TimingMeasurer(PROBLEM, [0, 1, 1]))
    devices = np.array([0, 1, 1], dtype=np.int32)
    assert task.score_ordered(devices, np.zeros(3)) == task.score(devices)[0]
    assert task.best_plan is None


def failure_of(error: Exception) -> Failure:
    try:
        raise error
    except Exception as raised:
        return Failure.of(raised)


def test_an_error_of_others_says_its_type_and_where_it_was_raised() -> None:
    failed = failure_of(ValueError("first\nsecond"))
    assert failed.why.startswith("ValueError: first (test_task.py, line ")
    assert "second" in failed.traceback
    assert "failure_of" in failed.traceback
    assert failure_of(KeyError()).why.startswith("KeyError (test_task.py, line ")


@pytest.mark.parametrize(
    ("error", "why"),
    [(RunnerError("gmap failed"), "gmap failed"), (MemoryError("42 GiB"), "42 GiB"), (MemoryError(), "out of memory")],
)
def test_errors_of_ours_and_of_memory_say_what_they_say(error: Exception, why: str) -> None:
    assert failure_of(error).why == why


def test_a_long_first_line_is_cut() -> None:
    assert failure_of(RunnerError("x" * 10_000)).why == "x" * (MOST_LETTERS - 3) + "..."
