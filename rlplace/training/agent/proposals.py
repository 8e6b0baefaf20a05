"""`Proposer`: searches a problem under given factors, beginning at earlier results, for placements to measure.

`choose_batch`: of many candidates those that are worth measuring together, by draws of the posterior.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from rlplace.measure import Plan, Problem, Simulator
from rlplace.search import METHODS, AnnealSettings, Budget, Task
from rlplace.search.groupings import majority_devices
from rlplace.search.improve.anneal import anneal_finer
from rlplace.search.methods import CountedTimer, OwnOrder, Winners, choose_diverse, permuted, shuffled
from rlplace.search.task import Guide
from rlplace.session.calibrate import DRAWN, draw_spread
from rlplace.training.config import AgentConfig

SEARCH = "portfolio"
WINNERS = 32
"""Placements of a search among which the best that is unlike the measured ones is chosen."""
PROBES = (1.0, 0.5, 0.25, 0.125)
"""Shares of the work that are tried on one device of a kind, to learn how fast it is."""
SCRATCH = 299
"""Most evaluations of a search from scratch: with more it would try heuristics, which know little of the factors."""
ROUNDING = 1e-9
"""The excess over 1 that the shares of all groups may add up to."""
LEAST_S = 1e-3
"""Seconds of a search at least: a budget is never nothing."""
SWAPS = 64
"""Placements simulated at most to relabel devices."""
WALK = 2
"""Swaps tried for each device to relabel them at random."""


class Proposer:
    """The searches of the agent, under one set of factors after the other.

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
        best, ranked = self._searched(simulator, budget, self._begin)
        if best is None:
            return []
        left = [devices for devices, _ in ranked]
        self.remember([*left, best])
        found = [best, *(self._probes(simulator, best) if has_probes else [])][:count]
        if self._config.is_permuted:
            found += self.relabelled(simulator, best, count - len(found))
        times = np.array([step_s for _, step_s in ranked])
        chosen = choose_diverse(np.array(left), times, count - len(found), found)
        return _distinct([*found, *(left[row] for row in chosen)])[:count]

    def last(self, simulator: Simulator, budget: Budget, start: NDArray[np.int32]) -> list[NDArray[np.int32]]:
        """Placements (N,) that one long search finds, the best first.

        Args:
            simulator: of the problem under the most probable factors.
            budget: evaluations or seconds.
            start: (N,) the best placement so far, from which it goes on unless its own starts are better.
        """
        best, ranked = self._searched(simulator, budget, start)
        return [] if best is None else _distinct([best, *(devices for devices, _ in ranked)])

    def _searched(
        self, simulator: Simulator, budget: Budget, start: NDArray[np.int32] | None
    ) -> tuple[NDArray[np.int32] | None, list[tuple[NDArray[np.int32], float]]]:
        """The best placement (N,) of a search with starts of its own, and the best ones with their step times."""
        winners = Winners(WINNERS)
        task = Task(simulator.problem, OwnOrder(simulator), budget, seed=self._seed(), observer=winners)
        METHODS[SEARCH].run(task, start=start, guide=self._guide)
        self.evaluations += task.evaluations
        if task.best_devices is None:
            return None, []
        return self._relabelled(simulator, task.best_devices, task.best_s)[0], winners.best(WINNERS)

    def spread(self, simulator: Simulator) -> list[NDArray[np.int32]]:
        """At most one placement (N,): of some drawn ones that fit into memory, the one whose step shows most."""
        self.evaluations += DRAWN
        return list(self._problem.grouping.expand(draw_spread(self._problem, simulator, self._generator, 1)))

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
        seen, cost = list(seen), simulator.cost if isinstance(simulator, AverageTimer) else 1
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
            timer = OwnOrder(simulator) if isinstance(simulator, Simulator) else simulator
            task = Task(simulator.problem, timer, Budget(most, scratch.seconds * config.batch), seed=self._seed())
            METHODS[SEARCH].run(task, guide=self._guide)
            self.evaluations += task.evaluations
            if task.best_devices is not None:
                self.remember([task.best_devices])
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
        self.remember([best])
        devices, times = zip((best, best_s), *winners.best(WINNERS, [*seen, best]), strict=True)
        return [devices[row] for row in choose_diverse(np.array(devices), np.array(times), len(devices), seen)]

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
        """Takes placements (N,) to start from; the newest `pool` of all are kept."""
        for devices in placements:
            key = devices.tobytes()
            self._pool.pop(key, None)
            self._pool[key] = devices
            if len(self._pool) > self._config.pool:
                self._pool.pop(next(iter(self._pool)))

    def _start(
        self, simulator: Simulator | AverageTimer, seen: list[NDArray[np.int32]]
    ) -> tuple[NDArray[np.int32] | None, float]:
        """The best placement known under these factors, and its step time."""
        known = _distinct([*self._pool.values(), *seen])
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
        firsts = {device.kind: index for index, device in reversed(list(enumerate(problem.host.devices)))}
        cost_s = problem.costs.op_time_s.mean(axis=1)
        before = np.cumsum(np.bincount(problem.grouping.op_group, weights=cost_s)) / max(cost_s.sum(), 1e-12)
        others = majority_devices(problem, best)
        found: list[tuple[float, NDArray[np.int32]]] = []
        for index in sorted(firsts.values()):
            groups = [problem.nearest_groups(np.where(before <= share + ROUNDING, index, others)) for share in PROBES]
            placements = problem.grouping.expand(np.array(groups))
            times = simulator.step_times(placements)
            self.evaluations += len(placements)
            fits = np.flatnonzero(np.isfinite(times))
            if len(fits):
                found.append((float(times[fits[0]]), placements[fits[0]]))
        return [devices for _, devices in sorted(found, key=lambda pair: pair[0])]

    def _seed(self) -> int:
        return int(self._generator.integers(2**31))


def _parts(budget: Budget, share: float) -> tuple[Budget | None, Budget]:
    """The budget of a search from scratch, None for none, and that of a search that goes on from a start."""
    if math.isfinite(budget.evaluations):
        first = math.floor(budget.evaluations * share)
        scratch = Budget(first, budget.seconds) if first else None
        return scratch, Budget(max(budget.evaluations - first, 1), budget.seconds)
    if not share:
        return None, budget
    return Budget(seconds=budget.seconds * share), Budget(seconds=max(budget.seconds * (1 - share), LEAST_S))


def _distinct(placements: Iterable[NDArray[np.int32]]) -> list[NDArray[np.int32]]:
    return list({devices.tobytes(): devices for devices in placements}.values())


def _whole(count: float) -> float:
    """Rounded down, where it is finite."""
    return math.floor(count) if math.isfinite(count) else count


def choose_batch(log_s_DC: NDArray[np.float64], best_log_s: float, count: int) -> list[int]:
    """Columns to take, at most `count`: those whose fastest is expected to be the furthest below the best so far.

    Batch expected improvement (Ginsbourger, Le Riche and Carraro 2010, "Kriging is well-suited to parallelize
    optimization", eq. 10), over draws of the posterior and greedily: each one adds most to the expected gain of those
    before it. Where nothing adds anything, the fastest on average comes first.

    Args:
        log_s_DC: (D, C) logarithms of step times of candidates under draws; infinite where memory does not suffice.
        best_log_s: of the best measured so far; infinite for none.
        count: how many are wanted.

    Example:
        Under both draws the first is a little faster than the best so far; the others are faster still, or slow.

        >>> choose_batch(np.array([[-0.1, -0.5, 0.4], [-0.1, 0.5, -0.2]]), 0.0, 2)
        [1, 2]
    """
    num_draws, num_candidates = log_s_DC.shape
    mean = log_s_DC.mean(axis=0)
    worst = float(log_s_DC[np.isfinite(log_s_DC)].max(initial=0.0))
    best = np.full(num_draws, min(best_log_s, worst))
    chosen: list[int] = []
    while len(chosen) < min(count, num_candidates):
        gain = np.maximum(best[:, None] - log_s_DC, 0.0).mean(axis=0)
        gain[chosen], mean[chosen] = -1.0, np.inf
        place = int(np.lexsort((mean, -gain))[0])
        best = np.minimum(best, log_s_DC[:, place])
        chosen.append(place)
    return chosen


def expected_gain(log_s_DC: NDArray[np.float64], best_log_s_D: NDArray[np.float64]) -> float:
    """By how much the fastest of C plans is expected to be below the best so far, in logarithms; infinite if unknown.

    Args:
        log_s_DC: (D, C) logarithms of step times of the plans under draws; infinite where memory does not suffice.
        best_log_s_D: (D,) of the best so far under the same draws.

    Example:
        Under the first draw the second plan gains 0.3, under the other one none gains.

        >>> expected_gain(np.array([[-0.1, -0.3], [0.5, 0.2]]), np.array([0.0, 0.1]))
        0.15
    """
    fits = np.isfinite(best_log_s_D)
    gain = np.maximum(best_log_s_D[fits] - log_s_DC[fits].min(axis=1), 0.0)
    return float(gain.mean()) if fits.any() else math.inf


def log_step_times(plans: Sequence[Plan], simulators: Iterable[Simulator], seconds: float) -> NDArray[np.float64]:
    """(D, C) logarithms of the step times of C plans on D simulators; infinite where memory does not suffice.

    Args:
        plans: of one problem.
        simulators: of that problem under other factors; one at least.
        seconds: after which no other simulator is asked.
    """
    begin, step_s, batch = time.monotonic(), [], None
    for simulator in simulators:
        batch = batch or simulator.check_plans(plans)
        step_s.append([outcome.step_time_s for outcome in simulator.retime_batch(batch)])
        if time.monotonic() - begin > seconds:
            break
    return np.asarray(np.log(step_s))


class AverageTimer:
    """A step timer: the geometric mean of step times on several simulators.

    A search under one set of factors ends where these, and luck, make a placement fast: the best under many is rather a
        placement that is fast under all factors (sample average approximation, Kleywegt, Shapiro and
    Homem-de-Mello 2002, SIAM J. Optim. 12(2)).

    Attributes:
        problem: of the search.
        threads: placements simulated at once.

    Args:
        problem: the heuristics' facts about it.
        simulators: which step times are averaged; one at least.
    """

    threads = 1

    def __init__(self, problem: Problem, simulators: Sequence[Simulator]) -> None:
        self.problem = problem
        self._simulators = tuple(simulators)

    def step_times(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
        """(B,) seconds of placements (B, N); infinite where memory does not suffice."""
        times_s = [simulator.step_times(placements) for simulator in self._simulators]
        return np.asarray(np.exp(np.mean(np.log(times_s), axis=0)))

    @property
    def cost(self) -> int:
        """Placements simulated for each one that is timed."""
        return len(self._simulators)
