"""`evolve`: the weights of `Greedy`, tuned on the problem by CMA-ES (Hansen 2016, arXiv:1604.00772)."""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.grouping import Grouping
from rlplace.search.anneal import anneal_finer
from rlplace.search.greedy import Greedy
from rlplace.search.starts import best_start, losses
from rlplace.search.task import Task

POPULATION = 8
START = (0.5, 0.5, 0.5, 1.2, 0.9, 0.0, 0.4, 0.6, -0.1)
"""Weights to start from, in the order of `FEATURES`: about the middle of those tuned on several problems."""
TUNING = 500
"""Evaluations after which tuning hardly finds more."""
SIGMA = 0.3
"""Standard deviation of the first weights around `START`."""


def solve(task: Task) -> None:
    """Tunes the scheduler for 30 % of the budget, at most 500 evaluations, then anneals what it found."""
    devices, step_s = evolve_start(task, *best_start(task), until=1.0)
    anneal_finer(task, devices, step_s, until=1.0)


def evolve_start(
    task: Task, start: NDArray[np.int32], start_s: float, *, until: float
) -> tuple[NDArray[np.int32], float]:
    """Devices (N,) int32 to anneal from until a share of the budget, and their step time.

    They are found by tuning the scheduler for 30 % of what is left until then, at most `TUNING` evaluations.

    Args:
        task: scores and counts.
        start: (N,) what comes back if tuning finds nothing better.
        start_s: its step time.
        until: share of the task's budget at which annealing will stop.
    """
    tuning = min(
        0.3 * (until - task.spent), TUNING / task.budget.evaluations if task.evaluations_left < np.inf else 1.0
    )
    groups, step_s = evolve_groups(task, task.problem.grouping, until=task.spent + tuning)
    return (task.problem.grouping.expand(groups), step_s) if step_s <= start_s else (start, start_s)


def evolve_groups(task: Task, grouping: Grouping, *, until: float) -> tuple[NDArray[np.int32], float]:
    """The best devices (G,) int32 of `grouping`'s groups that tuned weights give, and their step time.

    Args:
        task: scores and counts.
        grouping: what moves together.
        until: share of the task's budget at which to stop; the last population may be cut short by it.
    """
    import cma

    greedy = Greedy.of(task.problem, grouping)
    options = {"seed": int(task.generator.integers(1, 2**31)), "verbose": -9, "popsize": POPULATION}
    best, best_s = greedy.place(np.array(START))[0], np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # cma warns of flat losses, which groups' devices make often
        strategy = cma.CMAEvolutionStrategy(list(START), SIGMA, options)
        while task.spent < until and not task.is_spent:
            weights = strategy.ask()
            count = int(max(1, min(POPULATION, until * task.budget.evaluations - task.evaluations)))
            placed = greedy.place(np.array(weights[:count]))
            step_s = task.score(grouping.expand(placed))
            first = int(np.argmin(step_s))
            if step_s[first] < best_s:
                best, best_s = placed[first], float(step_s[first])
            if count < POPULATION:
                break
            strategy.tell(weights, losses(task.problem, grouping, placed, step_s).tolist())
    return best, best_s
