"""`evolve`: the weights of `Greedy`, tuned on the problem by CMA-ES (Hansen 2016, arXiv:1604.00772)."""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.grouping import Grouping
from rlplace.search.anneal import anneal_finer
from rlplace.search.greedy import Greedy
from rlplace.search.starts import losses, score_starts
from rlplace.search.task import Task

POPULATION = 8
START = (0.1, 0.5, 0.3, 1.0, 1.0, 0.0, 0.5, 0.5, 0.1)
"""Weights to start from, in the order of `FEATURES`."""
TUNING = 500
"""Evaluations after which tuning hardly finds more."""
SIGMA = 0.3
"""Standard deviation of the first weights around `START`."""


def solve(task: Task) -> None:
    """Tunes the scheduler for 30 % of the budget, at most 500 evaluations, then anneals what it found."""
    starts, times = score_starts(task)
    evolve_and_anneal(task, starts[0], float(times[0]), until=1.0)


def evolve_and_anneal(
    task: Task, start: NDArray[np.int32], start_s: float, *, until: float
) -> tuple[NDArray[np.int32], float]:
    """The best devices (N,) int32 of ops that tuning the scheduler, then annealing find, and their step time.

    Args:
        task: scores and counts.
        start: (G,) what is annealed if tuning finds nothing better.
        start_s: its step time.
        until: share of the task's budget at which to stop.
    """
    grouping, left = task.problem.grouping, until - task.spent
    tuned = task.spent + min(0.3 * left, TUNING / task.budget.evaluations if task.evaluations_left < np.inf else left)
    groups, step_s = evolve_groups(task, grouping, until=tuned)
    if not step_s <= start_s:
        groups, step_s = start, start_s
    return anneal_finer(task, grouping.expand(groups), step_s, until=until)


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
