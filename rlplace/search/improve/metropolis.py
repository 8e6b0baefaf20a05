"""Simulated annealing over groups that stay as they are (Metropolis et al. 1953, Kirkpatrick et al. 1983).

`AnnealSettings`: how hot annealing is, which moves it tries, and how it divides its budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.measurement import PathTimer, StepTimer
from rlplace.measure.problem import Problem
from rlplace.search.guide import Guide, GuidedMoves
from rlplace.search.improve.coarsening import split
from rlplace.search.improve.moves import CHANCES, TABLE_CHANCES, Neighbourhood, Table
from rlplace.search.improve.warm_starts import fullness, kept_bytes, room_bytes
from rlplace.search.task import Budget, Task, majority_devices


class _CriticalGroups:
    """The movable groups of the critical path of the placement that annealing is at.

    Args:
        timer: tells critical paths; None for no groups.
        task: whose order of ops is run.
        grouping: what moves together.
        movable: groups that may be on more than one device.
    """

    def __init__(self, timer: PathTimer | None, task: Task, grouping: Grouping, movable: NDArray[np.int32]) -> None:
        self._timer, self._task, self._grouping = timer, task, grouping
        self._is_movable = np.zeros(grouping.num_groups, dtype=np.bool_)
        self._is_movable[movable] = True
        self._at: NDArray[np.int32] | None = None
        self._groups = movable[:0]

    def at(self, current: NDArray[np.int32]) -> NDArray[np.int32]:
        """(F,) int32 of devices (G,); worked out once for each array of them."""
        if self._timer is not None and current is not self._at:
            ops = self._timer.critical_ops(self._grouping.expand(current), self._task.priorities)
            groups = np.unique(self._grouping.op_group[ops])
            self._at, self._groups = current, groups[self._is_movable[groups]].astype(np.int32)
        return self._groups


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
        problem: what is placed.
        timer: gives step times.
        start: (G,) devices of groups.
        budget: evaluations or seconds, the start's own among them.
        seed: of every draw.
        settings: temperatures, moves and batch.
    """
    task = Task(problem, timer, budget, seed=seed)
    start = np.asarray(start, dtype=np.int32)
    start_s = float(task.score_groups(start)[0])
    return anneal_groups(task, problem.grouping, start, start_s, until=1.0, settings=settings)


def anneal_split(
    task: Task,
    grouping: Grouping,
    devices: NDArray[np.int32],
    step_s: float,
    *,
    until: float,
    coarse: Sequence[Grouping] = (),
    reheat: bool = True,
    table: Table | None = None,
    settings: AnnealSettings | None = None,
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
        table: cells of ops, whose rows are moved to where the next ones are.
        settings: temperatures, moves and batch.
    """
    parts = split(grouping, devices)
    if parts.num_groups > grouping.num_groups:
        coarse = [*coarse, grouping]
    groups, step_s = anneal_groups(
        task,
        parts,
        majority_devices(task.problem, devices, parts),
        step_s,
        until=until,
        coarse=coarse,
        reheat=reheat,
        table=table,
        settings=settings,
    )
    return parts.expand(groups), step_s


def anneal_groups(
    task: Task,
    grouping: Grouping,
    start: NDArray[np.int32],
    start_s: float,
    *,
    until: float,
    coarse: Sequence[Grouping] = (),
    reheat: bool = True,
    table: Table | None = None,
    settings: AnnealSettings | None = None,
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
        coarse: groupings whose groups are moved as blocks.
        reheat: whether many moves start hotter.
        table: cells of ops, whose rows are moved to where the next ones are.
        settings: temperatures, moves and batch.
    """
    settings = settings or AnnealSettings()
    generator, near = task.generator, Neighbourhood.of(task.problem, grouping, coarse, table)
    guided = None if settings.guide is None else GuidedMoves(settings.guide, task.problem, grouping)
    kept, room = kept_bytes(task.problem, grouping), room_bytes(task.problem)
    choices = max(grouping.num_groups * task.problem.host.num_devices, 1)
    moves_each = task.expected_evaluations(until) / choices if reheat else 0.0
    hot, cold = settings.temperatures(grouping.num_groups, moves_each)
    current, current_s = np.asarray(start, dtype=np.int32), start_s
    best, best_s = current, current_s
    is_serial = math.isfinite(task.budget.evaluations) or task.is_serial
    batch = settings.batch or (1 if is_serial else settings.timed_batch)
    chances = settings.chances if table is None else settings.table_chances
    begin, max_window = task.spent, max(4, grouping.num_groups // 8)
    timer = task.timer if settings.critical_share > 0 and isinstance(task.timer, PathTimer) else None
    critical = _CriticalGroups(timer, task, grouping, near.movable)
    while len(near.movable) and task.spent < until and not task.is_spent:
        progress = min((task.spent - begin) / max(until - begin, 1e-12), 1.0)
        temperature = hot * (cold / hot) ** progress
        count = int(max(1, min(batch, until * task.budget.evaluations - task.evaluations)))
        moved = near.propose(
            np.repeat(current[None], count, axis=0),
            generator,
            chances,
            max_window,
            focus=critical.at(current),
            focus_share=settings.critical_share,
        )
        if guided is not None:
            moved = guided.mixed(current, moved, generator)
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
    """What suggests a share of the moves; it is told the placements that annealing goes on from."""
    batch: int | None = None
    """Moves tried at once from the placement at hand: the first that is accepted is taken, so that a few of them are
    wasted, but they keep the cores busy. None for 1 under a budget of evaluations, for `timed_batch` under one of
    seconds alone."""
    timed_batch: int = 8
    """Moves tried at once where time is what counts."""
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
        if not 0 < cold <= hot:
            raise InvalidValue("temperatures", (self.hot, self.cold), "0 < cold <= hot", where="anneal")
        if not 0 <= self.critical_share <= 1:
            raise InvalidValue("critical_share", self.critical_share, "0 to 1", where="anneal")
        if self.batch is not None and self.batch < 1:
            raise InvalidValue("batch", self.batch, "at least 1", where="anneal")

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
