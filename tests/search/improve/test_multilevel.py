"""Annealing from coarse to fine finds what devices alone do not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlplace.graphs.grouping.groups import group_ops
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.bench_simulator import synthetic_problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.registry import find
from rlplace.search.task import Budget


def grouped_problem(num_ops: int, num_groups: int) -> Problem:
    plain = synthetic_problem(num_ops, 3)
    return replace(plain, grouping=group_ops(plain.graph, plain.costs.op_time_s.mean(axis=1), num_groups))


def test_it_beats_every_single_device() -> None:
    problem = grouped_problem(200, 40)
    simulator = Simulator(problem, threads=1)
    singles = np.repeat(np.arange(3, dtype=np.int32)[:, None], 200, axis=1)
    found = find(problem, "multilevel", simulator, Budget(800))
    assert found.step_time_s < 0.9 * simulator.step_times(singles).min()
