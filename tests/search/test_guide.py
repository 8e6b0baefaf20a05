"""What a guide suggests is tried, is kept to budget and pins, and without one nothing changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray
from random_problems import plain_host, random_problem
from search_problems import barred, brute_force_s, fork_problem

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.improve.anneal import AnnealSettings, anneal_finer
from rlplace.search.improve.starting_points import Schedulers
from rlplace.search.methods import METHODS, find
from rlplace.search.task import MOST_STARTS, Budget, ListSchedule, Task, guided_moves, guided_schedules, score_guided


@dataclass
class Oracle:
    """A guide that always suggests one placement.

    Attributes:
        asked: counts of starts that were wanted.
        told: placements that it was to imitate.
        pairs: list schedules that it suggests.
    """

    wanted: NDArray[np.int32]
    start_share: float = 0.0
    move_share: float = 0.0
    asked: list[int] = field(default_factory=list)
    told: list[list[int]] = field(default_factory=list)
    pairs: tuple[ListSchedule, ...] = ()

    def schedules(self, count: int) -> Sequence[ListSchedule]:
        return self.pairs[:count]

    def starts(self, count: int) -> NDArray[np.int32]:
        self.asked.append(count)
        return np.repeat(self.wanted[None], count, axis=0)

    def moves(self, devices: NDArray[np.int32], count: int) -> NDArray[np.int32]:
        return np.repeat(self.wanted[None], count, axis=0)

    def imitate(self, devices: NDArray[np.int32]) -> None:
        self.told.append(devices.tolist())


def best_of(problem: Problem) -> NDArray[np.int32]:
    """The best placement, by brute force over two devices."""
    num_ops = problem.graph.num_ops
    every = ((np.arange(2**num_ops)[:, None] >> np.arange(num_ops)) & 1).astype(np.int32)
    return every[int(np.argmin(Simulator(problem, threads=1).step_times(every)))]


def task_of(problem: Problem, evaluations: int) -> Task:
    return Task(problem, Simulator(problem, threads=1), Budget(evaluations), seed=0)


def test_starts_are_a_share_of_the_budget_scored_once_each_and_the_best_is_first() -> None:
    problem = fork_problem(0)
    best = best_of(problem)
    guide = Oracle(best, start_share=0.2)
    task = task_of(problem, 50)
    ((devices, step_s),) = score_guided(task, guide)
    assert guide.asked == [10]
    assert task.evaluations == 1  # ten times the same placement
    assert devices.tolist() == best.tolist()
    assert step_s == brute_force_s(problem)
    guide.starts = lambda count: np.array([[0] * 6, best.tolist()], dtype=np.int32)  # type: ignore[method-assign]
    assert score_guided(task_of(problem, 50), guide)[0][0].tolist() == best.tolist()


def test_nothing_is_scored_without_a_guide_or_a_share_and_never_more_than_there_is() -> None:
    problem = fork_problem(0)
    task = task_of(problem, 50)
    assert score_guided(task, None) == score_guided(task, Oracle(best_of(problem))) == []
    assert task.evaluations == 0
    guide = Oracle(best_of(problem), start_share=1.0)
    score_guided(Task(problem, Simulator(problem), Budget(seconds=60.0)), guide)
    score_guided(task_of(problem, 3), guide)
    assert guide.asked == [MOST_STARTS, 3]


def test_the_portfolio_starts_from_what_a_guide_knows() -> None:
    problem = random_problem(np.random.default_rng(5), 12, plain_host(3))
    best = find(problem, "portfolio", Simulator(problem, threads=1), Budget(2000), seed=1)
    assert best.devices is not None
    guide = Oracle(best.devices, start_share=0.1)
    found = find(problem, "portfolio", Simulator(problem, threads=1), Budget(10), seed=0, guide=guide)
    assert found.step_time_s <= best.step_time_s
    assert found.evaluations <= 10


def test_a_guides_list_schedules_come_before_the_fixed_ones() -> None:
    problem = random_problem(np.random.default_rng(5), 12, plain_host(3))
    pair = ("finest", (0.1, 0.9, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8))
    guide = Oracle(np.zeros(12, dtype=np.int32), start_share=0.1, pairs=(pair, pair))
    guide.starts = lambda count: np.zeros((0, 12), dtype=np.int32)  # type: ignore[method-assign]
    scheduler = Schedulers(problem)["finest"]
    placed = scheduler.grouping.expand(scheduler.place(np.array(pair[1])))[0]
    scored: list[list[int]] = []

    class Watching:
        def step_times(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
            scored.extend(placements.tolist())
            return np.ones(len(placements))

    for evaluations, count in ((100, 2), (10, 1)):
        task = Task(problem, Watching(), Budget(evaluations))
        assert guided_schedules(task, guide) == guide.pairs[:count]
        METHODS["portfolio"].run(task, guide=guide)
        assert scored[0] == placed.tolist()
        scored.clear()
    assert guided_schedules(task_of(problem, 100), None) == ()


def test_a_guides_moves_lead_annealing_where_it_wants() -> None:
    problem = fork_problem(3)
    best = best_of(problem)
    task = task_of(problem, 3)
    start = (1 - best).astype(np.int32)  # no single move goes from here to the best one
    step_s = float(task.score(start)[0])
    guide = Oracle(best, move_share=1.0)
    anneal_finer(task, start, step_s, until=1.0, settings=AnnealSettings(guide=guide, few_moves=0))
    assert task.best_s == brute_force_s(problem)
    assert guide.told[0] == start.tolist()


def test_a_share_of_the_rows_is_the_guides_and_pins_hold_all_the_same() -> None:
    problem = barred(fork_problem(2), {0: (0,)})
    guide = Oracle(np.ones(6, dtype=np.int32), move_share=0.25)
    current, moved = np.zeros(6, dtype=np.int32), np.zeros((400, 6), dtype=np.int32)
    mixed = guided_moves(guide, problem, problem.grouping, current, moved, np.random.default_rng(0))
    rows = {tuple(row) for row in mixed.tolist()}
    assert rows == {(0,) * 6, (0, 1, 1, 1, 1, 1)}  # the pin of op 0 stands
    assert mixed.any(axis=1).mean() == pytest.approx(0.25, abs=0.07)
    assert not moved.any()


def test_a_suggestion_is_taken_as_far_as_groups_follow_and_own_moves_stay_where_it_changes_nothing() -> None:
    problem = fork_problem(2)
    halves = Grouping(np.array([0, 0, 0, 1, 1, 1]))
    current, own = np.array([0, 1], dtype=np.int32), np.array([[1, 1]], dtype=np.int32)
    wanted = np.array([0, 0, 0, 1, 1, 1], dtype=np.int32)
    guide = Oracle(wanted, move_share=1.0)
    mixed = guided_moves(guide, problem, halves, current, own, np.random.default_rng(0))
    assert mixed.tolist() == [[1, 1]]
    guide.wanted = (1 - wanted).astype(np.int32)
    mixed = guided_moves(guide, problem, halves, current, own, np.random.default_rng(0))
    assert mixed.tolist() == [[1, 0]]


@pytest.mark.parametrize("evaluations", [60, 400])
def test_without_shares_a_guide_changes_nothing(evaluations: int) -> None:
    problem = random_problem(np.random.default_rng(2), 30, plain_host(3))

    def run(guide: Oracle | None) -> NDArray[np.int32]:
        simulator = Simulator(problem, threads=1)
        found = find(problem, "portfolio", simulator, Budget(evaluations), seed=3, guide=guide)
        assert found.devices is not None
        return found.devices

    assert np.array_equal(run(None), run(None))
    ignored = Oracle(np.zeros(problem.graph.num_ops, dtype=np.int32))
    run(ignored)
    assert ignored.told
    assert not ignored.asked
