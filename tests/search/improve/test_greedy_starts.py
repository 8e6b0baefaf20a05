"""Fixed weights over several groupings: each as the scheduler has it, scored once, best first, within their share."""

from __future__ import annotations

import numpy as np
from random_problems import plain_host
from search_problems import Counting, fork_problem, tight_problem

from rlplace.graphs.grouping.groups import Grouping, group_ops
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.simulate.synthetic import synthetic_problem
from rlplace.search.groups import allowed_devices
from rlplace.search.improve.greedy_starts import (
    START_WEIGHTS,
    best_start_with_greedy,
    evaluations_until,
    groupings,
    score_greedy,
)
from rlplace.search.improve.warm_starts import best_start
from rlplace.search.schedule.greedy import Greedy
from rlplace.search.task import Budget, Task


def layered_problem() -> Problem:
    """Ninety ops in at most thirty groups on three devices."""
    plain = synthetic_problem(90, 3)
    grouping = group_ops(plain.graph, plain.costs.op_time_s.mean(axis=1), 30)
    return Problem(plain.graph, plain_host(3, 1e9), plain.costs, grouping)


def test_all_weights_are_tried_over_all_groupings_and_equal_placements_once() -> None:
    problem = layered_problem()
    timer = Counting(problem)
    found = score_greedy(Task(problem, timer, Budget(1000)), until=1.0)
    expected = np.concatenate(
        [grouping.expand(Greedy.of(problem, grouping).place(START_WEIGHTS)) for grouping in groupings(problem)]
    )
    assert {one.devices.tobytes() for one in found} == {row.tobytes() for row in expected}
    assert timer.count == len(found) == len(np.unique(expected, axis=0))
    step_s = Simulator(problem, threads=1).step_times(np.stack([one.devices for one in found]))
    assert [one.step_s for one in found] == step_s.tolist() == sorted(step_s)


def test_what_does_not_fit_comes_last_and_the_least_full_of_it_first() -> None:
    problem = tight_problem(12, 3)
    found = score_greedy(Task(problem, Simulator(problem, threads=1), Budget(1000)), until=1.0)
    fits = [np.isfinite(one.step_s) for one in found]
    assert fits == sorted(fits, reverse=True)
    assert not all(fits)
    assert [one.loss for one in found] == sorted(one.loss for one in found)


def test_the_start_is_the_best_of_all_and_the_same_for_every_seed() -> None:
    problem = layered_problem()
    starts = []
    for seed in (1, 2):
        task = Task(problem, Simulator(problem, threads=1), Budget(1000), seed=seed)
        devices, step_s, leaders = best_start_with_greedy(task)
        assert step_s == task.best_s
        alone = Task(problem, Simulator(problem, threads=1), Budget(1000))
        assert step_s == min(best_start(alone)[1], leaders[0].step_s)
        starts.append(devices)
    assert np.array_equal(*starts)


def test_they_keep_to_their_share() -> None:
    problem = layered_problem()
    timer = Counting(problem)
    task = Task(problem, timer, Budget(100))
    score_greedy(task, until=0.07)
    assert timer.count == 7
    assert evaluations_until(task, 0.07) == 0
    assert evaluations_until(task, 0.5) == 43
    assert score_greedy(task, until=0.07) == []


def test_groupings_are_the_problems_own_the_next_ones_and_modules() -> None:
    problem = layered_problem()
    own, *others = groupings(problem)
    assert own is problem.grouping
    assert len(others) >= 3
    single = fork_problem(0, 2)
    whole = Problem(single.graph, single.host, single.costs, Grouping(np.zeros(single.graph.num_ops, dtype=np.int32)))
    assert groupings(whole)[0].num_groups == 1
    for grouping in groupings(whole):
        assert len(grouping.op_group) == whole.graph.num_ops
        assert allowed_devices(whole, grouping).any(axis=1).all()
