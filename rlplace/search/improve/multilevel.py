"""`multilevel`: annealing over groups that are coarse first and are cut finer as it goes (as in Walshaw 2004)."""

from __future__ import annotations

from rlplace.search.improve.coarsening import nested
from rlplace.search.improve.metropolis import anneal_groups
from rlplace.search.improve.warm_starts import score_starts
from rlplace.search.task import Task, majority_devices


def solve(task: Task) -> None:
    """Anneals each level in turn from the best placement of the one before, for an equal share of the budget each."""
    starts, times = score_starts(task)
    problem = task.problem
    devices, step_s = problem.grouping.expand(starts[0]), float(times[0])
    ladder, begin = nested(problem), task.spent
    for rung, grouping in enumerate(ladder):
        groups = majority_devices(problem, devices, grouping)
        if grouping.num_groups < problem.grouping.num_groups:  # merged groups may have been on several devices
            step_s = float(task.score(grouping.expand(groups))[0])
        until = begin + (1.0 - begin) * (rung + 1) / len(ladder)
        groups, step_s = anneal_groups(task, grouping, groups, step_s, until=until)
        devices = grouping.expand(groups)
