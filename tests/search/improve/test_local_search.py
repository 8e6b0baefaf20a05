"""Descents end where no move of one group helps; paths by hand."""

from __future__ import annotations

import numpy as np
import pytest
from micrographs import op_graph
from random_problems import plain_host
from search_problems import Counting, fork_problem

from rlplace.graphs import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.improve.local_search import descend, longest_paths
from rlplace.search.task import Budget, Task


def test_the_longest_path_through_each_op_by_hand() -> None:
    # 0 feeds 1 (200 bytes: 2 s to another device) and 2; 3 reads both
    graph = op_graph([[], [0], [0], [1, 2]], [200, 100, 100, 1])
    costs = Costs(np.array([[1.0, 9.0], [9.0, 4.0], [3.0, 9.0], [1.0, 9.0]]), "estimated")
    fork = Problem(graph, plain_host(2), costs, Grouping(np.arange(4)))
    # by 1: 1 + 2 + 4 + 1 (100 bytes back) + 1 = 9; by 2: 1 + 3 + 1 = 5
    assert longest_paths(fork, np.array([0, 1, 0, 0], dtype=np.int32)).tolist() == [9.0, 9.0, 5.0, 9.0]


def test_sources_take_no_time() -> None:
    graph = op_graph([[], [0]], targets=["parameter", "aten.op"])
    lone = Problem(graph, plain_host(1), Costs(np.ones((2, 1)), "estimated"), Grouping(np.arange(2)))
    assert longest_paths(lone, np.zeros(2, dtype=np.int32)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("seed", range(8))
def test_no_move_of_one_group_improves_what_a_descent_ends_with(seed: int) -> None:
    problem = fork_problem(seed, 3)
    simulator = Simulator(problem, threads=1)
    task = Task(problem, simulator, Budget(10_000), seed=seed)
    start = np.random.default_rng(seed).integers(0, 3, 6).astype(np.int32)
    found, loss = descend(task, problem.grouping, start)
    near = np.repeat(found[None], 18, axis=0)
    near[np.arange(18), np.arange(18) // 3] = np.arange(18) % 3
    assert np.exp(loss) == pytest.approx(simulator.step_times(found[None])[0], rel=1e-12)
    assert simulator.step_times(near).min() >= simulator.step_times(found[None])[0]


def test_a_descent_ends_with_the_budget() -> None:
    problem = fork_problem(0, 3)
    timer = Counting(problem)
    descend(Task(problem, timer, Budget(6)), problem.grouping, np.array([0, 1, 2, 0, 1, 2], dtype=np.int32))
    assert timer.count == 6
