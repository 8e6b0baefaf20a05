"""From ops to groups: where a group may be, and where it goes when its ops are on several devices."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.problem import Problem


def allowed_devices(problem: Problem, grouping: Grouping) -> NDArray[np.bool_]:
    """(G, D) bool: devices where all the ops of each group of `grouping` may run."""
    table = np.ones((grouping.num_groups, problem.host.num_devices), dtype=np.bool_)
    if problem.allowed is not None:
        np.logical_and.at(table, grouping.op_group, problem.allowed)
    return table


def majority_devices(
    problem: Problem, devices: NDArray[np.int32], grouping: Grouping | None = None
) -> NDArray[np.int32]:
    """(G,) int32: of the devices where a group may be, the one that most of its mean time is on.

    The first of several that hold as much.

    Args:
        problem: what is placed.
        devices: (N,) where its ops are.
        grouping: what moves together; the problem's own groups by default.
    """
    grouping = problem.grouping if grouping is None else grouping
    weight = np.zeros((grouping.num_groups, problem.host.num_devices))
    # a group of ops that take no time goes where most of them are
    np.add.at(weight, (grouping.op_group, devices), problem.costs.op_time_s.mean(axis=1) + 1e-12)
    weight[~allowed_devices(problem, grouping)] = -1.0
    heaviest: NDArray[np.int32] = weight.argmax(axis=1).astype(np.int32)
    return heaviest
