"""`anneal`: simulated annealing over groups, then over ops, with structured moves (Kirkpatrick et al. 1983).

A descent by blocks, the costliest first: what a small budget finds for certain before annealing draws at random.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.problem import Problem
from rlplace.search.improve.coarsening import atoms, by_module, by_role, nested, split
from rlplace.search.improve.greedy_starts import best_start_with_greedy, evaluations_until, has_few_evaluations
from rlplace.search.improve.metropolis import AnnealSettings, anneal_split
from rlplace.search.improve.moves import Table
from rlplace.search.parallel.starts import run_groups, run_table
from rlplace.search.parallel.step_roles import step_roles
from rlplace.search.task import Task, allowed_devices

LEAST_RUNS = 16
"""Runs of layers that a step cut into micro-batches is annealed over, at least, however many of these there are."""


@dataclass(frozen=True, eq=False)
class Rung:
    """One step of annealing over finer and finer groups."""

    grouping: Grouping
    share: float
    """Of the budget, in proportion to the other rungs' shares."""
    blocks: Sequence[Grouping] = ()
    """Groupings whose groups move as blocks too."""
    reheat: bool = True
    """Whether many moves start hotter."""
    table: Table | None = None
    """Cells of ops, whose rows move to where the next ones are."""


@dataclass(frozen=True, eq=False)
class Ladder:
    """What is annealed over, one rung after the other."""

    rungs: Sequence[Rung]
    branches: int = 0
    """Short annealings before that, of which the best goes on."""
    branch_rungs: Sequence[Rung] = ()
    """The rungs of each of them."""


def solve(task: Task) -> None:
    """Anneals from the best of heuristics and scheduled placements, over the problem's groups and ever finer ones."""
    devices, step_s, _ = best_start_with_greedy(task)
    anneal_finer(task, devices, step_s, until=1.0)


def anneal_finer(
    task: Task,
    devices: NDArray[np.int32],
    step_s: float,
    *,
    until: float,
    others: Sequence[tuple[NDArray[np.int32], float]] = (),
    settings: AnnealSettings | None = None,
) -> tuple[NDArray[np.int32], float]:
    """The best devices (N,) int32 of ops found from `devices`, and their step time.

    Goes up `ladder`. A budget of few moves begins with a descent by blocks, so that a few draws do not decide what is
    found; with more moves than that, annealing alone gets further.

    Args:
        task: scores and counts.
        devices: (N,) where to start from.
        step_s: their step time.
        until: share of the task's budget at which to stop.
        others: devices (N,) and step times that branches start from in turn with it, where they are feasible.
        settings: of annealing.
    """
    settings = settings or AnnealSettings()
    moves = task.expected_evaluations(until)
    steps = ladder(task.problem, moves, settings)
    if moves < settings.few_moves:
        devices, step_s = sweep(task, devices, step_s, until=until)
    starts = [(devices, step_s), *(other for other in others if other[1] < math.inf or math.isinf(step_s))]
    begin, found = task.spent, []
    for branch in range(steps.branches):
        stop = begin + (until - begin) * settings.branches_share * (branch + 1) / steps.branches
        found.append(_descend(task, *starts[branch % len(starts)], steps.branch_rungs, stop, settings))
    best, best_s = min(found, key=lambda one: one[1]) if found else (devices, step_s)
    return _descend(task, best, best_s, steps.rungs, until, settings)


def ladder(problem: Problem, moves: float, settings: AnnealSettings) -> Ladder:
    """What so many moves go over.

    The problem's groups, then about 256, then atoms, for an equal share each; blocks of all coarser levels move too.
    Where ops repeat, as in a layer that is unrolled over steps, many valleys are nearly as deep, and one annealing is
    lucky or not: short ones, a branch for every `few_moves` up to `most_branches`, go over the problem's groups and
    then over roles (`by_role`), with whole modules as blocks; the best of them goes on over roles, about 256 groups and
    atoms, without being made hot again. Graphs whose ops have no modules are taken for ones that do not repeat.

    Less than `few_moves` are spent at about 256 groups alone: they are too few to move atoms one by one, and groups of
    the problem's own may be too coarse.
    """
    if problem.graph.num_micro_batches > 1:
        return _micro_batched(problem, moves, settings)
    levels = nested(problem)
    own, last = next(rung for rung, level in enumerate(levels) if level is problem.grouping), len(levels) - 1
    middle = next((rung for rung in range(own, last) if levels[rung].num_groups >= settings.num_middle), last)
    num_atoms, has_modules = levels[last].num_groups, any(problem.graph.modules)
    is_repeating = has_modules and num_atoms >= settings.repeats * by_role(problem, 1).num_groups
    modules = [by_module(problem, 1)] if is_repeating else []
    if moves < settings.few_moves:
        return Ladder([Rung(levels[middle], 1.0, modules or levels[:middle])])
    if not is_repeating:
        return Ladder([Rung(levels[rung], 1.0, levels[:rung]) for rung in sorted({own, middle, last})])
    roles = by_role(problem, settings.num_roles)
    return Ladder(
        rungs=[
            Rung(roles, 0.4, modules, reheat=False),
            Rung(levels[middle], 0.35, [*modules, roles], reheat=False),
            Rung(levels[last], 0.25, [*modules, roles, levels[middle]], reheat=False),
        ],
        branches=int(min(max(moves // settings.few_moves, 2), settings.most_branches)),
        branch_rungs=[Rung(problem.grouping, 0.4, modules), Rung(roles, 0.6, [*modules, problem.grouping])],
    )


def _micro_batched(problem: Problem, moves: float, settings: AnnealSettings) -> Ladder:
    """What so many moves go over in a step that is cut into micro-batches: runs of layers, each micro-batch's apart.

    Runs of all micro-batches, with their parameters, move as blocks too, which shifts the border between stages of one
    device; or each micro-batch to where the next run has it, which shifts that between stages of several. Then shorter
    runs, forward and backward apart and every parameter by itself, then atoms. Nothing is made hot: it starts from a
    layout that people would choose, and would lose it.
    """
    step, count = step_roles(problem.graph), problem.graph.num_micro_batches
    num_runs = max(settings.num_middle // count, LEAST_RUNS)
    whole = run_groups(problem, step, settings.num_runs, micro_batches=False)
    coarse = run_groups(problem, step, num_runs)
    fine = run_groups(problem, step, max(4 * settings.num_middle // count, 2 * LEAST_RUNS), phases=True, owners=True)
    table = run_table(problem, step, 2 * num_runs)
    if moves < settings.few_moves:
        return Ladder([Rung(coarse, 1.0, [whole], reheat=False, table=table)])
    rungs = [
        Rung(coarse, 0.4, [whole], reheat=False, table=table),
        Rung(fine, 0.4, [whole, coarse], reheat=False, table=table),
        Rung(atoms(problem), 0.2, [whole, coarse, fine], reheat=False, table=table),
    ]
    return Ladder(rungs, min(int(moves // settings.few_moves), settings.most_branches), rungs[:2])


def _descend(
    task: Task,
    devices: NDArray[np.int32],
    step_s: float,
    rungs: Sequence[Rung],
    until: float,
    settings: AnnealSettings,
) -> tuple[NDArray[np.int32], float]:
    """`anneal_split` over one rung after the other, beside a guide that was told where it begins."""
    if settings.guide is not None:
        settings.guide.imitate(devices)
    begin, done, whole = task.spent, 0.0, sum(rung.share for rung in rungs)
    for rung in rungs:
        done += rung.share
        devices, step_s = anneal_split(
            task,
            rung.grouping,
            devices,
            step_s,
            coarse=rung.blocks,
            reheat=rung.reheat,
            table=rung.table,
            until=begin + (until - begin) * done / whole,
            settings=settings,
        )
    return devices, step_s


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
