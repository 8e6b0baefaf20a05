"""`multilevel`: annealing over groups that are coarse first and are cut finer as it goes (as in Walshaw 2004)."""

from __future__ import annotations

from rlplace.graphs.grouping import Grouping
from rlplace.measure.problem import Problem
from rlplace.search.anneal import anneal_groups
from rlplace.search.levels import atoms, coarser, finer
from rlplace.search.starts import project, score_starts
from rlplace.search.task import Task


def solve(task: Task) -> None:
    """Anneals each level in turn from the best placement of the one before, for an equal share of the budget each."""
    starts, times = score_starts(task)
    problem = task.problem
    devices, step_s = problem.grouping.expand(starts[0]), float(times[0])
    ladder, begin = levels(problem), task.spent
    for rung, grouping in enumerate(ladder):
        groups = project(problem, grouping, devices)
        if grouping.num_groups < problem.grouping.num_groups:  # merged groups may have been on several devices
            step_s = float(task.score(grouping.expand(groups))[0])
        until = begin + (1.0 - begin) * (rung + 1) / len(ladder)
        groups, step_s = anneal_groups(task, grouping, groups, step_s, until=until)
        devices = grouping.expand(groups)


def levels(problem: Problem) -> list[Grouping]:
    """Groupings that nest, coarse to fine: about 16 and 64 groups, the problem's own, about 256, 1024, and atoms.

    Those with fewer than a quarter more groups than the one before are left out.
    """
    own = problem.grouping
    ladder: list[Grouping] = []
    for count in (64, 16):
        if count < own.num_groups:
            ladder.insert(0, coarser(problem, ladder[0] if ladder else own, count))
    ladder.append(own)
    for count in (256, 1024):
        if count > own.num_groups:
            ladder.append(finer(problem, ladder[-1], count))
    ladder.append(atoms(problem))
    kept = [ladder[0]]
    for grouping in ladder[1:]:
        if grouping is own or grouping.num_groups >= 1.25 * kept[-1].num_groups:
            kept.append(grouping)
    return kept
