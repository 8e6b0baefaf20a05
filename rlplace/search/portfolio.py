"""`portfolio`: the mixture of searches that did best over several problems at each budget."""

from __future__ import annotations

from rlplace.search.anneal import anneal_finer
from rlplace.search.evolve import evolve_and_anneal
from rlplace.search.levels import atoms
from rlplace.search.starts import score_starts, try_all
from rlplace.search.task import Task

RUN = 20_000
"""Evaluations that are worth a run of their own; with several runs, the best of them gets the last third."""
MOST_RUNS = 8


def solve(task: Task) -> None:
    """All placements of groups where they are few; else heuristics, tuned list scheduling and annealing, to ever finer
    groups.

    Up to `RUN` evaluations there is one such run. More are divided into several runs and a last annealing of the best.
    """
    starts, times = score_starts(task)
    problem = task.problem
    if try_all(task, share=0.5):
        if atoms(problem).num_groups > problem.grouping.num_groups and task.best_devices is not None:
            anneal_finer(task, task.best_devices, task.best_s, until=1.0)
        return
    runs = 1 if task.evaluations_left == float("inf") else min(max(1, int(task.evaluations_left / RUN)), MOST_RUNS)
    begin, share = task.spent, 1.0 if runs == 1 else 2 / 3
    for run in range(runs):
        evolve_and_anneal(task, starts[0], float(times[0]), until=begin + (1.0 - begin) * share * (run + 1) / runs)
    if task.best_devices is not None and not task.is_spent:
        anneal_finer(task, task.best_devices, task.best_s, until=1.0)
