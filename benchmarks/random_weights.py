"""Random weights of the list scheduler, over the groupings of `portfolio`: what policies that place by it must beat."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.search import Task
from rlplace.search.improve.starting_points import GROUPINGS, Schedulers, score_weights

RANGES = np.array([2.5, 2.5, 4.0, 6.0, 5.0, 1.0, 4.0, 3.0, 1.0])
"""What weights are drawn from, uniformly, before they are spread by a log-normal factor, as for `FIRST_WEIGHTS`."""
MOST_IDLE = 200
"""Weights in a row without a new placement after which there are taken to be no more."""


def draw(generator: np.random.Generator) -> NDArray[np.float64]:
    """(9,) weights; a quarter of them are 0, some of `module` and half of `order` are negative."""
    weights = generator.random(len(RANGES)) * RANGES * np.exp(generator.normal(0.0, 0.7, len(RANGES)))
    weights[7] *= -0.3 if generator.random() < 0.3 else 1.0
    weights[8] *= -1.0 if generator.random() < 0.5 else 1.0
    weights[generator.random(len(RANGES)) < 0.25] = 0.0
    return weights


def solve(task: Task) -> None:
    """Scores what random weights give, each over a random grouping, until the budget is spent."""
    schedulers, seen, idle = Schedulers(task.problem), set[bytes](), 0
    while not task.is_spent and idle < MOST_IDLE:
        before = task.evaluations
        grouping = GROUPINGS[int(task.generator.integers(len(GROUPINGS)))]
        score_weights(task, [(schedulers[grouping], draw(task.generator))], seen, until=1.0)
        idle = 0 if task.evaluations > before else idle + 1
