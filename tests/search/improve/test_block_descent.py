"""Descending by blocks: to what no tried move improves, within its share, where it may, without a draw."""

from __future__ import annotations

import numpy as np
import pytest
from random_problems import plain_host
from search_problems import Counting, barred, fork_problem

from rlplace.graphs.grouping.groups import group_ops
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.bench_simulator import synthetic_problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.improve import anneal as block_descent
from rlplace.search.improve.anneal import MOST, SHARE, blocks, sweep
from rlplace.search.improve.coarsening import by_module, split
from rlplace.search.improve.greedy_starts import MANY
from rlplace.search.task import Budget, Task, allowed_devices


def layered_problem() -> Problem:
    """Ninety ops in at most thirty groups on three devices."""
    plain = synthetic_problem(90, 3)
    grouping = group_ops(plain.graph, plain.costs.op_time_s.mean(axis=1), 30)
    return Problem(plain.graph, plain_host(3, 1e9), plain.costs, grouping)


def test_no_block_is_better_elsewhere_when_it_ends_by_itself() -> None:
    problem = barred(fork_problem(2, 3), {0: (1,), 3: (0, 2), 5: (2,)})
    simulator = Simulator(problem, threads=1)
    start = problem.grouping.expand(np.array([1, 0, 0, 0, 0, 2], dtype=np.int32))
    start_s = float(simulator.step_times(start[None])[0])
    task = Task(problem, Counting(problem), Budget(10_000))
    devices, step_s = sweep(task, start, start_s, until=1.0)
    assert task.evaluations < MOST
    assert step_s == simulator.step_times(devices[None])[0] < start_s
    assert step_s == task.best_s
    for level in blocks(problem):
        parts = split(level, devices)
        for block, device in zip(*np.nonzero(allowed_devices(problem, parts)), strict=True):
            moved = np.where(parts.op_group == block, device, devices).astype(np.int32)
            assert simulator.step_times(moved[None])[0] >= step_s


def test_it_keeps_to_its_share_and_draws_nothing() -> None:
    problem = layered_problem()
    start = np.zeros(problem.graph.num_ops, dtype=np.int32)
    start_s = float(Simulator(problem, threads=1).step_times(start[None])[0])
    found = []
    for seed in (1, 2):
        task = Task(problem, Counting(problem), Budget(60), seed=seed)
        task.score(start)
        devices, step_s = sweep(task, start, start_s, until=41 / 60)
        assert task.evaluations == 1 + int(SHARE * 40)
        assert step_s < start_s
        assert task.generator.random() == np.random.default_rng(seed).random()
        found.append(devices)
    assert np.array_equal(*found)


def test_a_long_budget_is_left_to_annealing() -> None:
    problem = layered_problem()
    start = np.zeros(problem.graph.num_ops, dtype=np.int32)
    task = Task(problem, Counting(problem), Budget(100_000))
    sweep(task, start, 1e9, until=1.0, most=50)
    assert task.evaluations == 50


def test_what_does_not_fit_comes_back_as_it_is() -> None:
    problem = layered_problem()
    start = np.zeros(problem.graph.num_ops, dtype=np.int32)
    task = Task(problem, Counting(problem), Budget(100))
    devices, step_s = sweep(task, start, np.inf, until=1.0)
    assert devices is start
    assert np.isinf(step_s)
    assert task.evaluations == 0


def test_few_evaluations_are_not_spent_on_whole_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = layered_problem()
    start = np.zeros(problem.graph.num_ops, dtype=np.int32)
    start_s = float(Simulator(problem, threads=1).step_times(start[None])[0])
    asked = []
    monkeypatch.setattr(block_descent, "by_module", lambda *args: asked.append(args) or by_module(*args))
    for evaluations, begins in ((MANY - 1, 0), (MANY, 1)):
        sweep(Task(problem, Counting(problem), Budget(evaluations)), start, start_s, until=1.0)
        assert len(asked) == begins
