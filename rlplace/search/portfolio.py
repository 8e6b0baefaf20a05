"""`portfolio`: the mixture of searches that did best over several problems at each budget."""

from __future__ import annotations

import math

from rlplace.search.anneal import anneal_finer, anneal_split
from rlplace.search.evolve import LEADERS, tune, tuned_start, tuning_share, vary
from rlplace.search.levels import atoms
from rlplace.search.scheduled import scheduled_start
from rlplace.search.starts import try_all
from rlplace.search.task import Task

RUN = 50_000
"""Evaluations that pay for a run: with twice as many and more, several runs share half of the budget ..."""
MOST_RUNS = 8
"""... but no more than these."""


def solve(task: Task) -> None:
    """All placements of groups where they are few; else heuristics, then runs of tuned list scheduling, each
    from other weights, and annealing over groups, of which the best is annealed over ever finer groups.
    """
    devices, step_s, leaders = scheduled_start(task)
    if try_all(task, share=0.5):
        if atoms(task.problem).num_groups > task.problem.grouping.num_groups and task.best_devices is not None:
            anneal_finer(task, task.best_devices, task.best_s, until=1.0)
        return
    left = task.evaluations_left
    runs = 1 if left < 2 * RUN else MOST_RUNS if math.isinf(left) else min(int(left / RUN), MOST_RUNS)
    if runs == 1:
        anneal_finer(task, *tuned_start(task, devices, step_s, leaders, until=1.0), until=1.0)
        return
    leaders = vary(task, leaders, until=1.0)[:LEADERS]
    begin = task.spent
    for run in range(runs):
        until = begin + (1.0 - begin) * 0.5 * (run + 1) / runs
        found = [(devices, step_s)]
        if leaders:
            tuned = task.spent + tuning_share(task, until=until)
            found.append(tune(task, leaders[run % len(leaders)], until=tuned))
        anneal_split(task, task.problem.grouping, *min(found, key=lambda pair: pair[1]), until=until)
    if task.best_devices is not None:
        devices, step_s = task.best_devices, task.best_s
    anneal_finer(task, devices, step_s, until=1.0)
