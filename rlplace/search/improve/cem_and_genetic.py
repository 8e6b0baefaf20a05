"""`cem`: the cross-entropy method over one categorical a group (Rubinstein 1999; de Boer et al. 2005).

`genetic`: a biased random-key genetic algorithm (BRKGA; Gonçalves & Resende 2011).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from rlplace.search.improve.starting_points import losses, score_starts
from rlplace.search.task import Task

CEM_ELITE = 0.15
"""Share of a batch that chances move towards ..."""
STEP = 0.3
"""... and how far."""
FLOOR = 0.002
"""Least chance of an allowed device, over the number of devices: no choice is lost for good."""


def solve_cem(task: Task) -> None:
    """Draws placements, moves the chances of each group's devices towards the best of them, and again."""
    starts, times = score_starts(task)
    problem = task.problem
    size = int(min(max(10, math.sqrt(min(task.budget.evaluations, 10_000))), 64))
    chances = start_chances(starts[0], problem.group_allowed)
    elite, elite_loss = starts[:1], losses(problem, problem.grouping, starts[:1], times[:1])
    keep = max(1, round(CEM_ELITE * size))
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
    return np.asarray(moved / moved.sum(axis=1, keepdims=True))


def draw(chances: NDArray[np.float64], count: int, generator: np.random.Generator) -> NDArray[np.int32]:
    """(count, G) int32: a device for each group by its chances (G, D)."""
    place = (generator.random((count, len(chances), 1)) >= np.cumsum(chances, axis=1)).sum(axis=2)
    last = chances.shape[1] - 1 - np.argmax(chances[:, ::-1] > 0, axis=1)  # where rounding left the sum below 1
    return np.asarray(np.minimum(place, last), dtype=np.int32)


GENETIC_ELITE, MUTANTS, BIAS = 0.2, 0.15, 0.7
"""Shares of a population that is kept and that is drawn anew, and the chance of a child's key from its elite parent."""


def solve_genetic(task: Task) -> None:
    """Evolves keys, one for each group, from those of the starts and random ones."""
    starts, times = score_starts(task)
    problem, generator = task.problem, task.generator
    size = population_size(task.budget.evaluations)
    keys = np.concatenate((keys_of(starts, problem.group_allowed), generator.random((size, starts.shape[1]))))[:size]
    known = min(len(starts), size)
    loss = losses(problem, problem.grouping, starts[:known], times[:known])
    drawn = decode(keys[known:], problem.group_allowed)
    loss = np.concatenate((loss, losses(problem, problem.grouping, drawn, task.score_groups(drawn))))
    num_elite, num_mutants = max(1, int(GENETIC_ELITE * size)), max(1, int(MUTANTS * size))
    while not task.is_spent:
        order = np.argsort(loss, kind="stable")
        elite, others = order[:num_elite], order[num_elite:]
        count = size - num_elite - num_mutants
        first, second = keys[generator.choice(elite, count)], keys[generator.choice(others, count)]
        children = np.where(generator.random(first.shape) < BIAS, first, second)
        fresh = np.concatenate((generator.random((num_mutants, keys.shape[1])), children))
        placed = decode(fresh, problem.group_allowed)
        fresh_loss = losses(problem, problem.grouping, placed, task.score_groups(placed))
        keys, loss = np.concatenate((keys[elite], fresh)), np.concatenate((loss[elite], fresh_loss))


def population_size(evaluations: float) -> int:
    """About twice the square root of the budget, between 10 and 200."""
    return 100 if math.isinf(evaluations) else int(min(max(10, 2 * math.sqrt(evaluations)), 200))


def decode(keys: NDArray[np.float64], allowed: NDArray[np.bool_]) -> NDArray[np.int32]:
    """(B, G) int32: the device of each group; the keys [0, 1) are cut evenly over the group's allowed devices."""
    place = (keys * allowed.sum(axis=1)).astype(np.int64)  # which of its allowed devices
    ranked = np.argsort(~allowed, axis=1, kind="stable").astype(np.int32)  # allowed devices first
    return np.asarray(ranked[np.arange(len(allowed)), place])


def keys_of(placements: NDArray[np.int32], allowed: NDArray[np.bool_]) -> NDArray[np.float64]:
    """(B, G) float64: the keys in the middle of those that decode to `placements`."""
    place = (np.cumsum(allowed, axis=1) - 1)[np.arange(len(allowed)), placements]
    return np.asarray((place + 0.5) / allowed.sum(axis=1))
