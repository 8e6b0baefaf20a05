"""Tuning the scheduler: better than its first weights, the same again, within its budget, where it may."""

from __future__ import annotations

import numpy as np
import pytest
from random_problems import plain_host
from search_problems import Counting, tight_problem

from rlplace.graphs.grouping.groups import group_ops
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.bench_simulator import synthetic_problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.improve.evolve import POPULATION, VARIED, tune, vary
from rlplace.search.improve.greedy_starts import FIRST_WEIGHTS, GreedyPlacement, score_greedy
from rlplace.search.registry import find
from rlplace.search.task import Budget, Task


def layered_problem() -> Problem:
    """Sixty ops in at most twenty groups on three devices."""
    plain = synthetic_problem(60, 3)
    grouping = group_ops(plain.graph, plain.costs.op_time_s.mean(axis=1), 20)
    return Problem(plain.graph, plain_host(3, 1e9), plain.costs, grouping)


def leader(task: Task) -> GreedyPlacement:
    """The best of the first weights over the problem's groups."""
    return score_greedy(task, FIRST_WEIGHTS, until=1.0)[0]


def test_tuned_weights_beat_the_first_ones() -> None:
    problem = layered_problem()
    simulator = Simulator(problem, threads=1)
    task = Task(problem, simulator, Budget(300), seed=1)
    first = leader(task)
    devices, step_s = tune(task, first, until=1.0)
    assert step_s < first.step_s
    assert step_s == task.best_s == simulator.step_times(devices[None])[0]


def test_tuning_neither_minds_nor_moves_the_global_generator() -> None:
    problem = layered_problem()

    def tuned(seed: int) -> tuple[float, float]:
        np.random.seed(seed)
        task = Task(problem, Simulator(problem, threads=1), Budget(evaluations=200))
        return tune(task, leader(task), until=1.0)[1], float(np.random.random())

    (first_s, first), (second_s, second) = tuned(1), tuned(2)
    assert first_s == second_s
    assert first == np.random.RandomState(1).random()
    assert second == np.random.RandomState(2).random()


def test_variations_beat_the_first_weights_and_are_the_same_for_every_seed() -> None:
    problem = layered_problem()
    found = []
    for seed in (1, 2):
        task = Task(problem, Counting(problem), Budget(1000), seed=seed)
        leaders = score_greedy(task, FIRST_WEIGHTS, until=1.0)
        before = task.evaluations
        varied = vary(task, leaders, until=1.0)
        assert before + VARIED <= task.evaluations < before + VARIED + POPULATION
        assert len({one.devices.tobytes() for one in varied}) == len(varied) == task.evaluations
        assert varied[0].step_s == task.best_s < leaders[0].step_s
        assert task.generator.random() == np.random.default_rng(seed).random()
        found.append(varied[0].devices)
    assert np.array_equal(*found)


def test_they_stop_at_their_share_of_the_budget() -> None:
    problem = layered_problem()
    task = Task(problem, Counting(problem), Budget(100), seed=1)
    leaders = score_greedy(task, FIRST_WEIGHTS, until=0.1)
    assert task.evaluations == 10
    leaders = vary(task, leaders, until=0.15)
    assert task.evaluations == 15
    tune(task, leaders[0], until=0.15 + (POPULATION - 1) / 100)
    assert task.evaluations == 15
    tune(task, leaders[0], until=0.5)
    assert task.evaluations == 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_it_spreads_what_does_not_fit(seed: int) -> None:
    problem = tight_problem(12, 3, seed)
    found = find(problem, "evolve", Simulator(problem, threads=1), Budget(400), seed=seed)
    assert found.devices is not None
    assert np.isfinite(found.step_time_s)
