"""Tuning the scheduler: better than its first weights, the same again, within its budget, where it may."""

from __future__ import annotations

import numpy as np
import pytest
from random_problems import plain_host
from search_problems import Counting, tight_problem

from rlplace.graphs.grouping import group_ops
from rlplace.measure.problem import Problem
from rlplace.measure.simulator import Simulator
from rlplace.measure.synthetic import synthetic_problem
from rlplace.search.evolve import STARTS, evolve_groups
from rlplace.search.greedy import Greedy
from rlplace.search.registry import find
from rlplace.search.task import Budget, Task


def layered_problem() -> Problem:
    """Sixty ops in at most twenty groups on three devices."""
    plain = synthetic_problem(60, 3)
    grouping = group_ops(plain.graph, plain.costs.op_time_s.mean(axis=1), 20)
    return Problem(plain.graph, plain_host(3, 1e9), plain.costs, grouping)


def test_tuned_weights_beat_the_first_ones() -> None:
    problem = layered_problem()
    simulator = Simulator(problem, threads=1)
    task = Task(problem, simulator, Budget(160), seed=1)
    groups, step_s = evolve_groups(task, problem.grouping, until=1.0)
    first = Greedy.of(problem).place(STARTS)
    assert step_s < simulator.step_times(problem.grouping.expand(first)).min()
    assert step_s == task.best_s == simulator.step_times(problem.grouping.expand(groups)[None])[0]


def test_it_stops_at_its_share_of_the_budget() -> None:
    problem = layered_problem()
    task = Task(problem, Counting(problem), Budget(100), seed=1)
    evolve_groups(task, problem.grouping, until=0.3)
    assert task.evaluations == 30


@pytest.mark.parametrize("seed", range(3))
def test_it_spreads_what_does_not_fit(seed: int) -> None:
    problem = tight_problem(12, 3, seed)
    found = find(problem, "evolve", Simulator(problem, threads=1), Budget(400), seed=seed)
    assert found.devices is not None
    assert np.isfinite(found.step_time_s)
