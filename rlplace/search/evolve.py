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
STARTS = np.array((
    (0.54, 0.85, 0.81, 1.88, 0.23, 0.39, 0.01, 0.96, -0.12),
    (0.84, 1.46, 1.25, 1.44, 0.59, -0.06, -0.13, 0.79, 0.0),
    (0.57, 0.37, 0.47, 1.26, 2.89, 0.11, 1.42, -0.15, -0.52),
    (1.33, 0.51, 0.9, 0.39, 0.16, 0.46, 0.02, 0.03, 0.19),
    (1.33, 1.32, 0.88, 2.12, 1.35, 0.42, 1.22, 1.1, 0.0),
    (0.26, 0.58, 1.08, 0.04, 0.42, 0.43, 0.36, 0.75, 0.0),
    (1.09, 0.39, 0.79, 2.35, 0.0, 0.44, 0.73, 0.92, -0.16),
    (0.0, 1.28, 1.08, 1.06, 0.55, -0.26, 0.36, -0.09, -0.39),
    (0.89, 1.26, 1.19, 0.37, 1.5, 0.0, 0.55, 0.43, 0.22),
    (1.25, 0.66, 0.88, 0.82, 1.3, -0.18, 1.49, 0.73, -0.48),
    (0.72, 0.0, 0.96, 1.97, 2.74, -0.24, 0.0, 0.45, 0.0),
    (0.41, 1.41, 0.04, 0.55, 0.73, 0.36, 0.69, 0.59, -0.33),
    (0.0, 0.0, 1.31, 2.69, 0.68, -0.27, 0.11, 1.11, -0.58),
    (0.14, 0.0, 1.07, 0.0, 1.69, -0.24, 1.23, 0.0, -0.13),
    (0.36, 0.0, 0.6, 2.82, 1.06, 0.0, 0.31, 1.46, -0.16),
    (0.23, 0.0, 1.11, 0.41, 0.94, 0.34, 1.33, 0.38, -0.31),
))  # fmt: skip
"""Weights to begin with, in the order of `FEATURES`: of 250 drawn uniformly, the 16 of which the best is best in the
geometric mean over the training steps of four models (`rnnlm`, `inception_v3`, `gpt2`, `clip`) on five hosts."""
TUNING_SHARE = 0.15
"""Share of the budget that goes into tuning."""
TUNING = 500
"""Evaluations after which tuning hardly finds more."""
SIGMA = 0.2
"""Standard deviation of the first weights around the best of `STARTS`."""


def solve(task: Task) -> None:
    """Tunes the scheduler for a share of the budget, at most `TUNING` evaluations, then anneals what it found."""
    devices, step_s = evolve_start(task, *best_start(task), until=1.0)
    anneal_finer(task, devices, step_s, until=1.0)


def evolve_start(
    task: Task, start: NDArray[np.int32], start_s: float, *, until: float
) -> tuple[NDArray[np.int32], float]:
    """Devices (N,) int32 to anneal from until a share of the budget, and their step time.

    They are found by tuning the scheduler for `TUNING_SHARE` of what is left until then, at most `TUNING` evaluations.

    Args:
        task: scores and counts.
        start: (N,) what comes back if tuning finds nothing better.
        start_s: its step time.
        until: share of the task's budget at which annealing will stop.
    """
    tuning = min(
        TUNING_SHARE * (until - task.spent), TUNING / task.budget.evaluations if task.evaluations_left < np.inf else 1.0
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
    placed = greedy.place(STARTS)
    first = np.sort(np.unique(placed, axis=0, return_index=True)[1])  # equal placements are scored once
    first = first[: int(max(1, min(len(first), until * task.budget.evaluations - task.evaluations)))]
    step_s = task.score(grouping.expand(placed[first]))
    loss = losses(task.problem, grouping, placed[first], step_s)
    leader = int(np.argmin(loss))
    best, best_s, start = placed[first[leader]], float(step_s[leader]), STARTS[first[leader]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # cma warns of flat losses, which groups' devices make often
        strategy = cma.CMAEvolutionStrategy(start.tolist(), SIGMA, options)
        while task.spent < until and not task.is_spent:
            weights = strategy.ask()
            count = int(max(1, min(POPULATION, until * task.budget.evaluations - task.evaluations)))
            placed = greedy.place(np.array(weights[:count]))
            step_s = task.score(grouping.expand(placed))
            leader = int(np.argmin(step_s))
            if step_s[leader] < best_s:
                best, best_s = placed[leader], float(step_s[leader])
            if count < POPULATION:
                break
            strategy.tell(weights, losses(task.problem, grouping, placed, step_s).tolist())
    return best, best_s
