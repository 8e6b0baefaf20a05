"""`local-search`: first improvement over groups, the most critical first, with restarts (iterated local search)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.problem import Problem
from rlplace.search.improve.moves import CHANCES, Neighbourhood
from rlplace.search.improve.warm_starts import losses, score_starts
from rlplace.search.placed_paths import placed_paths
from rlplace.search.task import Task


def solve(task: Task) -> None:
    """Descends from every start, best first, then from the best placement with a few random moves, until the end."""
    starts, _ = score_starts(task)
    grouping = task.problem.grouping
    near = Neighbourhood.of(task.problem)
    waiting = list(starts)
    best, best_loss = descend(task, grouping, waiting.pop(0))
    while not task.is_spent and len(near.movable):
        if waiting:
            start = waiting.pop(0)
        else:
            start = best
            for _ in range(int(task.generator.integers(2, 7))):
                start = near.propose(start[None], task.generator, CHANCES, max(4, grouping.num_groups // 8))[0]
        found, loss = descend(task, grouping, start)
        if loss <= best_loss:
            best, best_loss = found, loss


def descend(task: Task, grouping: Grouping, start: NDArray[np.int32]) -> tuple[NDArray[np.int32], float]:
    """A placement (G,) int32 that no move of one group improves, or where the budget ended; and its loss.

    Groups are tried in order of criticality; all other devices of a group at once, of which the best is taken if it is
    an improvement. The order is made anew when all groups have been tried.

    Args:
        task: scores and counts.
        grouping: what moves together.
        start: (G,) devices to start from.
    """
    problem, near = task.problem, Neighbourhood.of(task.problem, grouping)
    current = np.array(start, dtype=np.int32)
    loss = float(losses(problem, grouping, current[None], task.score(grouping.expand(current[None])))[0])
    before = np.inf
    while loss < before and not task.is_spent:
        before = loss
        path_s = np.zeros(grouping.num_groups)
        np.maximum.at(path_s, grouping.op_group, longest_paths(problem, grouping.expand(current)))
        for group in np.argsort(-path_s, kind="stable").tolist():
            others = np.flatnonzero(near.allowed[group] & (np.arange(near.allowed.shape[1]) != current[group]))
            if not len(others) or task.spent >= 1.0:
                continue
            moved = np.repeat(current[None], len(others), axis=0)
            moved[:, group] = others
            moved_loss = losses(problem, grouping, moved, task.score(grouping.expand(moved)))
            first = int(np.argmin(moved_loss))
            if moved_loss[first] < loss:
                current, loss = moved[first], float(moved_loss[first])
    return current, loss


def longest_paths(problem: Problem, devices: NDArray[np.int32]) -> NDArray[np.float64]:
    """(N,) float64 seconds: the longest path of ops and transfers through each op, placed on `devices` (N,)."""
    paths = placed_paths(problem, devices)
    return paths.before_s + paths.op_s + paths.after_s
