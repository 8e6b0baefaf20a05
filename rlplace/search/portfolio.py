"""`portfolio`: the mixture of searches that did best over several problems at each budget."""

from __future__ import annotations

import math

from rlplace.search.anneal import anneal_finer, anneal_groups
from rlplace.search.evolve import evolve_start
from rlplace.search.levels import atoms
from rlplace.search.starts import score_starts, try_all
from rlplace.search.task import Task

RUN = 10_000
"""Evaluations that pay for a run: with twice as many and more, several runs share half of the budget ..."""
MOST_RUNS = 8
"""... but no more than these."""


def solve(task: Task) -> None:
    """All placements of groups where they are few; else heuristics, then runs of tuned list scheduling and annealing
    over groups, of which the best is annealed over ever finer groups.
    """
    starts, times = score_starts(task)
    grouping = task.problem.grouping
    if try_all(task, share=0.5):
        if atoms(task.problem).num_groups > grouping.num_groups and task.best_devices is not None:
            anneal_finer(task, task.best_devices, task.best_s, until=1.0)
        return
    left = task.evaluations_left
    runs = 1 if left < 2 * RUN else MOST_RUNS if math.isinf(left) else min(int(left / RUN), MOST_RUNS)
    if runs == 1:
        groups, step_s = evolve_start(task, starts[0], float(times[0]), until=1.0)
        anneal_finer(task, grouping.expand(groups), step_s, until=1.0)
        return
    begin = task.spent
    for run in range(1, runs + 1):
        until = begin + (1.0 - begin) * 0.5 * run / runs
        groups, step_s = evolve_start(task, starts[0], float(times[0]), until=until)
        groups, step_s = anneal_groups(task, grouping, groups, step_s, until=until)
    devices = grouping.expand(groups) if task.best_devices is None else task.best_devices
    anneal_finer(task, devices, task.best_s, until=1.0)
