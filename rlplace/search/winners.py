"""`find_winners`: of one search the placements that are worth measuring, unlike each other, devices relabelled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.measurement import StepTimer
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.diversity import OwnOrder, choose_diverse, permuted, shuffled
from rlplace.search.registry import METHODS
from rlplace.search.task import Budget, Task

SEARCH = "portfolio"
DESCENT, WALK = 16, 8
"""Placements simulated at most for each winner to relabel its devices: for the better, then at random at no loss."""
LEAST_SEARCHED = 0.5
"""Share of a budget that is for the search at least, whatever relabelling would take."""
KEPT = 4
"""Placements that are kept for each one that is wanted: winners are chosen among them once more at the end."""


class Winners:
    """The best placements that a search scores, unlike each other: an observer of its task.

    Args:
        capacity: how many are kept.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: dict[bytes, tuple[NDArray[np.int32], float]] = {}
        self._worst_s = float("inf")

    def scored(self, placements: NDArray[np.int32], step_s: NDArray[np.float64]) -> None:
        """Keeps those that are better than the worst of as many as there is room for."""
        for row in np.flatnonzero(step_s < self._worst_s).tolist():
            self._kept[placements[row].tobytes()] = (np.array(placements[row], dtype=np.int32), float(step_s[row]))
        if len(self._kept) >= 2 * self._capacity:  # now and then: a search scores thousands a second
            best = self.best(self._capacity)
            self._kept = {devices.tobytes(): (devices, step_s) for devices, step_s in best}
            self._worst_s = max(step_s for _, step_s in best)

    def learned(self, figures: Mapping[str, float]) -> None:
        """Nothing is kept of what a method learns."""

    def best(self, count: int, seen: Iterable[NDArray[np.int32]] = ()) -> list[tuple[NDArray[np.int32], float]]:
        """At most `count` placements and their step times, fastest first, unlike each other and `seen` if possible."""
        kept = list(self._kept.values())
        devices, times = np.array([devices for devices, _ in kept]), np.array([step_s for _, step_s in kept])
        return sorted((kept[row] for row in choose_diverse(devices, times, count, seen)), key=lambda one: one[1])


@dataclass(frozen=True)
class Found:
    """What a search and relabelling came to.

    Attributes:
        devices: placements (N,), by rank.
        evaluations: placements simulated.
    """

    devices: list[NDArray[np.int32]]
    evaluations: int


class CountedTimer:
    """A step timer that counts the placements it is asked for.

    Attributes:
        count: placements timed so far.
    """

    def __init__(self, timer: StepTimer) -> None:
        self.count = 0
        self._timer = timer

    def step_times(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
        self.count += len(placements)
        return self._timer.step_times(placements)


def find_winners(
    problem: Problem,
    simulator: Simulator,
    budget: Budget,
    count: int,
    *,
    seed: int,
    seen: Iterable[NDArray[np.int32]] = (),
) -> Found:
    """The `count` best placements of a search that are unlike each other, each relabelled among devices of a kind.

    A winner's devices are swapped as long as it gets better; then, where the host is symmetric, at random: what the
    simulator holds for equal need not be.

    Args:
        problem: what is searched.
        simulator: of that problem.
        budget: evaluations and seconds of all of it.
        count: how many are wanted.
        seed: of every draw.
        seen: placements that they should differ from.
    """
    kinds = {device.kind for device in problem.host.devices}
    relabelling = count * (DESCENT + WALK) if len(kinds) < problem.host.num_devices else 0
    searched = max(budget.evaluations - relabelling, LEAST_SEARCHED * budget.evaluations, 1)
    winners, seen = Winners(KEPT * count), list(seen)
    task = Task(problem, OwnOrder(simulator), Budget(int(searched), budget.seconds), seed=seed, observer=winners)
    METHODS[SEARCH].run(task)
    timer, generator = CountedTimer(simulator), np.random.default_rng(seed)
    chosen: list[NDArray[np.int32]] = []
    taken = {devices.tobytes() for devices in seen}
    for devices, step_s in winners.best(count, seen):
        left = int(budget.evaluations) - task.evaluations - timer.count
        better, better_s = permuted(problem, devices, step_s, timer, most=min(DESCENT, left))
        left = int(budget.evaluations) - task.evaluations - timer.count
        other = shuffled(problem, better, better_s, timer, generator, swaps=min(WALK, left))
        new = next((one for one in (other, better, devices) if one.tobytes() not in taken), None)
        if new is not None:
            chosen.append(new)
            taken.add(new.tobytes())
    return Found(chosen, task.evaluations + timer.count)
