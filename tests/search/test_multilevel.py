"""Levels nest, grow, and hold the problem's own grouping."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from rlplace.graphs.grouping import Grouping, group_ops
from rlplace.measure.problem import Problem
from rlplace.measure.simulator import Simulator
from rlplace.measure.synthetic import synthetic_problem
from rlplace.search.multilevel import levels
from rlplace.search.registry import find
from rlplace.search.task import Budget


def grouped_problem(num_ops: int, num_groups: int) -> Problem:
    plain = synthetic_problem(num_ops, 3)
    return replace(plain, grouping=group_ops(plain.graph, plain.costs.op_time_s.mean(axis=1), num_groups))


def test_levels_nest_from_coarse_to_fine() -> None:
    problem = grouped_problem(400, 100)
    ladder = levels(problem)
    counts = [grouping.num_groups for grouping in ladder]
    assert counts == sorted(counts)
    assert any(grouping is problem.grouping for grouping in ladder)
    assert counts[0] < problem.grouping.num_groups < counts[-1] == 400
    for coarse, fine in itertools.pairwise(ladder):
        both = np.unique(np.stack((fine.op_group, coarse.op_group)), axis=1)
        assert both.shape[1] == fine.num_groups


def test_a_problem_of_single_ops_has_coarser_levels_only() -> None:
    plain = synthetic_problem(30, 2)
    ladder = levels(replace(plain, grouping=Grouping(np.arange(30))))
    assert ladder[-1].num_groups == 30
    assert [grouping.num_groups for grouping in ladder] == sorted({grouping.num_groups for grouping in ladder})


def test_it_beats_every_single_device() -> None:
    problem = grouped_problem(200, 40)
    simulator = Simulator(problem, threads=1)
    singles = np.repeat(np.arange(3, dtype=np.int32)[:, None], 200, axis=1)
    found = find(problem, "multilevel", simulator, Budget(800))
    assert found.step_time_s < 0.9 * simulator.step_times(singles).min()
