"""Where searches start, too: what the list scheduler `Greedy` makes of fixed weights, over several groupings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.problem import Problem
from rlplace.search.improve.coarsening import by_module, by_role, nested
from rlplace.search.improve.start_weights import FIRST_WEIGHTS, START_WEIGHTS
from rlplace.search.improve.warm_starts import (
    MICRO_BATCHED,
    balanced,
    best_start,
    check_budget,
    losses,
    score_heuristics,
    score_layouts,
    score_starts,
)
from rlplace.search.schedule.greedy import Greedy
from rlplace.search.task import Task

GROUPINGS = ("own", "coarser", "finer", "modules-16", "modules-64", "roles", "finest")
"""Names of groupings: the problem's own groups, the next coarser, next finer and finest of `nested`, modules cut into
about 16 and 64, and roles cut into about 64."""
CROSSED = ("own", "coarser", "finer", "modules-16", "modules-64")
"""Those that every one of `START_WEIGHTS` is tried over."""
MANY = 300
"""Evaluations of a budget from which heuristics begin: by then the seconds that they take are worth it."""
SHARE = 0.2
"""Most that fixed weights may take of such a budget ..."""
FEW_SHARE = 0.25
"""... and of a smaller one, which begins with `FIRST_WEIGHTS` ..."""
LEAST = 7
"""... but for so many evaluations, which they may always take."""

Pair = tuple[str, tuple[float, ...]]


@dataclass(frozen=True, eq=False)
class GreedyPlacement:
    """What the list scheduler `Greedy` makes of one set of weights.

    Attributes:
        greedy: the scheduler and its grouping.
        weights: (9,) its weights.
        devices: (N,) int32 device of each op.
        step_s: step time; infinite where memory does not suffice.
        loss: log step time, or how full devices are, as `losses` has it.
    """

    greedy: Greedy
    weights: NDArray[np.float64]
    devices: NDArray[np.int32]
    step_s: float
    loss: float


class Schedulers:
    """A problem's list schedulers, one for each of the `GROUPINGS` that are asked for, laid out when they first are."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._made: dict[str, Greedy] = {}

    def __getitem__(self, grouping: str) -> Greedy:
        """The scheduler of a grouping by its name."""
        if grouping not in self._made:
            self._made[grouping] = Greedy.of(self._problem, grouping_of(self._problem, self._levels, grouping))
        return self._made[grouping]

    @cached_property
    def _levels(self) -> list[Grouping]:
        return nested(self._problem)


def best_start_with_greedy(
    task: Task, *, first: Sequence[Pair] = ()
) -> tuple[NDArray[np.int32], float, list[GreedyPlacement]]:
    """Devices (N,) int32 and step time of the best of fixed weights and other starts, and the former, best first.

    The step time is infinite where none is feasible; nothing here draws, so every seed starts here. With few
    evaluations the other starts are the plain ones, which take milliseconds, with many all cheap heuristics.

    Args:
        task: scores and counts.
        first: names of groupings, and weights (9,), that come before the fixed ones and share their budget.

    Raises:
        InvalidValue: the task's budget is infinite.
    """
    check_budget(task)
    crossed = [(name, weights) for weights in START_WEIGHTS for name in CROSSED]
    if has_few_evaluations(task):
        share = max(FEW_SHARE, LEAST / task.budget.evaluations)
        leaders = score_greedy(task, [*first, *FIRST_WEIGHTS, *crossed], until=task.spent + share)
        devices, step_s = _plain_start(task)
    else:
        devices, step_s = best_start(task)
        leaders = score_greedy(task, [*first, *crossed], until=task.spent + SHARE)
    if leaders and leaders[0].step_s < step_s:
        devices, step_s = leaders[0].devices, leaders[0].step_s
    return devices, step_s, leaders


def has_few_evaluations(task: Task) -> bool:
    """Whether the whole budget is less than `MANY` evaluations."""
    return task.budget.evaluations < MANY


def _plain_start(task: Task) -> tuple[NDArray[np.int32], float]:
    """The best of `score_starts`, devices (N,) int32 and step time; groups by bytes come first where nothing fits yet.

    A budget may end before all are scored.
    """
    own = task.problem.grouping
    found = score_layouts(task)
    if task.problem.graph.num_micro_batches > 1:
        found += score_heuristics(task, MICRO_BATCHED[:1])
    if task.best_devices is None:
        groups = balanced(task.problem)
        found += [(float(task.score_groups(groups)[0]), own.expand(groups))]
    starts, times = score_starts(task)
    step_s, devices = min([*found, (float(times[0]), own.expand(starts[0]))], key=lambda pair: pair[0])
    return devices, step_s


def score_greedy(task: Task, pairs: Sequence[Pair], *, until: float) -> list[GreedyPlacement]:
    """What weights give, each over the grouping of that name, best first; equal placements are scored once.

    Args:
        task: scores and counts.
        pairs: names of groupings, and weights (9,).
        until: share of the task's budget at which to stop.
    """
    schedulers, seen = Schedulers(task.problem), set[bytes]()
    found: list[GreedyPlacement] = []
    for first in range(0, len(pairs), len(CROSSED)):
        if evaluations_until(task, until) < 1:
            break
        batch = [(schedulers[name], np.array(weights)) for name, weights in pairs[first : first + len(CROSSED)]]
        found += score_weights(task, batch, seen, until=until)
    return sorted(found, key=lambda one: one.loss)


def score_weights(
    task: Task, pairs: Sequence[tuple[Greedy, NDArray[np.float64]]], seen: set[bytes], *, until: float
) -> list[GreedyPlacement]:
    """What each scheduler makes of its weights (9,), where it is not among `seen`, to which it is added.

    Args:
        task: scores and counts.
        pairs: schedulers and weights.
        seen: placements that were scored before.
        until: share of the task's budget at which to stop; the last pairs may be left out by it.
    """
    fresh: list[tuple[Greedy, NDArray[np.float64], NDArray[np.int32], NDArray[np.int32]]] = []
    for greedy, weights in pairs:
        groups = greedy.place(weights)
        devices = greedy.grouping.expand(groups)[0]
        if devices.tobytes() not in seen:
            seen.add(devices.tobytes())
            fresh.append((greedy, weights, groups, devices))
    fresh = fresh[: int(min(len(fresh), evaluations_until(task, until)))]
    if not fresh:
        return []
    times = task.score(np.stack([devices for *_, devices in fresh]))
    return [
        GreedyPlacement(
            greedy,
            weights,
            devices,
            float(step_s),
            float(losses(task.problem, greedy.grouping, groups, np.array([step_s]))[0]),
        )
        for (greedy, weights, groups, devices), step_s in zip(fresh, times, strict=True)
    ]


def evaluations_until(task: Task, until: float) -> float:
    """Evaluations that the budget leaves until a share of it, infinite under one of seconds alone; 0 once it is gone.

    What is left in fact, where `Task.expected_evaluations` guesses from the pace what seconds will allow.
    """
    if task.is_spent or task.spent >= until:
        return 0.0
    return min(until * task.budget.evaluations - task.evaluations, task.evaluations_left)


def grouping_of(problem: Problem, levels: Sequence[Grouping], name: str) -> Grouping:
    """The grouping that a name of `GROUPINGS` stands for.

    Args:
        problem: what is placed.
        levels: its nested groupings.
        name: one of `GROUPINGS`.
    """
    own = next(rung for rung, level in enumerate(levels) if level is problem.grouping)
    match name:
        case "coarser":
            return levels[max(own - 1, 0)]
        case "finer":
            return levels[min(own + 1, len(levels) - 1)]
        case "finest":
            return levels[-1]
        case "modules-16":
            return by_module(problem, 16)
        case "modules-64":
            return by_module(problem, 64)
        case "roles":
            return by_role(problem, 64)
    return problem.grouping
