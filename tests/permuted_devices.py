"""A problem whose devices have been listed in another order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem


def permuted(problem: Problem, order: Sequence[int]) -> Problem:
    """`problem` on the same devices, of which the i-th is now what was the `order[i]`-th."""
    host, columns = problem.host, list(order)
    slowdown = np.array(host.corun_slowdown)
    turned = replace(
        host,
        devices=tuple(host.devices[device] for device in columns),
        corun_slowdown=tuple(map(tuple, slowdown[np.ix_(columns, columns)].tolist())) if slowdown.size else (),
    )
    costs = Costs(problem.costs.op_time_s[:, columns], problem.costs.source)
    allowed = None if problem.allowed is None else problem.allowed[:, columns]
    return replace(problem, host=turned, costs=costs, allowed=allowed)
