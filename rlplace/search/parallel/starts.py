"""Where searches of a step that is cut into micro-batches start: the best layouts, and what is next to them.

A step that is cut into micro-batches: runs of its chain, for each micro-batch or for all of them, and as a table.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.grouping.groups import Grouping
from rlplace.graphs.opgraph import FORWARD
from rlplace.measure.problem import Problem
from rlplace.search.improve.coarsening import atoms, numbered
from rlplace.search.improve.moves import Table
from rlplace.search.parallel.hybrid import Field, StagePlan
from rlplace.search.parallel.layouts import Layout, cut_stages, layouts, placement_of
from rlplace.search.parallel.step_roles import StepRoles, step_roles
from rlplace.search.task import Task

SHARE = 0.15
"""Most of a budget that layouts take, but for one batch of them; what is next to the best ones takes as much again."""
FEW, FEW_SHARE = 300, 0.4
"""Evaluations of a budget below which layouts take more of it, and how much."""
BATCH = 8
KEPT = 4
"""Layouts that come back at most, the best."""
REFINED = 2
"""Those of them whose neighbours are tried, as long as one is better ..."""
REFINEMENTS = 200
"""... and how many of each at most."""


@dataclass(frozen=True, eq=False)
class Start:
    """A placement to start from.

    Attributes:
        devices: (N,) int32.
        step_s: its step time in the problem's op order; infinite where it does not fit.
        layout: whose placement it is.
    """

    devices: NDArray[np.int32]
    step_s: float
    layout: Layout


def parallel_starts(task: Task) -> list[Start]:
    """The best layouts in the problem's op order, best first; nothing where the step is not cut.

    They are over ops, not groups, which may be too coarse for them: stages x replicas, then stages with different
    numbers of replicas, experts and tables apart. Where the task takes no plans, for which `hybrid_start` does more,
    stages of the best ones are moved as long as that helps.

    Args:
        task: scores and counts.
    """
    problem = task.problem
    if problem.graph.num_micro_batches == 1:
        return []
    field, is_few = Field(task), task.budget.evaluations < FEW
    until = task.spent + (FEW_SHARE if is_few else SHARE)
    found: list[Start] = []
    made = _distinct(field)
    while (not found or task.spent < until) and not task.is_spent:
        batch = list(itertools.islice(made, BATCH))
        if not batch:
            break
        times = task.score(np.stack([devices for devices, _ in batch])).tolist()
        found += [Start(devices, step_s, layout) for (devices, layout), step_s in zip(batch, times, strict=True)]
        found = sorted(found, key=lambda one: one.step_s)[:KEPT]
    if not is_few and not task.takes_plans:
        until = task.spent + SHARE
        found[:REFINED] = [_refined(field, one, until) for one in found[:REFINED]]
    return sorted(found, key=lambda one: one.step_s)


def first_layouts(problem: Problem, count: int) -> list[NDArray[np.int32]]:
    """(N,) int32: the first `count` layouts of a step that is cut into micro-batches, none where it is not."""
    if problem.graph.num_micro_batches == 1:
        return []
    step = step_roles(problem.graph)
    return [placement_of(problem, layout, step) for layout in itertools.islice(layouts(problem, step), count)]


def _distinct(field: Field) -> Iterator[tuple[NDArray[np.int32], Layout]]:
    """Placements and layouts of a field, each placement once."""
    problem, seen = field.task.problem, set[bytes]()
    for layout in itertools.chain(layouts(problem, field.step), field.candidates()):
        devices = placement_of(problem, layout, field.step)
        if devices.tobytes() not in seen:
            seen.add(devices.tobytes())
            yield devices, layout


def _refined(field: Field, start: Start, until: float) -> Start:
    """The best of a layout, what is next to it and so on in the problem's op order; steps get smaller."""
    task, problem, count = field.task, field.task.problem, field.step.num_positions
    if len(start.layout.role_device) or math.isinf(start.step_s):
        return start
    plan, tries, far = StagePlan.of(start.layout, field.chain), 0, max(count // 16, 1)
    while far:
        is_better = False
        for other in plan.neighbours(count, far):
            if task.is_spent or task.spent >= until or tries >= REFINEMENTS:
                return start
            tries += 1
            layout = other.layout(field.chain)
            devices = placement_of(problem, layout, field.step)
            step_s = float(task.score(devices, np.array([start.step_s]))[0])
            if step_s < start.step_s:
                start, plan, is_better = Start(devices, step_s, layout), other, True
                break
        far = far if is_better else far // 2
    return start


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
