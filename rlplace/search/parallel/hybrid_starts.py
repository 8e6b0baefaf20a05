"""`hybrid_start`: where a search over placements goes on from, and what only plans reach: pipelines that idle a bit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.search.parallel.hybrid import Bounded, Field, improve_hybrids
from rlplace.search.parallel.micro_batch_orders import most_under_way
from rlplace.search.task import Task

FACTORS = (1.25, 1.5, 1.75, 2.5, 3.0, 4.0)
"""Micro-batches under way, as multiples of those of 1F1B; 1 and about 2 are in the field."""
BOUNDED_SHARE = 0.5
"""Part of the budget left that goes into bounds, where a plan with one is better than any list schedule."""


def hybrid_start(task: Task, *, until: float) -> tuple[NDArray[np.int32], float, NDArray[np.float64]]:
    """Devices (N,) of the best hybrid in an order that priorities make, its step time, and those priorities (N,).

    The step time is infinite where none that was tried fits into memory. Where 1F1B is better than all such orders, it
    is improved too, beyond `until`: a search over placements knows list schedules only, which never idle on purpose.

    Args:
        task: scores and counts.
        until: share of its budget for hybrids.
    """
    field = improve_hybrids(task, until=until)
    if field.best_bounded.step_s < field.best_listed[1]:
        field.until = task.spent + BOUNDED_SHARE * (1.0 - task.spent)
        improve_bounded(field)
    return field.best_listed


def improve_bounded(field: Field) -> None:
    """Tries other numbers of micro-batches under way, for all stages, then one by one; then owners; as long as it pays.

    Args:
        field: with a plan under a bound.
    """
    count = field.task.problem.graph.num_micro_batches
    best = field.best_bounded
    base = most_under_way(best.layout, count)
    for factor in FACTORS:
        best = _better(field, best, np.ceil(factor * base).astype(np.int64))
    is_better = True
    while is_better and not field.is_spent:
        before_s = best.step_s
        for stage in range(len(base)):
            for change in (1, -1, 3, -2):
                limit = best.limit.copy()
                limit[stage] = max(limit[stage] + change, 1)
                best = _better(field, best, limit)
        best = _owners(field, best)
        is_better = best.step_s < before_s


def _better(field: Field, best: Bounded, limit: NDArray[np.int64]) -> Bounded:
    """`best`, or the same with other bounds."""
    if not field.is_spent and not np.array_equal(limit, best.limit):
        field.score_bounded(best.layout, best.devices, limit)
    return field.best_bounded


def _owners(field: Field, best: Bounded) -> Bounded:
    """`best`, or the same with owners of parameters moved within their stage, each once, the largest first."""
    for members, device in field.other_owners(best.layout):
        if field.is_spent:
            break
        if best.devices[members[0]] != device:
            moved = best.devices.copy()
            moved[members] = device
            field.score_bounded(best.layout, moved, best.limit)
            best = field.best_bounded
    return best
