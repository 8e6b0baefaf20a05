"""`portfolio`: the mixture of searches that did best over several problems at each budget."""

from __future__ import annotations

import math

from rlplace.search.anneal import anneal_finer, anneal_split
from rlplace.search.evolve import evolve_start
from rlplace.search.levels import atoms
from rlplace.search.starts import best_start, try_all
from rlplace.search.task import Task

RUN = 50_000
"""Evaluations that pay for a run: with twice as many and more, several runs share half of the budget ..."""
MOST_RUNS = 8
"""... but no more than these."""


def solve(task: Task) -> None:
    """All placements of groups where they are few; else heuristics, then runs of tuned list scheduling and annealing
    over groups, of which the best is annealed over ever finer groups.
    """
    devices, step_s = best_start(task)
    if try_all(task, share=0.5):
        if atoms(task.problem).num_groups > task.problem.grouping.num_groups and task.best_devices is not None:
            anneal_finer(task, task.best_devices, task.best_s, until=1.0)
        return
    left = task.evaluations_left
    runs = 1 if left < 2 * RUN else MOST_RUNS if math.isinf(left) else min(int(left / RUN), MOST_RUNS)
    if runs == 1:
        anneal_finer(task, *evolve_start(task, devices, step_s, until=1.0), until=1.0)
        return
    begin = task.spent
    for run in range(1, runs + 1):
        until = begin + (1.0 - begin) * 0.5 * run / runs
        found, found_s = evolve_start(task, devices, step_s, until=until)
        anneal_split(task, task.problem.grouping, found, found_s, until=until)
    if task.best_devices is not None:
        devices, step_s = task.best_devices, task.best_s
    anneal_finer(task, devices, step_s, until=1.0)
