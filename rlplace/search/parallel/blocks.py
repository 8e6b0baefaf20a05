"""A step that is cut into micro-batches: runs of its chain, for each micro-batch or for all of them, and as a table."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.grouping.groups import Grouping
from rlplace.graphs.opgraph import FORWARD
from rlplace.measure.problem import Problem
from rlplace.search.improve.coarsening import atoms, numbered
from rlplace.search.improve.moves import Table
from rlplace.search.parallel.stages import cut_stages
from rlplace.search.parallel.step_roles import StepRoles


def chain_runs(problem: Problem, step: StepRoles, count: int) -> NDArray[np.int32]:
    """(P,) int32: the chain in `count` runs of equal work, as many as it has places at the most."""
    count = max(min(count, step.num_positions), 1)
    time_s = np.where(problem.graph.is_source, 0.0, problem.costs.op_time_s.mean(axis=1))
    work_s = np.bincount(step.op_position, weights=time_s, minlength=step.num_positions)
    return cut_stages(work_s.astype(np.float64), np.ones(count))


def run_table(problem: Problem, step: StepRoles, count: int) -> Table:
    """Cells of ops: runs of the chain, `count` of them, by micro-batches; what is owned in column 0, shared ops in 1.

    Args:
        problem: what is placed.
        step: its roles.
        count: runs.
    """
    column = np.where(problem.graph.colocation >= 0, 0, step.follows + 2)
    return Table(chain_runs(problem, step, count)[step.op_position], column.astype(np.int32))


def run_groups(
    problem: Problem,
    step: StepRoles,
    count: int,
    *,
    micro_batches: bool = True,
    phases: bool = False,
    owners: bool = False,
) -> Grouping:
    """Groups of ops that belong to one of `count` runs of the chain, unions of `atoms` but for the arguments below.

    Args:
        problem: what is placed.
        step: its roles.
        count: runs.
        micro_batches: whether micro-batches are apart, and what they share from them.
        phases: whether forward is apart from the rest.
        owners: whether each co-location class is a group of its own.
    """
    graph, fine = problem.graph, atoms(problem)
    first = np.unique(fine.op_group, return_index=True)[1]
    jobs = np.flatnonzero(~graph.is_source)
    leaders = np.full(fine.num_groups, -1, dtype=np.int64)
    leaders[fine.op_group[jobs[::-1]]] = jobs[::-1]  # the first op of each atom that computes
    leaders = np.where(leaders >= 0, leaders, first)
    is_owned = (graph.colocation >= 0)[first]
    parts = [chain_runs(problem, step, count)[step.op_position[first]].astype(np.int64)]
    if micro_batches:
        parts += [np.where(is_owned, -2, step.follows[leaders]).astype(np.int64)]
    if phases:
        parts += [np.where(is_owned, 2, graph.phases[leaders] != FORWARD).astype(np.int64)]
    if owners:
        parts += [np.where(is_owned, graph.colocation[first], -1).astype(np.int64)]
    if problem.allowed is not None:
        table = np.ones((fine.num_groups, problem.host.num_devices), dtype=np.bool_)
        np.logical_and.at(table, fine.op_group, problem.allowed)
        parts += [np.unique(table, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)]
    label = np.unique(np.stack(parts), axis=1, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return numbered(label[fine.op_group], f"runs of a chain:{count}")
