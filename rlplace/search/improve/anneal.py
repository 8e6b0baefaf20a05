"""`anneal`: simulated annealing over groups, then over ops, with structured moves (Kirkpatrick et al. 1983)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.measurement import StepTimer
from rlplace.measure.problem import Problem
from rlplace.search.groups import majority_devices
from rlplace.search.improve.block_descent import sweep
from rlplace.search.improve.coarsening import by_module, by_role, nested, split
from rlplace.search.improve.greedy_starts import scheduled_start
from rlplace.search.improve.moves import Neighbourhood
from rlplace.search.improve.warm_starts import fullness, held_bytes, room_bytes
from rlplace.search.task import Budget, Task

CHANCES = np.array([0.25, 0.35, 0.1, 0.1, 0.1, 0.1])
"""How often each kind of move is tried."""
BATCH = 8
"""Moves tried at once where time is what counts."""
PATIENCE = 0.5
"""Moves for each group and device from which on annealing starts hotter, in proportion ..."""
HOTTEST = 16.0
"""... but no more than this many times."""
SHORT = 1000
"""Moves that are too few for more than one level."""
REPEATS = 4
"""Atoms for each role, on average, from which on ops repeat."""
ROLES = 256
"""Groups that roles are cut into, about."""
BRANCHES = 8
"""Most short annealings of which the best goes on, where ops repeat ..."""
BRANCHES_SHARE = 0.6
"""... and the share of the budget that goes into them."""


class Rung(NamedTuple):
    """One step of annealing over finer and finer groups."""

    grouping: Grouping
    share: float
    """Of the budget, in proportion to the other rungs' shares."""
    blocks: Sequence[Grouping] = ()
    """Groupings whose groups move as blocks too."""
    reheat: bool = True
    """Whether many moves start hotter."""


@dataclass(frozen=True)
class AnnealConfig:
    """How long and how hot."""

    evaluations: float = 10_000
    """Placements to try; the search ends with whichever of this and `seconds` comes first."""
    seconds: float = float("inf")
    """Wall time."""
    batch: int | None = None
    """Moves tried at once from the placement at hand: the first that is accepted is taken, so that a few of them are
    wasted, but they keep the cores busy. None for 1 under a budget of evaluations, for `BATCH` under one of seconds
    alone."""
    hot: float | None = None
    """Temperature at the start, as a share of the step time; None suits it to the number of groups, a tenth of an even
    share of the step for a group, and to the moves there are: up to `HOTTEST` times as hot where there are many."""
    cold: float | None = None
    """Temperature at the end; None for a tenth of `hot`, before that is made hotter for many moves."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.evaluations >= 1 or not self.seconds > 0 or self._is_nonsense():
            raise InvalidValue(
                "anneal",
                (self.evaluations, self.seconds, self.batch, self.hot, self.cold),
                "evaluations >= 1, seconds > 0, batch >= 1, 0 < cold <= hot",
            )

    def temperatures(self, num_groups: int, moves_each: float = 0.0) -> tuple[float, float]:
        """At the start and at the end.

        Args:
            num_groups: groups that are moved.
            moves_each: moves there will be for each group and device; slow cooling pays from hotter starts.
        """
        share = 0.1 / max(num_groups, 1)
        hot = share * min(max(moves_each / PATIENCE, 1.0), HOTTEST) if self.hot is None else self.hot
        if self.cold is not None:
            return hot, self.cold
        return hot, (share if self.hot is None else self.hot) / 10

    def _is_nonsense(self) -> bool:
        hot, cold = self.temperatures(1)
        return not 0 < cold <= hot or (self.batch is not None and self.batch < 1)


def anneal(
    problem: Problem, timer: StepTimer, start: NDArray[np.int32], config: AnnealConfig | None = None
) -> tuple[NDArray[np.int32], float]:
    """The best placement of the problem's groups found from `start`, (G,) int32, and its step time.

    Args:
        problem: what is placed.
        timer: gives step times.
        start: (G,) devices of groups.
        config: how long and how hot.
    """
    config = config or AnnealConfig()
    task = Task(problem, timer, Budget(config.evaluations, config.seconds), seed=config.seed)
    start = np.asarray(start, dtype=np.int32)
    start_s = float(task.score_groups(start)[0])
    return anneal_groups(task, problem.grouping, start, start_s, until=1.0, config=config)


def solve(task: Task) -> None:
    """Anneals from the best of heuristics and scheduled placements, over the problem's groups and ever finer ones."""
    devices, step_s, _ = scheduled_start(task)
    anneal_finer(task, devices, step_s, until=1.0)


def anneal_finer(
    task: Task,
    devices: NDArray[np.int32],
    step_s: float,
    *,
    until: float,
    others: Sequence[tuple[NDArray[np.int32], float]] = (),
) -> tuple[NDArray[np.int32], float]:
    """The best devices (N,) int32 of ops found from `devices`, and their step time.

    Anneals over the problem's groups, then over about 256, then over atoms, for an equal share each; blocks of all
    coarser levels move too. Where ops repeat, as in a layer that is unrolled over steps, many valleys are nearly as
    deep, and one annealing is lucky or not: short ones, a branch for every `SHORT` moves up to `BRANCHES`, go over the
    problem's groups and then over roles (`by_role`), with whole modules as blocks; the best of them goes on over roles,
    about 256 groups and atoms, without being made hot again.

    A budget of less than `SHORT` moves is spent at about 256 groups alone: one is too short to move atoms one by one,
    and groups of the problem's own may be too coarse. It begins with a descent by blocks, so that a few draws do not
    decide what is found; with more moves than that, annealing alone gets further. Graphs whose ops have no modules are
    taken for ones that do not repeat.

    Args:
        task: scores and counts.
        devices: (N,) where to start from.
        step_s: their step time.
        until: share of the task's budget at which to stop.
        others: devices (N,) and step times that branches start from in turn with it, where they are feasible.
    """
    problem = task.problem
    levels = nested(problem)
    own, last = next(rung for rung, level in enumerate(levels) if level is problem.grouping), len(levels) - 1
    middle = next((rung for rung in range(own, last) if levels[rung].num_groups >= 200), last)
    is_repeating = any(problem.graph.modules) and levels[last].num_groups >= REPEATS * by_role(problem, 1).num_groups
    modules, moves = [by_module(problem, 1)] if is_repeating else [], task.expected_evaluations(until)
    if moves < SHORT:
        devices, step_s = sweep(task, devices, step_s, until=until)
        rungs = [Rung(levels[middle], 1.0, modules or levels[:middle])]
        return _descend(task, devices, step_s, rungs, until=until)
    if not is_repeating:
        rungs = [Rung(levels[rung], 1.0, levels[:rung]) for rung in sorted({own, middle, last})]
        return _descend(task, devices, step_s, rungs, until=until)
    roles, begin, found = by_role(problem, ROLES), task.spent, []
    starts = [(devices, step_s), *(other for other in others if other[1] < math.inf or math.isinf(step_s))]
    branches = int(min(max(moves // SHORT, 2), BRANCHES))
    rungs = [Rung(problem.grouping, 0.4, modules), Rung(roles, 0.6, [*modules, problem.grouping])]
    for branch in range(branches):
        stop = begin + (until - begin) * BRANCHES_SHARE * (branch + 1) / branches
        found.append(_descend(task, *starts[branch % len(starts)], rungs, until=stop))
    rungs = [
        Rung(roles, 0.4, modules, reheat=False),
        Rung(levels[middle], 0.35, [*modules, roles], reheat=False),
        Rung(levels[last], 0.25, [*modules, roles, levels[middle]], reheat=False),
    ]
    return _descend(task, *min(found, key=lambda one: one[1]), rungs, until=until)


def _descend(
    task: Task, devices: NDArray[np.int32], step_s: float, rungs: Sequence[Rung], *, until: float
) -> tuple[NDArray[np.int32], float]:
    """`anneal_split` over one rung after the other."""
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
            until=begin + (until - begin) * done / whole,
        )
    return devices, step_s


def anneal_split(
    task: Task,
    grouping: Grouping,
    devices: NDArray[np.int32],
    step_s: float,
    *,
    until: float,
    coarse: Sequence[Grouping] = (),
    reheat: bool = True,
) -> tuple[NDArray[np.int32], float]:
    """The best devices (N,) int32 of ops found from `devices` over `grouping`, and their step time.

    Groups whose ops are on several devices are split by them, and move as blocks too: no start is changed by what it is
    annealed over.

    Args:
        task: scores and counts.
        grouping: what moves together, where it starts together.
        devices: (N,) where to start from.
        step_s: their step time.
        until: share of the task's budget at which to stop.
        coarse: groupings whose groups are moved as blocks.
        reheat: whether many moves start hotter; what is annealed already would be lost by that.
    """
    parts = split(grouping, devices)
    if parts.num_groups > grouping.num_groups:
        coarse = [*coarse, grouping]
    groups, step_s = anneal_groups(
        task, parts, majority_devices(task.problem, devices, parts), step_s, until=until, coarse=coarse, reheat=reheat
    )
    return parts.expand(groups), step_s


def anneal_groups(
    task: Task,
    grouping: Grouping,
    start: NDArray[np.int32],
    start_s: float,
    *,
    until: float,
    config: AnnealConfig | None = None,
    coarse: Sequence[Grouping] = (),
    reheat: bool = True,
) -> tuple[NDArray[np.int32], float]:
    """The best devices (G,) int32 of `grouping`'s groups found from `start`, and their step time.

    A move is taken where its step time is below the current one times 1 + temperature x an exponential draw (the
    Metropolis rule). Infeasible placements are never taken from a feasible one; from an infeasible one, any move
    is that does not fill the fullest device much more.

    Args:
        task: scores and counts.
        grouping: what moves together; the problem's, or finer.
        start: (G,) devices to start from.
        start_s: their step time.
        until: share of the task's budget at which to stop.
        config: temperatures and batch; its budget and seed are the task's own.
        coarse: groupings whose groups are moved as blocks.
        reheat: whether many moves start hotter.
    """
    config = config or AnnealConfig()
    generator, near = task.generator, Neighbourhood.of(task.problem, grouping, coarse)
    held, room = held_bytes(task.problem, grouping), room_bytes(task.problem)
    choices = max(grouping.num_groups * task.problem.host.num_devices, 1)
    moves_each = task.expected_evaluations(until) / choices if reheat else 0.0
    hot, cold = config.temperatures(grouping.num_groups, moves_each)
    current, current_s = np.asarray(start, dtype=np.int32), start_s
    best, best_s = current, current_s
    batch = config.batch or (1 if math.isfinite(task.budget.evaluations) else BATCH)
    begin, max_window = task.spent, max(4, grouping.num_groups // 8)
    while len(near.movable) and task.spent < until and not task.is_spent:
        progress = min((task.spent - begin) / max(until - begin, 1e-12), 1.0)
        temperature = hot * (cold / hot) ** progress
        count = int(max(1, min(batch, until * task.budget.evaluations - task.evaluations)))
        moved = near.propose(np.repeat(current[None], count, axis=0), generator, CHANCES, max_window)
        draws = generator.exponential(size=count)
        acceptable_s = current_s * (1.0 + temperature * draws)
        moved_s = task.score(grouping.expand(moved), acceptable_s)
        if np.isfinite(current_s):
            accepted = moved_s <= acceptable_s
        elif np.isfinite(moved_s).any():
            accepted = np.isfinite(moved_s)
        else:
            full = fullness(held, room, np.concatenate((current[None], moved)))
            accepted = full[1:] <= full[0] * (1.0 + 0.05 * draws)
        if accepted.any():
            first = int(np.argmax(accepted))
            current, current_s = moved[first], float(moved_s[first])
        leader = int(np.argmin(moved_s))
        if moved_s[leader] < best_s:
            best, best_s = moved[leader], float(moved_s[leader])
    return best, best_s
