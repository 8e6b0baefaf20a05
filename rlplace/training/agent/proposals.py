"""`Proposer`: searches a problem under given factors, beginning at what was found before, for placements to measure."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.groupings import majority_devices
from rlplace.search.guide import Guide
from rlplace.search.improve.anneal import AnnealSettings, anneal_finer
from rlplace.search.methods import METHODS
from rlplace.search.task import Budget, Task
from rlplace.search.winners import CountedTimer, OwnOrder, Winners, choose_diverse, permuted, shuffled
from rlplace.training.agent.batches import AverageTimer
from rlplace.training.agent.config import AgentConfig

SEARCH = "portfolio"
WINNERS = 32
"""Placements of a search among which the best that is unlike what was measured is chosen."""
PROBES = (1.0, 0.5, 0.25, 0.125)
"""Shares of the work that are tried on one device of a kind, to learn how fast it is."""
SCRATCH = 299
"""Most evaluations of a search from scratch: with more it would try heuristics, which know little of the factors."""
ROUNDING = 1e-9
"""By what the shares of all groups may add up to more than 1."""
LEAST_S = 1e-3
"""Seconds of a search at least: a budget is never nothing."""
SWAPS = 64
"""Placements simulated at most to relabel devices."""
WALK = 2
"""Swaps tried for each device to relabel them at random."""


class Proposer:
    """What the agent searches with, under one set of factors after the other.

    Attributes:
        evaluations: placements simulated so far.

    Args:
        problem: as it was given.
        generator: of every draw.
        config: how much is tried.
        guide: suggests starts and moves to every search.
        start: (N,) a placement that the first search starts from, besides its own starts.
    """

    def __init__(
        self,
        problem: Problem,
        generator: np.random.Generator,
        config: AgentConfig,
        guide: Guide | None = None,
        start: NDArray[np.int32] | None = None,
    ) -> None:
        self.evaluations = 0
        self._guide, self._begin = guide, start
        self._problem, self._generator, self._config = problem, generator, config
        self._pool: dict[bytes, NDArray[np.int32]] = {}

    def first(
        self, simulator: Simulator, count: int, budget: Budget, *, has_probes: bool = True
    ) -> list[NDArray[np.int32]]:
        """At most `count` placements (N,) before anything is measured: the best found, probes, relabelled ones.

        All that fits on one device tells how fast its kind is, and is near the best where links are slow; the same
        placement over other devices and links tells how fast these are.

        Args:
            simulator: of the problem that is searched.
            count: how many are wanted.
            budget: evaluations or seconds.
            has_probes: whether nothing is known of how fast each kind of device is.
        """
        winners = Winners(WINNERS)
        task = Task(simulator.problem, OwnOrder(simulator), budget, seed=self._seed(), observer=winners)
        METHODS[SEARCH].run(task, start=self._begin, guide=self._guide)
        self.evaluations += task.evaluations
        if task.best_devices is None:
            return []
        best = self._relabelled(simulator, task.best_devices, task.best_s)[0]
        ranked = winners.best(WINNERS)
        for devices, _ in ranked:
            self._remember(devices)
        self._remember(best)
        found = [best, *(self._probes(simulator, best) if has_probes else [])][:count]
        if self._config.is_permuted:
            found += self.relabelled(simulator, best, count - len(found))
        left = [devices for devices, _ in ranked]
        times = np.array([step_s for _, step_s in ranked])
        chosen = choose_diverse(np.array(left), times, count - len(found), found)
        return _distinct([*found, *(left[row] for row in chosen)])[:count]

    def next(
        self, simulator: Simulator | AverageTimer, budget: Budget, seen: Iterable[NDArray[np.int32]], *, is_first: bool
    ) -> list[NDArray[np.int32]]:
        """Placements (N,) found under these factors, those unlike all of `seen` and each other first, fastest first.

        Args:
            simulator: of the problem under these factors.
            budget: evaluations or seconds.
            seen: placements that were measured or are going to be.
            is_first: whether it is the first of a batch, which also searches from scratch, for the whole batch.
        """
        seen = list(seen)
        cost = simulator.cost if isinstance(simulator, AverageTimer) else 1
        budget = Budget(max(_whole(budget.evaluations / cost), 1), budget.seconds)
        before, self.evaluations = self.evaluations, 0
        found = self._next(simulator, budget, seen, is_first=is_first)
        self.evaluations = before + cost * self.evaluations
        return found

    def _next(
        self, simulator: Simulator | AverageTimer, budget: Budget, seen: list[NDArray[np.int32]], *, is_first: bool
    ) -> list[NDArray[np.int32]]:
        config = self._config
        scratch, rest = _parts(budget, config.scratch_share)
        start, start_s = self._start(simulator, seen)
        if scratch is not None and is_first:
            most = min(scratch.evaluations * config.batch, SCRATCH)
            whole = Budget(most, scratch.seconds * config.batch)
            timer = OwnOrder(simulator) if isinstance(simulator, Simulator) else simulator
            task = Task(simulator.problem, timer, whole, seed=self._seed())
            METHODS[SEARCH].run(task, guide=self._guide)
            self.evaluations += task.evaluations
            if task.best_devices is not None:
                self._remember(task.best_devices)
                if task.best_s < start_s:
                    start, start_s = task.best_devices, task.best_s
        if start is None:
            return []
        winners = Winners(WINNERS)
        task = Task(simulator.problem, simulator, rest, seed=self._seed(), observer=winners)
        task.score(start)
        settings = AnnealSettings(guide=self._guide, critical_share=0.0)  # other placements teach more than better ones
        anneal_finer(task, start, start_s, until=1.0, settings=settings)
        self.evaluations += task.evaluations
        if task.best_devices is None:
            return []
        best, best_s = self._relabelled(simulator, task.best_devices, task.best_s)
        self._remember(best)
        ranked = [(best, best_s), *winners.best(WINNERS, [*seen, best])]
        devices, times = np.array([one for one, _ in ranked]), np.array([step_s for _, step_s in ranked])
        return [devices[row] for row in choose_diverse(devices, times, len(ranked), seen)]

    def relabelled(self, simulator: Simulator, devices: NDArray[np.int32], count: int) -> list[NDArray[np.int32]]:
        """At most `count` placements: these devices (N,) relabelled at random among those of a kind.

        So that the simulator sees no loss: on two nodes a placement that keeps to one would else be torn apart.
        """
        timer, found = CountedTimer(simulator), {devices.tobytes(): devices}
        step_s = float(timer.step_times(devices[None])[0]) if count > 0 else 0.0
        swaps = WALK * simulator.problem.host.num_devices
        for _ in range(count):
            other = shuffled(simulator.problem, devices, step_s, timer, self._generator, swaps=swaps)
            found.setdefault(other.tobytes(), other)
        self.evaluations += timer.count
        return list(found.values())[1:]

    def known(self, simulator: Simulator, count: int, seen: Iterable[NDArray[np.int32]]) -> list[NDArray[np.int32]]:
        """At most `count` placements (N,) that are remembered, unlike `seen` and each other if possible, best first."""
        pool = list(self._pool.values())
        if not pool or count < 1:
            return []
        times = simulator.step_times(np.array(pool))
        self.evaluations += len(pool)
        return [pool[row] for row in choose_diverse(np.array(pool), times, count, seen)]

    def remember(self, placements: Iterable[NDArray[np.int32]]) -> None:
        """Takes placements (N,) to start from."""
        for devices in placements:
            self._remember(devices)

    def _start(
        self, simulator: Simulator | AverageTimer, seen: list[NDArray[np.int32]]
    ) -> tuple[NDArray[np.int32] | None, float]:
        """The best placement known under these factors, and its step time."""
        known = list({devices.tobytes(): devices for devices in (*self._pool.values(), *seen)}.values())
        if not known:
            return None, math.inf
        times = simulator.step_times(np.array(known))
        self.evaluations += len(known)
        place = int(np.argmin(times))
        return (known[place], float(times[place])) if math.isfinite(times[place]) else (None, math.inf)

    def _relabelled(
        self, simulator: Simulator | AverageTimer, devices: NDArray[np.int32], step_s: float
    ) -> tuple[NDArray[np.int32], float]:
        if not self._config.is_permuted:
            return devices, step_s
        timer = CountedTimer(simulator)
        found = permuted(simulator.problem, devices, step_s, timer, most=SWAPS)
        self.evaluations += timer.count
        return found

    def _probes(self, simulator: Simulator, best: NDArray[np.int32]) -> list[NDArray[np.int32]]:
        """For each kind as much as fits on one device of it, the rest as in `best`; the fastest kind first."""
        problem = self._problem
        firsts: dict[str, int] = {}
        for index, device in enumerate(problem.host.devices):
            firsts.setdefault(device.kind, index)
        cost_s = problem.costs.op_time_s.mean(axis=1)
        before = np.cumsum(np.bincount(problem.grouping.op_group, weights=cost_s)) / max(cost_s.sum(), 1e-12)
        others = majority_devices(problem, best)
        found: list[tuple[float, NDArray[np.int32]]] = []
        for index in firsts.values():
            groups = [problem.nearest_groups(np.where(before <= share + ROUNDING, index, others)) for share in PROBES]
            placements = problem.grouping.expand(np.array(groups))
            times = simulator.step_times(placements)
            self.evaluations += len(placements)
            fits = np.flatnonzero(np.isfinite(times))
            if len(fits):
                found.append((float(times[fits[0]]), placements[fits[0]]))
        return [devices for _, devices in sorted(found, key=lambda pair: pair[0])]

    def _remember(self, devices: NDArray[np.int32]) -> None:
        """The newest `pool` placements are kept."""
        key = devices.tobytes()
        self._pool.pop(key, None)
        self._pool[key] = devices
        while len(self._pool) > self._config.pool:
            self._pool.pop(next(iter(self._pool)))

    def _seed(self) -> int:
        return int(self._generator.integers(2**31))


def _parts(budget: Budget, share: float) -> tuple[Budget | None, Budget]:
    """The budget of a search from scratch, None for none, and that of what goes on from a start."""
    if math.isfinite(budget.evaluations):
        first = math.floor(budget.evaluations * share)
        rest = Budget(max(budget.evaluations - first, 1), budget.seconds)
        return (Budget(first, budget.seconds) if first else None), rest
    if not share:
        return None, budget
    return Budget(seconds=budget.seconds * share), Budget(seconds=max(budget.seconds * (1 - share), LEAST_S))


def _distinct(placements: Iterable[NDArray[np.int32]]) -> list[NDArray[np.int32]]:
    return list({devices.tobytes(): devices for devices in placements}.values())


def _whole(count: float) -> float:
    """Rounded down, where it is finite."""
    return math.floor(count) if math.isfinite(count) else count
