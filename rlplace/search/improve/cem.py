"""`cem`: the cross-entropy method over one categorical a group (Rubinstein 1999; de Boer et al. 2005)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from rlplace.search.improve.warm_starts import losses, score_starts
from rlplace.search.task import Task

ELITE = 0.15
"""Share of a batch that chances move towards ..."""
STEP = 0.3
"""... and how far."""
FLOOR = 0.002
"""Least chance of an allowed device, over the number of devices: no choice is lost for good."""


def solve(task: Task) -> None:
    """Draws placements, moves the chances of each group's devices towards the best of them, and again."""
    starts, times = score_starts(task)
    problem = task.problem
    size = int(min(max(10, math.sqrt(min(task.budget.evaluations, 10_000))), 64))
    chances = start_chances(starts[0], problem.group_allowed)
    elite, elite_loss = starts[:1], losses(problem, problem.grouping, starts[:1], times[:1])
    keep = max(1, round(ELITE * size))
    while not task.is_spent:
        drawn = draw(chances, size, task.generator)
        loss = losses(problem, problem.grouping, drawn, task.score_groups(drawn))
        pool, pool_loss = np.concatenate((elite, drawn)), np.concatenate((elite_loss, loss))
        order = np.argsort(pool_loss, kind="stable")[:keep]
        elite, elite_loss = pool[order], pool_loss[order]
        chances = towards(chances, elite, problem.group_allowed)


def start_chances(start: NDArray[np.int32], allowed: NDArray[np.bool_]) -> NDArray[np.float64]:
    """(G, D) float64: nine tenths for where each group is in `start`, the rest evenly over its allowed devices."""
    chances: NDArray[np.float64] = 0.1 * allowed / allowed.sum(axis=1, keepdims=True)
    chances[np.arange(len(start)), start] += 0.9
    return chances


def towards(chances: NDArray[np.float64], elite: NDArray[np.int32], allowed: NDArray[np.bool_]) -> NDArray[np.float64]:
    """`chances` (G, D) moved by `STEP` towards how often each group is where in `elite` (K, G), floored."""
    share = (elite[:, :, None] == np.arange(chances.shape[1])).mean(axis=0)
    moved = np.where(allowed, np.maximum((1 - STEP) * chances + STEP * share, FLOOR / chances.shape[1]), 0.0)
    normal: NDArray[np.float64] = moved / moved.sum(axis=1, keepdims=True)
    return normal


def draw(chances: NDArray[np.float64], count: int, generator: np.random.Generator) -> NDArray[np.int32]:
    """(count, G) int32: a device for each group by its chances (G, D)."""
    uniform = generator.random((count, len(chances), 1))
    place = (uniform >= np.cumsum(chances, axis=1)).sum(axis=2)
    last = chances.shape[1] - 1 - np.argmax(chances[:, ::-1] > 0, axis=1)  # where rounding left the sum below 1
    devices: NDArray[np.int32] = np.minimum(place, last).astype(np.int32)
    return devices
