"""Where searches start, too: what the list scheduler `Greedy` makes of fixed weights, over several groupings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.problem import Problem
from rlplace.search.improve.coarsening import by_module, nested
from rlplace.search.improve.warm_starts import best_start, losses
from rlplace.search.schedule.greedy import Greedy
from rlplace.search.task import Task

START_WEIGHTS = np.array((
    (1.33, 1.32, 0.88, 2.12, 1.35, 0.42, 1.22, 1.1, 0.0),
    (1.25, 0.83, 1.44, 0.56, 1.57, -0.04, 0.89, 0.0, -0.14),
    (1.15, 0.43, 0.12, 0.0, 0.97, 0.0, 0.36, 0.15, 0.09),
    (0.72, 0.0, 0.17, 0.0, 2.54, 0.48, 0.43, 0.0, 0.0),
    (0.0, 0.0, 3.87, 5.18, 0.14, 0.82, 1.85, 0.0, 0.0),
    (2.52, 2.8, 0.94, 0.0, 0.96, -0.23, -0.16, 0.02, 0.0),
    (1.96, 1.74, 3.52, 0.12, 4.98, 0.83, 3.85, 1.49, -0.06),
    (0.19, 0.45, 0.0, 1.79, 0.25, -0.12, 0.56, 0.57, -0.57),
    (0.44, 0.39, 3.26, 0.0, 0.0, 0.0, 0.0, 3.84, -0.99),
    (1.11, 1.05, 0.0, 1.23, 0.0, 0.5, 0.68, 0.51, 0.03),
    (1.8, 0.0, 2.01, 3.99, 5.07, 0.69, 3.48, 0.0, 1.12),
    (1.14, 0.3, 1.18, 1.39, 0.0, 0.15, 0.55, -0.07, -0.37),
    (0.81, 1.21, 0.85, 0.37, 2.73, 0.0, 0.76, 0.37, 0.0),
    (0.38, 0.93, 3.63, 1.44, 2.87, 0.77, 2.92, 3.64, -1.13),
    (0.59, 0.15, 0.0, 0.0, 0.28, 0.1, 0.22, 0.0, 0.07),
    (2.36, 2.49, 3.81, 7.53, 3.91, 0.43, 2.29, 1.88, -1.39),
))  # fmt: skip
"""Weights to begin with, in the order of `FEATURES`: of 316, most of them drawn uniformly, the 16 of which the best
over `groupings` is best in the geometric mean over the training steps of four models (`rnnlm`, `inception_v3`, `gpt2`,
`clip`) on five hosts."""
SHARE = 0.2
"""Most that these placements may take of a budget."""


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


def best_start_with_greedy(task: Task) -> tuple[NDArray[np.int32], float, list[GreedyPlacement]]:
    """Devices (N,) int32 and step time of the best of heuristics and fixed weights, and the latter, best first.

    The step time is infinite where none is feasible; nothing here draws, so every seed starts here.

    Raises:
        InvalidValue: the task's budget is infinite.
    """
    devices, step_s = best_start(task)
    leaders = score_greedy(task, until=task.spent + SHARE)
    if leaders and leaders[0].step_s < step_s:
        devices, step_s = leaders[0].devices, leaders[0].step_s
    return devices, step_s, leaders


def score_greedy(task: Task, *, until: float) -> list[GreedyPlacement]:
    """What `START_WEIGHTS` give over every one of `groupings`, best first; equal placements are scored once.

    Args:
        task: scores and counts.
        until: share of the task's budget at which to stop.
    """
    greedies: list[Greedy] = []
    found: list[GreedyPlacement] = []
    seen: set[bytes] = set()
    for weights in START_WEIGHTS:
        if evaluations_until(task, until) < 1:
            break
        greedies = greedies or [Greedy.of(task.problem, grouping) for grouping in groupings(task.problem)]
        found += score_weights(task, [(greedy, weights) for greedy in greedies], seen, until=until)
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


def groupings(problem: Problem) -> list[Grouping]:
    """The problem's own groups, the next coarser and finer ones of `nested`, and modules cut into about 16 and 64."""
    levels = nested(problem)
    own = next(rung for rung, level in enumerate(levels) if level is problem.grouping)
    beside = levels[max(own - 1, 0) : own] + levels[own + 1 : own + 2]
    return [problem.grouping, *beside, by_module(problem, 16), by_module(problem, 64)]
