"""A descent by blocks, the costliest first: what a small budget finds for certain before annealing draws at random."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.problem import Problem
from rlplace.search.groups import allowed_devices
from rlplace.search.improve.coarsening import by_module, nested, split
from rlplace.search.improve.greedy_starts import evaluations_until, has_few_evaluations
from rlplace.search.task import Task

SHARE = 0.5
"""Most of what is left of a budget that goes into it."""
MOST = 200
"""Evaluations after which annealing finds more."""
BLOCKS = 60
"""Blocks of a level that are tried, the costliest; small ones change little."""
TARGETS = 3
"""Devices that a block is tried on, the least loaded."""


def sweep(
    task: Task, devices: NDArray[np.int32], step_s: float, *, until: float, most: int = MOST
) -> tuple[NDArray[np.int32], float]:
    """Devices (N,) int32 that no tried move of one block improves, or where its share of the budget ended; step time.

    Blocks are those of `blocks`, each split where its ops are on several devices.
    A block is tried on the least loaded other devices, and the best of them is taken if it is an improvement; all
    levels are gone through again until none is. Nothing is drawn, so that no seed is luckier than another.

    Args:
        task: scores and counts.
        devices: (N,) where to start from; comes back as it is where it does not fit into memory.
        step_s: its step time.
        until: share of the task's budget at which annealing will stop.
        most: evaluations after which it ends at the latest.
    """
    problem = task.problem
    stop = task.evaluations + min(SHARE * evaluations_until(task, until), most)
    until = task.spent + SHARE * (until - task.spent)
    op_time_s, ops_N = problem.costs.op_time_s, np.arange(problem.graph.num_ops)
    levels, is_better = blocks(problem, whole_modules=not has_few_evaluations(task)), np.isfinite(step_s)
    while is_better:
        before_s = step_s
        for level in levels:
            parts = split(level, devices)
            allowed = allowed_devices(problem, parts)
            cost_s = np.bincount(parts.op_group, weights=op_time_s.mean(axis=1))
            for block in np.argsort(-cost_s, kind="stable")[:BLOCKS].tolist():
                left = min(stop - task.evaluations, evaluations_until(task, until))
                if left < 1:
                    return devices, step_s
                ops = np.flatnonzero(parts.op_group == block)
                load_s = np.bincount(devices, op_time_s[ops_N, devices], minlength=problem.host.num_devices)
                others = allowed[block] & (np.arange(len(load_s)) != devices[ops[0]])
                targets = [device for device in np.argsort(load_s, kind="stable") if others[device]]
                moved = np.repeat(devices[None], min(len(targets), TARGETS, int(left)), axis=0)
                if not len(moved):
                    continue
                moved[:, ops] = np.array(targets[: len(moved)], dtype=np.int32)[:, None]
                moved_s = task.score(moved, np.full(len(moved), step_s))
                first = int(np.argmin(moved_s))
                if moved_s[first] < step_s:
                    devices, step_s = moved[first], float(moved_s[first])
        is_better = step_s < before_s
    return devices, step_s


def blocks(problem: Problem, *, whole_modules: bool = True) -> list[Grouping]:
    """Whole modules, the coarsest of `nested`, and the problem's own groups.

    Args:
        problem: what is placed.
        whole_modules: whether modules are among them: they are many, and few evaluations are better spent on the rest.
    """
    modules = [by_module(problem, 1)] if whole_modules else []
    return [*modules, nested(problem)[0], problem.grouping]
