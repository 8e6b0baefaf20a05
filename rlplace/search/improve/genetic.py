"""`genetic`: a biased random-key genetic algorithm (BRKGA; Gonçalves & Resende 2011)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from rlplace.search.improve.warm_starts import losses, score_starts
from rlplace.search.task import Task

ELITE, MUTANTS, BIAS = 0.2, 0.15, 0.7
"""Shares of a population that is kept and that is drawn anew, and the chance of a child's key from its elite parent."""


def solve(task: Task) -> None:
    """Evolves keys, one for each group, from those of the starts and random ones."""
    starts, times = score_starts(task)
    problem, generator = task.problem, task.generator
    size = population_size(task.budget.evaluations)
    keys = np.concatenate((keys_of(starts, problem.group_allowed), generator.random((size, starts.shape[1]))))[:size]
    known = min(len(starts), size)
    loss = losses(problem, problem.grouping, starts[:known], times[:known])
    drawn = decode(keys[known:], problem.group_allowed)
    loss = np.concatenate((loss, losses(problem, problem.grouping, drawn, task.score_groups(drawn))))
    num_elite, num_mutants = max(1, int(ELITE * size)), max(1, int(MUTANTS * size))
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
    devices: NDArray[np.int32] = ranked[np.arange(len(allowed)), place]
    return devices


def keys_of(placements: NDArray[np.int32], allowed: NDArray[np.bool_]) -> NDArray[np.float64]:
    """(B, G) float64: the keys in the middle of what decodes to `placements`."""
    place = (np.cumsum(allowed, axis=1) - 1)[np.arange(len(allowed)), placements]
    keys: NDArray[np.float64] = (place + 0.5) / allowed.sum(axis=1)
    return keys
