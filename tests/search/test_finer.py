"""Finer groupings cut, and never join."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from random_problems import plain_host, random_problem

from rlplace.graphs.grouping import Grouping, group_ops
from rlplace.measure.problem import Problem
from rlplace.search.finer import finer, meet


def test_a_meet_by_hand() -> None:
    met = meet(Grouping(np.array([1, 1, 0, 0])), Grouping(np.array([0, 1, 1, 1])), "both")
    assert met.op_group.tolist() == [0, 1, 2, 2]
    assert met.rule == "both"


@given(st.integers(0, 10_000))
def test_placements_carry_over(seed: int) -> None:
    rng = np.random.default_rng(seed)
    plain = random_problem(rng, 12, plain_host(2))
    cost_s = plain.costs.op_time_s.mean(axis=1)
    problem = Problem(plain.graph, plain.host, plain.costs, group_ops(plain.graph, cost_s, 4))
    cut = finer(problem, problem.grouping, 12)
    assert cut.num_groups >= problem.grouping.num_groups
    parent = np.full(cut.num_groups, -1)
    parent[cut.op_group] = problem.grouping.op_group
    assert np.array_equal(parent[cut.op_group], problem.grouping.op_group)
