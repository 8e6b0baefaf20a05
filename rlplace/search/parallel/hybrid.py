"""`data-parallel`, `pipeline` and `hybrid`: what people do with micro-batches, planned as they plan it, then simulated.

All of them are placements and orders of the same graph, so that a search is judged against them on equal terms.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.parallel.layouts import Chain, Layout, layouts, placement_of
from rlplace.search.parallel.micro_batch_orders import list_priorities, most_under_way, one_f_one_b
from rlplace.search.parallel.replication import replicated_plans
from rlplace.search.parallel.stage_plans import StagePlan, all_plans
from rlplace.search.parallel.step_roles import StepRoles, step_roles
from rlplace.search.rules.baselines import plain_devices
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
    """Micro-batches dealt out over all devices in proportion to speed, parameters owned evenly, in every order."""
    field = Field(task)
    count = min(len(field.plain), task.problem.graph.num_micro_batches)
    fastest = sorted(field.plain, key=lambda device: (-field.chain.speed[device], device))[:count]
    field.try_orders(field.chain.layout(np.array([sorted(fastest)], dtype=np.int32)))


def solve_pipeline(task: Task) -> None:
    """A stage a device, GPipe and 1F1B; stages cut so that the slowest, with what it sends, is as fast as can be."""
    field = Field(task)
    count = min(len(field.plain), field.step.num_positions)
    for cut in ("crossing", "work"):
        field.try_orders(field.chain.layout(np.array(field.plain[:count], dtype=np.int32)[:, None], cut))


def solve_hybrid(task: Task) -> None:
    """The best of grids of stages x replicas, stages with different numbers of them, and what is next to the best.

    All are simulated without regard to memory; then the best ones with it, each in every order: GPipe, backward first,
    1F1B, rank and tilt. From the best of those, plans with one thing changed are tried as long as one is better, then
    owners of parameters one by one.
    """
    improve_hybrids(task, until=1.0)


def improve_hybrids(task: Task, *, until: float) -> Field:
    """`solve_hybrid` until a share of the budget, a third of it for each of its parts at the most."""
    field = Field(task, until)
    begin = task.spent
    found: list[Tried] = []
    last = tried = min(max(TRIED, TRIED_OPS // task.problem.graph.num_ops), MOST_TRIED)
    field.until = begin + (until - begin) / 3
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
        field.move_owners(field.try_orders(field.refine(one).layout))
    return field


@dataclass(frozen=True, eq=False)
class Tried:
    """A layout, its best order and the step time."""

    layout: Layout
    order: str
    step_s: float


@dataclass(frozen=True, eq=False)
class Bounded:
    """A placement (N,) of a layout, micro-batches under way on each stage (p,) and the step time of that plan."""

    layout: Layout
    devices: NDArray[np.int32]
    limit: NDArray[np.int64]
    step_s: float


class Field:
    """A task's problem with all that layouts and orders of it are made of.

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
        self.plain = plain_devices(problem)
        self.priorities = list_priorities(problem)
        self.best_listed = (np.zeros(problem.graph.num_ops, dtype=np.int32), np.inf, self.priorities["rank"])
        nothing = Layout(np.zeros((1, 1), dtype=np.int32), np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32))
        self.best_bounded = Bounded(nothing, self.best_listed[0], np.zeros(1, dtype=np.int64), np.inf)
        self._roomy = Simulator(_without_limits(problem), threads=1)

    @property
    def is_spent(self) -> bool:
        """Whether its share of the budget is gone."""
        return self.task.is_spent or self.task.spent >= self.until

    def candidates(self) -> Iterator[Layout]:
        """Stages with different numbers of replicas, planned, then grids; all that there are where they are few.

        Planned ones are first: few evaluations end before all grids of many devices are tried.
        """
        problem = self.task.problem
        pairs = max(problem.host.num_devices * (problem.host.num_devices - 1), 1)
        s_per_byte = float(problem.transfer_s_per_byte.sum()) / pairs
        plans = replicated_plans(self.chain, self.plain, s_per_byte)
        for plan in plans:
            yield from self._dealt(plan)
        for layout in layouts(problem, self.step):
            if not len(layout.role_device):
                yield layout
        for plan in all_plans(self.step.num_positions, self.plain):
            yield from self._dealt(plan)

    def _dealt(self, plan: StagePlan) -> Iterator[Layout]:
        """Layouts of a plan: micro-batches by speed or evenly, parameters spread or with their stage."""
        for by_speed in (True, False) if np.ptp(self.chain.speed) > 0 else (True,):
            dealt = replace(plan, by_speed=by_speed)
            yield dealt.layout(self.chain)
            yield replace(dealt, owners="with-stage").layout(self.chain)

    def ranked(self, candidates: Iterator[Layout]) -> list[Layout]:
        """Candidates by step time on devices whose memory has no end, in the better of two orders."""
        timed: list[tuple[float, int, Layout]] = []
        for number, layout in enumerate(candidates):
            if self.is_spent and timed:
                break
            devices = placement_of(self.task.problem, layout, self.step)
            is_one = len(layout.devices) == 1 or self.task.evaluations_left < 2
            orders = ("backward-first",) if is_one else ("gpipe", "backward-first")
            times = [float(self._roomy.step_times(devices[None], self.priorities[order])[0]) for order in orders]
            self.task.count(len(orders))
            timed.append((min(times), number, layout))
        return [layout for _, _, layout in sorted(timed, key=lambda one: one[:2])]

    def try_orders(self, layout: Layout, orders: tuple[str, ...] = ()) -> Tried:
        """The best of the orders of a layout, all by default."""
        devices = placement_of(self.task.problem, layout, self.step)
        named = orders or (*self.priorities, "1f1b", "1f1b-deep")
        times = {order: self._score(layout, devices, order) for order in named}
        best = min(times, key=lambda order: times[order])
        return Tried(layout, best, times[best])

    def refine(self, one: Tried) -> Tried:
        """The best of a plan, what is next to it and so on, in the order that was best; steps get smaller."""
        plan, tries = StagePlan.of(one.layout, self.chain), 0
        far = max(self.step.num_positions // 16, 1)
        while far:
            is_better = False
            for other in plan.neighbours(self.step.num_positions, far):
                if self.is_spent or tries >= REFINEMENTS:
                    return one
                tries += 1
                tried = self.try_orders(other.layout(self.chain), (one.order,))
                if tried.step_s < one.step_s:
                    one, plan, is_better = tried, other, True
                    break
            far = far if is_better else far // 2
        return one

    def move_owners(self, one: Tried) -> None:
        """Tries each parameter on the other replicas of its stage, the largest first, in the order that was best."""
        devices, best_s = placement_of(self.task.problem, one.layout, self.step), one.step_s
        for tries, (members, device) in enumerate(self.other_owners(one.layout)):
            if self.is_spent or tries >= OWNERS_MOVED:
                return
            moved = devices.copy()
            moved[members] = device
            if device != devices[members[0]] and (step_s := self._score(one.layout, moved, one.order)) < best_s:
                devices, best_s = moved, step_s

    def other_owners(self, layout: Layout) -> Iterator[tuple[NDArray[np.int64], int]]:
        """Ops of each co-location class, the largest first, with every device of its stage where it may be."""
        problem, graph = self.task.problem, self.task.problem.graph
        held = graph.parameter_bytes + graph.gradient_bytes
        classes = np.flatnonzero(np.bincount(graph.colocation[graph.colocation >= 0]))
        size = np.bincount(graph.colocation[graph.colocation >= 0], weights=held[graph.colocation >= 0])
        for owned in classes[np.argsort(-size[classes], kind="stable")].tolist():
            members = np.flatnonzero(graph.colocation == owned)
            stage = int(layout.role_stage[self.step.role[members[0]]])
            for device in np.unique(layout.devices[stage]).tolist():
                if problem.allowed is None or problem.allowed[members, device].all():
                    yield members, device

    def score_bounded(self, layout: Layout, devices: NDArray[np.int32], limit: NDArray[np.int64]) -> float:
        """Step time of 1F1B with `limit` (p,) micro-batches under way; planning counts as an evaluation too."""
        if self.task.evaluations_left < 2:
            return np.inf
        self.task.count(1)
        step_s = self.task.score_plan(one_f_one_b(self.task.problem, self.step, layout, devices, limit))
        if step_s < self.best_bounded.step_s:
            self.best_bounded = Bounded(layout, devices, limit, step_s)
        return step_s

    def _score(self, layout: Layout, devices: NDArray[np.int32], order: str) -> float:
        if order in self.priorities:
            step_s = self.task.score_ordered(devices, self.priorities[order])
            if step_s < self.best_listed[1]:
                self.best_listed = (devices, step_s, self.priorities[order])
            return step_s
        limit = most_under_way(layout, self.task.problem.graph.num_micro_batches)
        return self.score_bounded(layout, devices, 2 * limit - 1 if order == "1f1b-deep" else limit)


def _without_limits(problem: Problem) -> Problem:
    devices = tuple(replace(device, memory_bytes=ROOMY_BYTES) for device in problem.host.devices)
    return replace(problem, host=replace(problem.host, devices=devices))
