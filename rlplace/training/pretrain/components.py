"""Which weights of the list scheduler are worth knowing, over which groupings: drawn, varied, and chosen to do best
together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.env.list_schedules import GROUPINGS, Pair

RANGES = np.array([2.5, 2.5, 4.0, 6.0, 5.0, 1.0, 4.0, 3.0, 1.0])
"""What weights are drawn from, uniformly, before they are spread by a log-normal factor."""
SPREAD, IS_ZERO = 0.7, 0.25
"""Sigma of that factor, and the share of weights that are 0."""
VARIED, VARIATION, LEAST = 0.6, 0.4, 0.3
"""Share of weights that a variation changes, by how much of themselves, and what they count as at least for it."""

Floats = NDArray[np.float64]


def draw(generator: np.random.Generator, count: int) -> Floats:
    """(count, 9) weights; a quarter of them are 0, some of `module` and half of `order` are negative."""
    weights = generator.random((count, 9)) * RANGES * np.exp(generator.normal(0.0, SPREAD, (count, 9)))
    weights[:, 7] *= np.where(generator.random(count) < 0.3, -0.3, 1.0)
    weights[:, 8] *= np.where(generator.random(count) < 0.5, -1.0, 1.0)
    weights[generator.random(weights.shape) < IS_ZERO] = 0.0
    return np.asarray(weights.round(2))


def vary(generator: np.random.Generator, bases: Floats, count: int) -> Floats:
    """(count, 9) weights around those of `bases`, more than half of each varied; `memory` stays at 0 or more."""
    parents = bases[generator.integers(len(bases), size=count)]
    scale = VARIATION * np.maximum(np.abs(parents), LEAST) * (generator.random(parents.shape) < VARIED)
    weights = parents + generator.normal(size=parents.shape) * scale
    weights[:, 5] = np.maximum(weights[:, 5], 0.0)
    return np.asarray(weights.round(2))


def over_groupings(weights: Floats) -> list[Pair]:
    """Every one of W weights (W, 9) over every grouping."""
    return [(name, tuple(row)) for row in weights.tolist() for name in GROUPINGS]


def best_together(log_ratios: Floats, count: int) -> list[int]:
    """Up to `count` columns of (P, M) log ratios, one after the other the one that most improves the best of all.

    Rows count alike: what is made least is the mean over rows of the least of the columns that are taken.

    Example:
        >>> best_together(np.array([[0.0, 0.2, 0.5], [0.9, 0.3, 0.0]]), 2)
        [1, 2]
    """
    least = np.full(len(log_ratios), log_ratios.max(initial=0.0))
    chosen: list[int] = []
    is_left = np.ones(log_ratios.shape[1], dtype=np.bool_)
    for _ in range(min(count, log_ratios.shape[1])):
        value = np.where(is_left, np.minimum(least[:, None], log_ratios).mean(axis=0), np.inf)
        chosen.append(int(value.argmin()))
        is_left[chosen[-1]] = False
        least = np.minimum(least, log_ratios[:, chosen[-1]])
    return chosen
