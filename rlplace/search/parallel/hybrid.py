"""`data-parallel`, `pipeline` and `hybrid`: placements of micro-batches as people plan them, then simulated.

All of them are placements and orders of the same graph as any search's, so that both compare on equal terms.

`replicated_plans`: stages with different numbers of replicas, as PipeDream's and DAPPLE's planners choose them.

`StagePlan`: stages of a chain, each on a team of devices, and the plans that differ from it by one change.

`hybrid_start`, `parallel_starts`: the best of these, for searches over placements to start from.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rlplace.measure import Problem, Simulator
from rlplace.measure.simulate.compiled_problem import mean_route
from rlplace.search.parallel.layouts import (
    Chain,
    Layout,
    Owners,
    StepRoles,
    deal,
    layouts,
    placement_of,
    step_roles,
    thinnest_cuts,
)
from rlplace.search.parallel.pipelines import list_priorities, most_under_way, one_f_one_b, one_moved
from rlplace.search.task import Task

TRIED, MOST_TRIED = 24, 400
"""Layouts, the best by simulation without regard to memory, of which every order is simulated: at least and at most."""
TRIED_OPS = 200_000
"""Ops of those layouts altogether: of small graphs more are tried."""
MORE_TRIED = 8
"""How many are tried after the first one that fits, where none of those did."""
REFINED = 4
"""Layouts, the best of those, of which neighbours are tried ..."""
REFINEMENTS = 300
"""... and how many of each."""
OWNERS_MOVED = 100
"""Placements in which one parameter has another owner."""
ROOMY_BYTES = 1 << 60
"""Memory of each device where it is left out of account."""


def solve_data_parallel(task: Task) -> None:
    """Micro-batches dealt out over the fastest k devices in proportion to speed, for the best k of 2 or more.

    Parameters are owned evenly. Every order is tried, all devices first.
    """
    field = Field(task)
    most = min(len(field.chain.line), task.problem.graph.num_micro_batches)
    fastest = sorted(field.chain.line, key=lambda device: (-field.chain.speed[device], device))
    for count in range(most, min(most, 2) - 1, -1):
        if count == most or not field.is_spent:
            field.try_orders(field.chain.layout(np.array([sorted(fastest[:count])], dtype=np.int32)))


def solve_tensor_parallel(task: Task) -> None:
    """Micro-batches dealt out over teams of as many devices as there are shards, parameters owned both ways."""
    field = Field(task)
    for layout in layouts(task.problem, field.step):
        if len(layout.devices) == 1 and not len(layout.role_device) and not field.is_spent:
            field.try_orders(layout)


def solve_pipeline(task: Task) -> None:
    """A stage a device, GPipe and 1F1B; stages cut so that the slowest, transfers included, is as fast as possible."""
    field = Field(task)
    count = min(len(field.chain.line), field.step.num_positions)
    for cut in ("crossing", "work"):
        field.try_orders(field.chain.layout(np.array(field.chain.line[:count], dtype=np.int32)[:, None], cut))


def solve_hybrid(task: Task) -> None:
    """The best of grids of stages x replicas, stages with different numbers of them, and neighbours of the best.

    All are simulated without regard to memory; then the best ones with it, each in every order: GPipe, backward first,
    1F1B, rank and tilt. From the best of those, plans with one thing changed are tried as long as one is better, then
    owners of parameters one by one.
    """
    improve_hybrids(task, until=1.0)


def improve_hybrids(task: Task, *, until: float) -> Field:
    """`solve_hybrid` until a share of the budget, a third of it for each of its parts at the most."""
    begin = task.spent
    field = Field(task, begin + (until - begin) / 3)
    found: list[Tried] = []
    last = tried = min(max(TRIED, TRIED_OPS // task.problem.graph.num_ops), MOST_TRIED)
    ranked = field.ranked(field.candidates())
    field.until = begin + 2 * (until - begin) / 3
    for place, layout in enumerate(ranked):
        if field.is_spent or place >= last:
            break
        found.append(field.try_orders(layout))
        if place >= tried - 1 and not np.isfinite(task.best_s):
            last = place + 1 + MORE_TRIED
    field.until = until
    found.sort(key=lambda one: one.step_s)
    for one in [one for one in found if np.isfinite(one.step_s)][: max(REFINED, tried // 20)]:
        if field.is_spent:
            break
        climbed = field.climb(one, lambda layout, best: field.try_orders(layout, (best.order,)), REFINEMENTS)
        field.move_owners(
            field.try_orders(climbed.layout),
            lambda best, moved: field.score(best.layout, moved, best.order),
            OWNERS_MOVED,
        )
    return field


@dataclass(frozen=True, eq=False)
class Tried:
    """A layout that was timed.

    Attributes:
        layout: as stages and replicas.
        devices: (N,) int32, its placement.
        step_s: its step time; infinite where it does not fit.
        order: the order of ops with that step time; empty for the problem's own.
        limit: (p,) micro-batches under way on each stage, where the order bounds them; else empty.
    """

    layout: Layout
    devices: NDArray[np.int32]
    step_s: float
    order: str = ""
    limit: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


class Field:
    """Scores layouts of a task's problem in several orders of ops, and keeps the best of them.

    Args:
        task: whose graph is cut into micro-batches.
        until: share of its budget at which to stop.

    Attributes:
        best_listed: devices (N,), step time and priorities (N,) of the best so far in an order that priorities make.
        best_bounded: the best so far with a bound on micro-batches under way.
    """

    def __init__(self, task: Task, until: float = 1.0) -> None:
        self.task = task
        self.until = until
        problem = task.problem
        self.step: StepRoles = step_roles(problem.graph)
        self.chain = Chain.of(problem, self.step)
        self.priorities = list_priorities(problem)
        self.best_listed = (np.zeros(problem.graph.num_ops, dtype=np.int32), np.inf, self.priorities["rank"])
        nothing = Layout(np.zeros((1, 1), dtype=np.int32), np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32))
        self.best_bounded = Tried(nothing, self.best_listed[0], np.inf)
        roomy = tuple(replace(device, memory_bytes=ROOMY_BYTES) for device in problem.host.devices)
        self._roomy = Simulator(replace(problem, host=replace(problem.host, devices=roomy)), threads=1)

    @property
    def is_spent(self) -> bool:
        """Whether its share of the budget is gone."""
        return self.task.is_spent or self.task.spent >= self.until

    def candidates(self) -> Iterator[Layout]:
        """Planned stages with different numbers of replicas, then grids, then, of small problems, every plan.

        Planned ones are first: a small budget ends before all grids of many devices are tried.
        """
        problem = self.task.problem
        for plan in replicated_plans(self.chain, self.chain.line, mean_route(problem.transfer_s_per_byte)):
            yield from self._dealt(plan)
        grids = (layout for layout in layouts(problem, self.step) if not layout.is_across)
        yield from (layout for layout in grids if not len(layout.role_device))
        for plan in all_plans(self.step.num_positions, self.chain.line):
            yield from self._dealt(plan)

    def _dealt(self, plan: StagePlan) -> Iterator[Layout]:
        """Layouts of a plan: micro-batches by speed or evenly, parameters spread or with their stage."""
        for by_speed in (True, False) if np.ptp(self.chain.speed) > 0 else (True,):
            dealt = replace(plan, by_speed=by_speed)
            yield dealt.layout(self.chain)
            yield replace(dealt, owners="with-stage").layout(self.chain)

    def ranked(self, candidates: Iterator[Layout]) -> list[Layout]:
        """Candidates by step time on devices whose memory has no end, in the better of two orders."""
        timed: list[tuple[float, Layout]] = []
        for layout in candidates:
            if self.is_spent and timed:
                break
            devices = placement_of(self.task.problem, layout, self.step)
            is_one = len(layout.devices) == 1 or self.task.evaluations_left < 2
            orders = ("backward-first",) if is_one else ("gpipe", "backward-first")
            times = [float(self._roomy.step_times(devices[None], self.priorities[order])[0]) for order in orders]
            self.task.count(len(orders))
            timed.append((min(times), layout))
        return [layout for _, layout in sorted(timed, key=lambda one: one[0])]

    def try_orders(self, layout: Layout, orders: tuple[str, ...] = ()) -> Tried:
        """The best of the orders of a layout, all by default."""
        devices = placement_of(self.task.problem, layout, self.step)
        every = (*self.priorities, "1f1b", "1f1b-deep")
        times = {order: self.score(layout, devices, order) for order in orders or every}
        best = min(times, key=lambda order: times[order])
        return Tried(layout, devices, times[best], best)

    def climb(self, one: Tried, attempt: Callable[[Layout, Tried], Tried], most: int) -> Tried:
        """The best of a plan, its neighbours, theirs and so on; steps get smaller.

        Args:
            one: where to start.
            attempt: from a layout and the best so far to the timed layout.
            most: layouts that are tried at most.
        """
        plan, tries, far = StagePlan.of(one.layout, self.chain), 0, max(self.step.num_positions // 16, 1)
        while far:
            for other in plan.neighbours(self.step.num_positions, far):
                if self.is_spent or tries >= most:
                    return one
                tries += 1
                tried = attempt(other.layout(self.chain), one)
                if tried.step_s < one.step_s:
                    one, plan = tried, other
                    break
            else:
                far //= 2
        return one

    def move_owners(
        self, one: Tried, score: Callable[[Tried, NDArray[np.int32]], float], most: float = math.inf
    ) -> None:
        """Tries each parameter on the other replicas of its stage, the largest first.

        Args:
            one: where to start.
            score: gives the step time of other devices (N,) in the order of `one`.
            most: owners that are tried at most.
        """
        devices, best_s = one.devices, one.step_s
        for tries, (members, device) in enumerate(self._other_owners(one.layout)):
            if self.is_spent or tries >= most:
                return
            moved = devices.copy()
            moved[members] = device
            if device != devices[members[0]] and (step_s := score(one, moved)) < best_s:
                devices, best_s = moved, step_s

    def _other_owners(self, layout: Layout) -> Iterator[tuple[NDArray[np.int64], int]]:
        """Ops of each co-location class, the largest first, with every device of its stage where it may be."""
        problem, graph = self.task.problem, self.task.problem.graph
        held = graph.parameter_bytes + graph.gradient_bytes
        classes = np.flatnonzero(np.bincount(graph.colocation[graph.colocation >= 0]))
        size = np.bincount(graph.colocation[graph.colocation >= 0], weights=held[graph.colocation >= 0])
        for owned in classes[np.argsort(-size[classes], kind="stable")].tolist():
            members = np.flatnonzero(graph.colocation == owned)
            own = layout.members(layout.role_stage[self.step.role[members[0]]])
            shard = int(graph.shard[members].max())
            for device in np.unique(own if shard < 0 else own[:, shard % own.shape[1]]).tolist():
                if problem.allowed is None or problem.allowed[members, device].all():
                    yield members, device

    def score_bounded(self, layout: Layout, devices: NDArray[np.int32], limit: NDArray[np.int64]) -> float:
        """Step time of 1F1B with `limit` (p,) micro-batches under way; planning counts as an evaluation too."""
        if self.task.evaluations_left < 2:
            return np.inf
        self.task.count(1)
        step_s = self.task.score_plan(one_f_one_b(self.task.problem, self.step, layout, devices, limit))
        if step_s < self.best_bounded.step_s:
            self.best_bounded = Tried(layout, devices, step_s, limit=limit)
        return step_s

    def score(self, layout: Layout, devices: NDArray[np.int32], order: str) -> float:
        """Step time of devices (N,) of a layout in an order, one of `priorities` or 1F1B."""
        if order in self.priorities:
            step_s = self.task.score_ordered(devices, self.priorities[order])
            if step_s < self.best_listed[1]:
                self.best_listed = (devices, step_s, self.priorities[order])
            return step_s
        limit = most_under_way(layout)
        return self.score_bounded(layout, devices, 2 * limit - 1 if order == "1f1b-deep" else limit)


MOST_STAGES = 8
PLACES = 48
"""Places where a chain may be cut between stages."""


def replicated_plans(chain: Chain, line: list[int], s_per_byte: float) -> list[StagePlan]:
    """Plans of 2 to `MOST_STAGES` stages that minimise the time of the slowest stage.

    By dynamic programming over the last stage's first layer and devices (Narayanan et al. 2019, section 3.1): a stage
    takes its work over its devices; its transfers over its ends count fully or not at all, and so do the gradients and
    parameters that its replicas exchange (Fan et al. 2021, section 4).

    Args:
        chain: of the problem.
        line: devices in the order in which stages take them.
        s_per_byte: of the exchange between replicas.
    """
    found = (
        StagePlan(
            tuple(cuts[:-1]),
            tuple(tuple(line[a:b]) for a, b in itertools.pairwise(itertools.accumulate(replicas, initial=0))),
        )
        for exchanging, sending in itertools.product((0.0, 1.0), repeat=2)
        for cuts, replicas in _plans(chain, len(line), sending, exchanging * s_per_byte)
    )
    return list(dict.fromkeys(found))


def _plans(chain: Chain, num_devices: int, sending: float, s_per_byte: float) -> list[tuple[list[int], list[int]]]:
    """For each number of stages: where each ends, and how many replicas it has."""
    before = np.concatenate(([0.0], np.cumsum(chain.work_s)))
    held = np.concatenate(([0.0], np.cumsum(chain.fixed_bytes)))
    cuts = thinnest_cuts(before, chain.crossing_s, PLACES)
    sent = chain.crossing_s[cuts] * sending
    sent[0] = sent[-1] = 0.0
    work = before[cuts][None, :] - before[cuts][:, None] + sent[None, :] + sent[:, None]  # from cut, to cut
    exchanged = np.maximum(held[cuts][None, :] - held[cuts][:, None], 0.0) * s_per_byte
    work[np.tril_indices(len(cuts))] = np.inf
    most = int(min(num_devices, chain.num_micro_batches))
    stage_s = np.stack([work / r + exchanged * (r - 1) / r for r in range(1, most + 1)])
    places, stages = len(cuts), min(MOST_STAGES, num_devices, len(cuts) - 1)
    best = np.full((num_devices + 1, places), np.inf)  # of the chain up to each cut on so many devices
    best[0, 0] = 0.0
    chosen: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    plans = []
    for stage in range(stages):
        following = np.full_like(best, np.inf)
        first, number = np.zeros(best.shape, dtype=np.int64), np.zeros(best.shape, dtype=np.int64)
        for used in range(1, num_devices + 1):
            for r in range(1, min(used, most) + 1):
                worst = np.maximum(best[used - r][:, None], stage_s[r - 1])
                at = worst.argmin(axis=0)
                value = worst[at, np.arange(places)]
                better = value < following[used]
                following[used][better], first[used][better], number[used][better] = value[better], at[better], r
        best = following
        chosen.append((first, number))
        used = int(best[:, -1].argmin())
        if stage and np.isfinite(best[used, -1]):
            plans.append(_traced(chosen, cuts, used))
    return plans


def _traced(
    chosen: list[tuple[NDArray[np.int64], NDArray[np.int64]]], cuts: NDArray[np.int64], used: int
) -> tuple[list[int], list[int]]:
    at, ends, replicas = len(cuts) - 1, [], []
    for first, number in reversed(chosen):
        ends.append(int(cuts[at]))
        replicas.append(int(number[used, at]))
        at, used = int(first[used, at]), used - replicas[-1]
    return ends[::-1], replicas[::-1]


MOST_PLANS = 2000
"""Plans that are few enough to try all of them."""


@dataclass(frozen=True)
class StagePlan:
    """Where a chain is cut into stages, and the devices of each stage.

    Attributes:
        ends: where each stage but the last ends, ascending places of the chain.
        teams: the devices of each stage; micro-batches are dealt out over them in contiguous runs.
        owners: which replicas own the parameters of a stage, as of `Layout`.
        by_speed: faster devices of a team get more micro-batches.
    """

    ends: tuple[int, ...]
    teams: tuple[tuple[int, ...], ...]
    owners: Owners = "spread"
    by_speed: bool = True

    @classmethod
    def of(cls, layout: Layout, chain: Chain) -> StagePlan:
        """The plan of a layout whose stages are contiguous; those without a place of the chain are left out."""
        stage_of = np.zeros(chain.step.num_positions, dtype=np.int64)  # of each place of the chain
        stage_of[chain.step.position] = layout.role_stage
        teams = tuple(tuple(dict.fromkeys(row)) for row in layout.devices[np.unique(stage_of)].tolist())
        return cls(tuple((np.flatnonzero(np.diff(stage_of)) + 1).tolist()), teams, layout.owners)

    def layout(self, chain: Chain) -> Layout:
        """The plan as a layout.

        It has a column of devices for each replica where all teams can be dealt out together, else one for each
        micro-batch; columns that are neighbours are far apart in time, so that owners, which are dealt out over
        columns, are spread over every team.
        """
        count = chain.num_micro_batches
        dealt = [self._dealt(team, chain) for team in self.teams]
        columns = math.lcm(*(len(team) for team in self.teams))
        together = np.arange(count) * columns // count
        as_dealt = [np.arange(columns) * len(team) // columns for team in self.teams]
        if columns > count or any(
            not np.array_equal(place[together], own) for place, own in zip(as_dealt, dealt, strict=True)
        ):
            columns, together, as_dealt = count, np.arange(count), dealt
        column = far_apart(columns)
        table = np.empty((len(self.teams), columns), dtype=np.int32)
        table[:, column] = [np.array(team)[place] for team, place in zip(self.teams, as_dealt, strict=True)]
        stage_of = np.searchsorted(np.array(self.ends), np.arange(chain.step.num_positions), side="right")
        return Layout(
            devices=table,
            role_stage=stage_of.astype(np.int32)[chain.step.position],
            replica=column[together],
            owners=self.owners,
            name=f"stages of {', '.join(str(len(team)) for team in self.teams)} replicas",
            teams=chain.teams,
        )

    def neighbours(self, num_positions: int, far: int) -> Iterator[StagePlan]:
        """Plans with one thing changed: an end moved, a device of another stage, a stage more or less, other owners.

        Args:
            num_positions: P, places of the chain.
            far: how far an end is moved.
        """
        for ends in one_moved(self.ends, (far, -far), (0, num_positions)):
            yield replace(self, ends=ends)
        for index in range(len(self.ends)):
            yield from self._across(index)
        bounds = (0, *self.ends, num_positions)
        for index, team in enumerate(self.teams):
            middle = (bounds[index] + bounds[index + 1]) // 2
            if len(team) > 1 and bounds[index] < middle:
                half = (len(team) + 1) // 2
                teams = (*self.teams[:index], team[:half], team[half:], *self.teams[index + 1 :])
                yield replace(self, ends=tuple(sorted((*self.ends, middle))), teams=teams)
        yield replace(self, owners="with-stage" if self.owners == "spread" else "spread")
        yield replace(self, by_speed=not self.by_speed)

    def _across(self, index: int) -> Iterator[StagePlan]:
        """A device moved over the end of a stage, both ways; the two nearest swapped; the two stages as one."""
        first, second = self.teams[index : index + 2]
        pairs = [(tuple(sorted((*first, *second))),), ((*first[:-1], second[0]), (first[-1], *second[1:]))]
        if len(first) > 1:
            pairs.append((first[:-1], (first[-1], *second)))
        if len(second) > 1:
            pairs.append(((*first, second[0]), second[1:]))
        for teams in pairs:
            ends = self.ends if len(teams) == 2 else (*self.ends[:index], *self.ends[index + 1 :])
            yield replace(self, ends=ends, teams=(*self.teams[:index], *teams, *self.teams[index + 2 :]))

    def _dealt(self, team: tuple[int, ...], chain: Chain) -> NDArray[np.int64]:
        """(K,) int64: the member of a team that runs each micro-batch."""
        count, speed = chain.num_micro_batches, chain.speed[list(team)]
        if self.by_speed and np.ptp(speed) > 0 and len(team) <= count:
            return deal(count, 1.0 / speed).astype(np.int64)
        return np.arange(count) * len(team) // count


def all_plans(num_positions: int, devices: list[int]) -> list[StagePlan]:
    """Every plan of contiguous stages on some of the devices, in every order; empty where there are too many.

    Args:
        num_positions: P, places of the chain.
        devices: whose teams are taken.
    """
    sizes = range(1, min(num_positions, len(devices)) + 1)
    if len(devices) > 4 or sum(math.comb(num_positions - 1, p - 1) for p in sizes) * 60 > MOST_PLANS:
        return []
    found = (
        StagePlan(ends, tuple(tuple(sorted(line[a:b])) for a, b in itertools.pairwise((0, *cuts))))
        for line in itertools.permutations(devices)
        for stages in sizes
        for cuts in itertools.combinations(range(1, len(line) + 1), stages)
        for ends in itertools.combinations(range(1, num_positions), stages - 1)
    )
    return list(dict.fromkeys(found))


def far_apart(count: int) -> NDArray[np.int32]:
    """(count,) int32: a permutation, by van der Corput's sequence, in which any run of places is spread evenly."""
    bits = max(count - 1, 1).bit_length()
    turned = np.array([int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits)])
    return np.argsort(turned[turned < count]).astype(np.int32)


FACTORS = (1.25, 1.5, 1.75, 2.5, 3.0, 4.0)
"""Micro-batches under way, as multiples of those of 1F1B; 1 and about 2 are in the field."""
BOUNDED_SHARE = 0.5
"""Part of the budget left that goes into bounds, where a plan with one is better than any list schedule."""


def hybrid_start(task: Task, *, until: float) -> tuple[NDArray[np.int32], float, NDArray[np.float64]]:
    """Devices (N,) of the best hybrid in an order that priorities make, its step time, and those priorities (N,).

    The step time is infinite where none that was tried fits into memory. Where 1F1B is better than all such orders, it
    is improved too, beyond `until`: a search over placements knows list schedules only, which never idle on purpose.

    Args:
        task: scores and counts.
        until: share of its budget for hybrids.
    """
    field = improve_hybrids(task, until=until)
    if field.best_bounded.step_s < field.best_listed[1]:
        field.until = task.spent + BOUNDED_SHARE * (1.0 - task.spent)
        improve_bounded(field)
    return field.best_listed


def improve_bounded(field: Field) -> None:
    """Tries other numbers of micro-batches under way, for all stages, then one by one; then owners; as long as it pays.

    Args:
        field: with a plan under a bound.
    """
    base = most_under_way(field.best_bounded.layout)
    for factor in FACTORS:
        _try_bound(field, np.ceil(factor * base).astype(np.int64))
    before_s = math.inf
    while field.best_bounded.step_s < before_s:
        before_s = field.best_bounded.step_s
        for stage, change in itertools.product(range(len(base)), (1, -1, 3, -2)):
            limit = field.best_bounded.limit.copy()
            limit[stage] = max(limit[stage] + change, 1)
            _try_bound(field, limit)
        field.move_owners(field.best_bounded, lambda best, moved: field.score_bounded(best.layout, moved, best.limit))


def _try_bound(field: Field, limit: NDArray[np.int64]) -> None:
    """Scores the best placement with another bound on micro-batches under way."""
    best = field.best_bounded
    if not field.is_spent and not np.array_equal(limit, best.limit):
        field.score_bounded(best.layout, best.devices, limit)


LAYOUTS_SHARE = 0.15
"""Most of a budget that layouts take, but for one batch of them; neighbours of the best ones take as much again."""
FEW, FEW_LAYOUTS_SHARE = 300, 0.4
"""Evaluations of a budget below which layouts take more of it, and how much."""
LAYOUTS_BATCH = 8
KEPT_LAYOUTS = 4
"""Layouts that come back at most, the best."""
STARTS_REFINED = 2
"""Those of them whose neighbours are tried, as long as one is better ..."""
START_REFINEMENTS = 200
"""... and how many of each at most."""
Starts = list[tuple[NDArray[np.int32], float]]
"""Devices (N,) int32 and step times of placements to start from."""


def parallel_starts(task: Task) -> Starts:
    """The best layouts in the problem's op order, best first; nothing where the step is in one part.

    They are over ops, not groups, which may be too coarse for them: stages x replicas, then stages with different
    numbers of replicas, experts and tables apart. Where the task takes no plans, for which `hybrid_start` does more,
    stages of the best ones are moved as long as that helps.

    Args:
        task: scores and counts.
    """
    problem = task.problem
    if not problem.graph.is_in_parts:
        return []
    field, is_few = Field(task), task.budget.evaluations < FEW

    def attempt(layout: Layout, best: Tried) -> Tried:
        devices = placement_of(problem, layout, field.step)
        return Tried(layout, devices, float(task.score(devices, np.array([best.step_s]))[0]))

    until = task.spent + (FEW_LAYOUTS_SHARE if is_few else LAYOUTS_SHARE)
    found: list[Tried] = []
    made = _distinct(field)
    while (
        (not found or task.spent < until)
        and not task.is_spent
        and (batch := list(itertools.islice(made, LAYOUTS_BATCH)))
    ):
        times = task.score(np.stack([devices for devices, _ in batch])).tolist()
        found += [Tried(layout, devices, step_s) for (devices, layout), step_s in zip(batch, times, strict=True)]
        found = sorted(found, key=lambda one: one.step_s)[:KEPT_LAYOUTS]
    if not is_few and not task.takes_plans:
        field.until = task.spent + LAYOUTS_SHARE
        for place, one in enumerate(found[:STARTS_REFINED]):
            if not len(one.layout.role_device) and not one.layout.is_across and math.isfinite(one.step_s):
                found[place] = field.climb(one, attempt, START_REFINEMENTS)
    return sorted(((one.devices, one.step_s) for one in found), key=lambda start: start[1])


def first_layouts(problem: Problem, count: int) -> list[NDArray[np.int32]]:
    """(N,) int32: the first `count` layouts of a step in micro-batches or shards, none of one in one part."""
    if not problem.graph.is_in_parts:
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
