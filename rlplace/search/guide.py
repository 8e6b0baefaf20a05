"""`Guide`: suggests placements to a search, to start from and as moves of annealing; a policy can be one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.problem import Problem
from rlplace.search.groupings import majority_devices
from rlplace.search.task import Task

MOST_STARTS = 64
"""Placements of a guide at most that a search tries to start from."""
ListSchedule = tuple[str, tuple[float, ...]]
"""A grouping's name and weights of the list scheduler over it, as searches begin with."""


class Guide(Protocol):
    """Suggests placements of a problem's ops, which a search scores and takes or leaves like any others."""

    @property
    def start_share(self) -> float:
        """Share of a search's evaluations for placements to start from, 0 to 1."""

    @property
    def move_share(self) -> float:
        """Share of annealing's moves that are suggested, 0 to 1."""

    def schedules(self, count: int) -> Sequence[ListSchedule]:
        """At most `count` list schedules to start from, the best guess first; none where it knows nothing of them."""

    def starts(self, count: int) -> NDArray[np.int32]:
        """(<= count, N) placements to start from, the best guess first; none where it knows nothing yet."""

    def moves(self, devices: NDArray[np.int32], count: int) -> NDArray[np.int32]:
        """(count, N) placements near `devices` (N,), each after a move; unchanged where it has nothing to suggest."""

    def imitate(self, devices: NDArray[np.int32]) -> None:
        """Is told the placement (N,) that the search goes on from, which is the best that it knows of."""


def guided_schedules(task: Task, guide: Guide | None) -> Sequence[ListSchedule]:
    """The list schedules that a guide would start from, as many as its share of the task's budget; () without one."""
    return guide.schedules(count) if guide is not None and (count := _num_starts(task, guide)) else ()


def score_guided(task: Task, guide: Guide | None) -> list[tuple[NDArray[np.int32], float]]:
    """Devices (N,) int32 and step times of the placements that a guide would start from, best first; [] without one.

    Args:
        task: scores and counts; its whole budget is what the guide's share is of.
        guide: asked for at most `MOST_STARTS`; equal placements are scored once.
    """
    if guide is None or not (count := _num_starts(task, guide)):
        return []
    starts = guide.starts(count)
    starts = starts[np.sort(np.unique(starts, axis=0, return_index=True)[1])]
    if not len(starts):
        return []
    return sorted(zip(starts, task.score(starts).tolist(), strict=True), key=lambda one: one[1])


def _num_starts(task: Task, guide: Guide) -> int:
    """One at least, unless the guide has no share or nothing more may be scored."""
    if not guide.start_share:
        return 0
    return int(min(max(guide.start_share * task.budget.evaluations, 1), task.evaluations_left, MOST_STARTS))


class GuidedMoves:
    """Puts a guide's suggestions among the moves of annealing over any grouping.

    Args:
        guide: suggests placements of ops.
        problem: what is placed.
        grouping: what annealing moves together; a suggestion is taken as far as its groups can follow it.
    """

    def __init__(self, guide: Guide, problem: Problem, grouping: Grouping) -> None:
        self._guide, self._problem, self._grouping = guide, problem, grouping

    def mixed(
        self, current: NDArray[np.int32], moved: NDArray[np.int32], generator: np.random.Generator
    ) -> NDArray[np.int32]:
        """(C, G) int32: `moved`, but for a share of its rows, which the guide moved from `current`.

        Args:
            current: (G,) what is moved.
            moved: (C, G) moves that are there already; they stay where the guide would change nothing.
            generator: draws which rows are the guide's, one number a row.
        """
        rows = np.flatnonzero(generator.random(len(moved)) < self._guide.move_share)
        if not len(rows):
            return moved
        mixed = moved.copy()
        for row, devices in zip(rows, self._guide.moves(self._grouping.expand(current), len(rows)), strict=True):
            groups = majority_devices(self._problem, devices, self._grouping)
            if not np.array_equal(groups, current):
                mixed[row] = groups
        return mixed
