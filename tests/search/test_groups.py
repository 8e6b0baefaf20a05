"""Groups on the devices of their ops, worked out by hand."""

from __future__ import annotations

import numpy as np
from search_problems import barred, chain_problem

from rlplace.graphs import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.search.task import allowed_devices, majority_devices


def grouped_chain() -> Problem:
    """Four ops of 5, 1, 1 and 1 seconds, the first three in one group."""
    chain = chain_problem(4, 2)
    costs = Costs(np.array([[5.0, 5.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]), "estimated")
    return Problem(chain.graph, chain.host, costs, Grouping(np.array([0, 0, 0, 1])))


def test_a_group_goes_where_most_of_its_time_is_unless_it_may_not() -> None:
    problem = grouped_chain()
    devices = np.array([1, 0, 0, 0], dtype=np.int32)
    assert majority_devices(problem, devices).tolist() == [1, 0]
    assert majority_devices(barred(problem, {1: (0,)}), devices).tolist() == [0, 0]
    assert majority_devices(problem, devices, Grouping(np.arange(4))).tolist() == devices.tolist()


def test_equal_times_go_to_the_first_device_and_ops_without_time_count_too() -> None:
    problem = grouped_chain()
    assert majority_devices(problem, np.array([0, 0, 1, 1]), Grouping(np.array([0, 1, 1, 2]))).tolist() == [0, 0, 1]
    free = Problem(problem.graph, problem.host, Costs(np.zeros((4, 2)), "estimated"), problem.grouping)
    assert majority_devices(free, np.array([0, 1, 1, 0], dtype=np.int32)).tolist() == [1, 0]


def test_a_group_may_be_where_all_of_its_ops_may() -> None:
    problem = barred(grouped_chain(), {1: (0,), 3: (1,)})
    assert allowed_devices(problem, problem.grouping).tolist() == [[True, False], [False, True]]
    alone = allowed_devices(problem, Grouping(np.arange(4)))
    assert alone.tolist() == [[True, True], [True, False], [True, True], [False, True]]
