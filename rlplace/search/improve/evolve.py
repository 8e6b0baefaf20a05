"""`evolve`: the weights of `Greedy`, tuned on the problem: variations of several, then CMA-ES from the best one."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlplace.search.improve.anneal import anneal_finer
from rlplace.search.improve.greedy_starts import (
    GreedyPlacement,
    best_start_with_greedy,
    evaluations_until,
    has_few_evaluations,
    score_weights,
)
from rlplace.search.improve.warm_starts import losses
from rlplace.search.task import Task

POPULATION = 8
TUNING_SHARE = 0.15
"""Share of the budget that goes into tuning."""
FEW_TUNING_SHARE = 0.5
"""The same where evaluations are few."""
TUNING = 500
"""Evaluations after which tuning hardly finds more."""
SIGMA = 0.2
"""Standard deviation of the first weights of CMA-ES around the best known ones."""
LEADERS = 4
"""Weights, each with its grouping, that are varied: the best so far."""
VARIED = 64
"""Evaluations of variations after which no more populations of them are begun."""
VARIATION = 0.4
"""Standard deviation of a weight that is varied, as a share of it."""
LEAST = 0.3
"""Weights nearer to 0 than this are varied as if they were this large."""
_TRIES = 2000


def solve(task: Task) -> None:
    """Tunes the scheduler for a share of the budget, at most `TUNING` evaluations, then anneals what it found."""
    devices, step_s, leaders = best_start_with_greedy(task)
    tuned = tuned_start(task, devices, step_s, leaders, until=1.0)
    anneal_finer(task, *tuned, others=[(devices, step_s)], until=1.0)


def tuned_start(
    task: Task, start: NDArray[np.int32], start_s: float, leaders: Sequence[GreedyPlacement], *, until: float
) -> tuple[NDArray[np.int32], float]:
    """Devices (N,) int32 to anneal from until a share of the budget, and their step time.

    Args:
        task: scores and counts.
        start: (N,) what comes back if tuning finds nothing better.
        start_s: its step time.
        leaders: weights to begin with.
        until: share of the task's budget at which annealing will stop.
    """
    tuned = task.spent + tuning_share(task, until=until)
    leaders = vary(task, leaders, until=tuned)
    found = [(start, start_s)]
    if leaders:
        found += [(leaders[0].devices, leaders[0].step_s), tune(task, leaders[0], until=tuned)]
    return min(found, key=lambda pair: pair[1])


def tuning_share(task: Task, *, until: float) -> float:
    """Share of the budget to tune for: `TUNING_SHARE` of what is left until then, at most `TUNING` evaluations.

    With few evaluations it is `FEW_TUNING_SHARE` of what is left.
    """
    if has_few_evaluations(task):
        return FEW_TUNING_SHARE * (until - task.spent)
    most = 1.0 if math.isinf(task.budget.evaluations) else TUNING / task.budget.evaluations
    return min(TUNING_SHARE * (until - task.spent), most)


def vary(task: Task, leaders: Sequence[GreedyPlacement], *, until: float) -> list[GreedyPlacement]:
    """`leaders` and what about `VARIED` variations of their weights give, best first.

    Each varies about half of the weights of one of the best `LEADERS` at that time, whichever its grouping is: weights
    that do well in different ways are worth more than many steps from one of them. The draws are always the same, so
    that all seeds anneal from one placement, and a small budget does not hang on luck.

    Args:
        task: scores and counts.
        leaders: weights to begin with.
        until: share of the task's budget at which to stop.
    """
    generator, tries, most = np.random.default_rng(0), 0, task.evaluations + VARIED
    found, seen = sorted(leaders, key=lambda one: one.loss), {one.devices.tobytes() for one in leaders}
    while found and tries < _TRIES and task.evaluations < most and evaluations_until(task, until) >= 1:
        pairs = []
        for _ in range(POPULATION):
            parent = found[int(generator.integers(min(len(found), LEADERS)))]
            scale = (
                VARIATION * np.maximum(np.abs(parent.weights), LEAST) * (generator.random(len(parent.weights)) < 0.5)
            )
            pairs.append((parent.greedy, parent.weights + generator.normal(size=len(scale)) * scale))
        tries += len(pairs)
        found = sorted([*found, *score_weights(task, pairs, seen, until=until)], key=lambda one: one.loss)
    return found


def tune(task: Task, leader: GreedyPlacement, *, until: float) -> tuple[NDArray[np.int32], float]:
    """The best devices (N,) int32 that CMA-ES (Hansen 2016, arXiv:1604.00772) finds from `leader`, and their step time.

    Args:
        task: scores and counts.
        leader: weights to begin with, and their grouping.
        until: share of the task's budget at which to stop; the last population may be cut short by it, the first
            is not begun.
    """
    if evaluations_until(task, until) < POPULATION:
        return leader.devices, leader.step_s
    import cma

    greedy, grouping = leader.greedy, leader.greedy.grouping
    draws = np.random.RandomState(int(task.generator.integers(1, 2**31)))
    # by default it seeds NumPy's global generator and draws from that, which belongs to the user and to all threads
    options = {"seed": math.nan, "randn": draws.randn, "verbose": -9, "popsize": POPULATION}
    best, best_s = leader.devices, leader.step_s
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # cma warns of flat losses, which groups' devices make often
        strategy = cma.CMAEvolutionStrategy(leader.weights.tolist(), SIGMA, options)
        most = task.evaluations + TUNING
        while (count := int(min(POPULATION, evaluations_until(task, until), most - task.evaluations))) >= 1:
            weights = strategy.ask()
            groups = greedy.place(np.array(weights[:count]))
            step_s = task.score(grouping.expand(groups))
            first = int(np.argmin(step_s))
            if step_s[first] < best_s:
                best, best_s = grouping.expand(groups)[first], float(step_s[first])
            if count < POPULATION:
                break
            strategy.tell(weights, losses(task.problem, grouping, groups, step_s).tolist())
    return best, best_s
