"""`anneal`: simulated annealing with structured moves (Metropolis et al. 1953, Kirkpatrick et al. 1983).

`anneal_groups` anneals one grouping. `anneal_finer` goes over a `ladder` of finer and finer groupings; a small budget
begins with `sweep`, a descent by blocks that draws nothing. `AnnealSettings` holds temperatures, moves and shares of
the budget.

`run_groups`, `run_table`: the groupings of a step that is cut into micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import refuse_if
from rlplace.graphs import FORWARD, Grouping
from rlplace.measure import Problem
from rlplace.measure.measurement import PathTimer, StepTimer
from rlplace.search.groupings import (
    allowed_devices,
    atoms,
    by_module,
    by_role,
    fullness,
    kept_bytes,
    majority_devices,
    nested,
    numbered,
    room_bytes,
    split,
)
from rlplace.search.improve.moves import CHANCES, TABLE_CHANCES, Neighbourhood, Table
from rlplace.search.improve.starting_points import best_start_with_greedy, evaluations_until, has_few_evaluations
from rlplace.search.parallel.layouts import StepRoles, cut_stages, step_roles
from rlplace.search.task import Budget, Guide, Task, guided_moves


def anneal_from(
    problem: Problem,
    timer: StepTimer,
    start: NDArray[np.int32],
    budget: Budget,
    *,
    seed: int = 0,
    settings: AnnealSettings | None = None,
) -> tuple[NDArray[np.int32], float]:
    """The best placement of the problem's groups found from `start`, (G,) int32, and its step time.

    Args:
        problem: the problem to place.
        timer: gives step times.
        start: (G,) devices of groups.
        budget: evaluations or seconds, the start's own among them.
        seed: of every draw.
        settings: temperatures, moves and batch.
    """
    task = Task(problem, timer, budget, seed=seed)
    start = np.asarray(start, dtype=np.int32)
    start_s = float(task.score_groups(start)[0])
    return anneal_groups(task, Rung(problem.grouping, 1.0), start, start_s, until=1.0, settings=settings)


def anneal_groups(
    task: Task,
    rung: Rung,
    start: NDArray[np.int32],
    start_s: float,
    *,
    until: float,
    settings: AnnealSettings | None = None,
) -> tuple[NDArray[np.int32], float]:
    """The best devices (G,) int32 of a rung's groups found from `start`, and their step time.

    A move is taken where its step time is below the current one times 1 + temperature x an exponential draw (the
    Metropolis rule). Infeasible placements are never taken from a feasible one; from an infeasible one, any move
    is that does not fill the fullest device much more.

    Args:
        task: scores and counts.
        rung: the groups that move, and how.
        start: (G,) devices to start from.
        start_s: their step time.
        until: share of the task's budget at which to stop.
        settings: temperatures, moves and batch.
    """
    settings, grouping = settings or AnnealSettings(), rung.grouping
    generator, near = task.generator, Neighbourhood.of(task.problem, grouping, rung.blocks, rung.table)
    kept, room = kept_bytes(task.problem, grouping), room_bytes(task.problem)
    choices = max(grouping.num_groups * task.problem.host.num_devices, 1)
    moves_each = task.expected_evaluations(until) / choices if rung.reheat else 0.0
    # the schedule: from `hot` to `cold`, geometrically, over the share of the budget between now and `until`; both are
    # shares of the step time, so that they mean the same for every problem
    hot, cold = settings.temperatures(grouping.num_groups, moves_each)
    current, current_s = np.asarray(start, dtype=np.int32), start_s
    best, best_s = current, current_s
    is_serial = math.isfinite(task.budget.evaluations) or task.is_serial
    batch = settings.batch or (1 if is_serial else settings.timed_batch)
    chances = settings.chances if rung.table is None else settings.table_chances
    begin, max_window = task.spent, max(4, grouping.num_groups // 8)
    timer = task.timer if settings.critical_share > 0 and isinstance(task.timer, PathTimer) else None
    focus, focused, is_movable = near.movable[:0], None, near.allowed.sum(axis=1) > 1
    while len(near.movable) and task.spent < until and not task.is_spent:
        temperature = hot * (cold / hot) ** min((task.spent - begin) / max(until - begin, 1e-12), 1.0)
        count = int(max(1, min(batch, until * task.budget.evaluations - task.evaluations)))
        if timer is not None and current is not focused:  # the movable groups of the placement's critical path
            groups = np.unique(grouping.op_group[timer.critical_ops(grouping.expand(current), task.priorities)])
            focus, focused = groups[is_movable[groups]].astype(np.int32), current
        moved = near.propose(
            np.repeat(current[None], count, axis=0),
            generator,
            chances,
            max_window,
            focus=focus,
            focus_share=settings.critical_share,
        )
        if settings.guide is not None:
            moved = guided_moves(settings.guide, task.problem, grouping, current, moved, generator)
        # the Metropolis rule with its draw made first: what a step time must not exceed is known before it is simulated
        draws = generator.exponential(size=count)
        acceptable_s = current_s * (1.0 + temperature * draws)
        moved_s = task.score(grouping.expand(moved), acceptable_s)
        if np.isfinite(current_s):
            accepted = moved_s <= acceptable_s
        elif np.isfinite(moved_s).any():
            accepted = np.isfinite(moved_s)
        else:
            full = fullness(kept, room, np.concatenate((current[None], moved)))
            accepted = full[1:] <= full[0] * (1.0 + 0.05 * draws)
        # of moves that were tried at once the first one that is acceptable is taken, the others are wasted
        if accepted.any():
            first = int(np.argmax(accepted))
            current, current_s = moved[first], float(moved_s[first])
        leader = int(np.argmin(moved_s))
        if moved_s[leader] < best_s:
            best, best_s = moved[leader], float(moved_s[leader])
    return best, best_s


@dataclass(frozen=True)
class AnnealSettings:
    """Every figure of annealing; the defaults were chosen over several problems and budgets."""

    hot: float | None = None
    """Temperature at the start, as a share of the step time; None suits it to the number of groups, a tenth of an even
    share of the step for a group, and to the moves there are: up to `most_reheat` times as hot where there are many."""
    cold: float | None = None
    """Temperature at the end; None for a tenth of `hot`, before that is made hotter for many moves."""
    patience: float = 0.5
    """Moves for each group and device from which on annealing starts hotter, in proportion ..."""
    most_reheat: float = 16.0
    """... but no more than this many times."""
    chances: tuple[float, ...] = CHANCES
    """How often each kind of move is tried, as `Neighbourhood.propose` takes them ..."""
    table_chances: tuple[float, ...] = TABLE_CHANCES
    """... and in a step that is cut into micro-batches, whose runs of layers also move to where the next run is."""
    critical_share: float = 0.8
    """Share of the moves that begin with a group of the critical path, where the timer tells it: moves of others
    seldom make a step shorter, but make room."""
    guide: Guide | None = None
    """The guide that suggests a share of the moves; it is told the placements that annealing goes on from."""
    batch: int | None = None
    """Moves tried at once from the placement at hand: the first that is accepted is taken, so that a few of them are
    wasted, but they keep the cores busy. None for 1 under a budget of evaluations, for `timed_batch` under one of
    seconds alone."""
    timed_batch: int = 8
    """Moves tried at once under a budget of time."""
    few_moves: int = 1000
    """Moves that are too few for more than one level; where ops repeat, also those of each short annealing."""
    repeats: float = 4.0
    """Atoms for each role, on average, from which on ops repeat."""
    num_middle: int = 200
    """Groups that the level between the problem's own groups and atoms has at least; it has about 256."""
    num_roles: int = 256
    """Groups that roles are cut into, about."""
    num_runs: int = 32
    """Runs of layers that move with all micro-batches, where the step is cut into them."""
    most_branches: int = 8
    """Most short annealings of which the best goes on, where ops repeat ..."""
    branches_share: float = 0.6
    """... and the share of the budget that goes into them."""

    def __post_init__(self) -> None:
        hot, cold = self.temperatures(1)
        for name, value, is_valid, expected in (
            ("temperatures", (self.hot, self.cold), 0 < cold <= hot, "0 < cold <= hot"),
            ("critical_share", self.critical_share, 0 <= self.critical_share <= 1, "0 to 1"),
            ("batch", self.batch, self.batch is None or self.batch >= 1, "at least 1"),
        ):
            refuse_if(not is_valid, name, value, expected, where="anneal")

    def temperatures(self, num_groups: int, moves_each: float = 0.0) -> tuple[float, float]:
        """At the start and at the end.

        Args:
            num_groups: groups that are moved.
            moves_each: moves there will be for each group and device; slow cooling pays from hotter starts.
        """
        share = 0.1 / max(num_groups, 1)
        reheat = min(max(moves_each / self.patience, 1.0), self.most_reheat)
        hot = share * reheat if self.hot is None else self.hot
        if self.cold is not None:
            return hot, self.cold
        return hot, (share if self.hot is None else self.hot) / 10


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
    """The groupings to anneal over, one rung after the other."""

    rungs: Sequence[Rung]
    branches: int = 0
    """Short annealings before that, of which the best goes on."""
    branch_rungs: Sequence[Rung] = ()
    """The rungs of each of them."""


def solve_anneal(task: Task) -> None:
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

    Goes up `ladder`. A budget of few moves begins with a descent by blocks, so that a few draws do not decide the
    result; with more moves than that, annealing alone gets further.

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
    """The rungs for so many moves.

    The problem's groups, then about 256, then atoms, for an equal share each; blocks of all coarser levels move too.
    Where ops repeat, as in a layer that is unrolled over steps, many local minima are nearly as good, and the result of
    one annealing varies. Then short annealings, one for every `few_moves` up to `most_branches`, go over the problem's
    groups and over roles (`by_role`), with whole modules as blocks. The best of them goes on over roles, about 256
    groups and atoms, without a hot start. Graphs whose ops have no modules are taken for ones that do not repeat.

    Less than `few_moves` are spent at about 256 groups alone: they are too few to move atoms one by one, and groups of
    the problem's own may be too coarse.
    """
    if problem.graph.is_in_parts:
        return _in_parts(problem, moves, settings)
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


def _in_parts(problem: Problem, moves: float, settings: AnnealSettings) -> Ladder:
    """The rungs for so many moves in a step in micro-batches or shards: runs of layers, each part of them apart.

    Runs of all micro-batches, with their parameters, move as blocks too, which shifts the border between stages of one
    device; or each micro-batch to where the next run has it, which shifts that between stages of several. Then shorter
    runs, forward and backward apart and every parameter by itself, then atoms. Nothing is made hot: it starts from a
    layout that people would choose, and would lose it.
    """
    step, count = step_roles(problem.graph), problem.graph.num_micro_batches * problem.graph.num_shards
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
    """The best devices (N,) int32 found from `devices` over one rung after the other, and their step time.

    Groups whose ops are on several devices are split by them, and move as blocks too: no rung changes its start. The
    guide is told where the first one begins.
    """
    if settings.guide is not None:
        settings.guide.imitate(devices)
    begin, done, whole = task.spent, 0.0, sum(rung.share for rung in rungs)
    for rung in rungs:
        done += rung.share
        parts = split(rung.grouping, devices)
        coarse = [*rung.blocks, rung.grouping] if parts.num_groups > rung.grouping.num_groups else rung.blocks
        groups, step_s = anneal_groups(
            task,
            replace(rung, grouping=parts, blocks=coarse),
            majority_devices(task.problem, devices, parts),
            step_s,
            until=begin + (until - begin) * done / whole,
            settings=settings,
        )
        devices = parts.expand(groups)
    return devices, step_s


SWEEP_SHARE = 0.5
"""The largest share of the rest of a budget that goes into it."""
MOST_SWEPT = 200
"""Evaluations after which annealing finds more."""
BLOCKS = 60
"""Blocks of a level that are tried, the costliest; small ones change little."""
TARGETS = 3
"""Devices that a block is tried on, the least loaded."""


def sweep(
    task: Task, devices: NDArray[np.int32], step_s: float, *, until: float, most: int = MOST_SWEPT
) -> tuple[NDArray[np.int32], float]:
    """Devices (N,) int32 that no tried move of one block improves, or where its share of the budget ended; step time.

    Blocks are those of `blocks`, each split where its ops are on several devices. A block is tried on the least loaded
    other devices, and the best of them is taken if it is an improvement; all levels are gone through again until none
    is. Nothing is drawn, so that no seed is luckier than another.

    Args:
        task: scores and counts.
        devices: (N,) where to start from; comes back as it is where it does not fit into memory.
        step_s: its step time.
        until: share of the task's budget at which annealing will stop.
        most: evaluations after which it ends at the latest.
    """
    problem = task.problem
    stop = task.evaluations + min(SWEEP_SHARE * evaluations_until(task, until), most)
    until = task.spent + SWEEP_SHARE * (until - task.spent)
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
        problem: the problem to place.
        whole_modules: whether modules are among them: they are many, and few evaluations are better spent on the rest.
    """
    return [*([by_module(problem, 1)] if whole_modules else ()), nested(problem)[0], problem.grouping]


def chain_runs(problem: Problem, step: StepRoles, count: int) -> NDArray[np.int32]:
    """(P,) int32: the chain in `count` runs of equal work, as many as it has places at the most."""
    count = max(min(count, step.num_positions), 1)
    time_s = np.where(problem.graph.is_source, 0.0, problem.costs.op_time_s.mean(axis=1))
    work_s = np.bincount(step.op_position, weights=time_s, minlength=step.num_positions)
    return cut_stages(work_s.astype(np.float64), np.ones(count))


def run_table(problem: Problem, step: StepRoles, count: int) -> Table:
    """Cells of ops: runs of the chain, `count` of them, by micro-batches; owned groups in column 0, shared ops in 1.

    Of a step with shards, by those too, after whole ops.

    Args:
        problem: the problem to place.
        step: its roles.
        count: runs.
    """
    column = np.where(problem.graph.colocation >= 0, 0, step.follows + 2)
    column += (problem.graph.shard + 1) * (problem.graph.num_micro_batches + 2)
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
        problem: the problem to place.
        step: its roles.
        count: runs.
        micro_batches: whether micro-batches and shards are apart, and shared ops from them.
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
    traits = [
        chain_runs(problem, step, count)[step.op_position[first]],
        np.where(is_owned, -2, step.follows[leaders]) * micro_batches,
        (graph.shard[leaders] + 1) * micro_batches,
        np.where(is_owned, 2, graph.phases[leaders] != FORWARD) * phases,
        np.where(is_owned, graph.colocation[first], -1) * owners,
        np.unique(allowed_devices(problem, fine), axis=0, return_inverse=True)[1].reshape(-1),
    ]  # a row of zeros for what does not keep atoms apart
    label = np.unique(np.stack(traits), axis=1, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return numbered(label[fine.op_group], f"runs of a chain:{count}")
