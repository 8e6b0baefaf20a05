"""`Raced`: what a host said of the plans of a search, race by race, and the best of them so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlplace.measure.measurement import Measurement
from rlplace.measure.plan import Plan
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.task import BestSoFar
from rlplace.training.resume.state import MethodState, Race
from rlplace.training.searches.candidates import Candidates


class Raced:
    """The plans of a search that ran, told apart by their ratios to the reference of their race.

    A machine slows down and speeds up: step times of different races would say more of the machine than of the plans.

    Attributes:
        candidates: what may be run next, and all that ran.
        races: what ran, in order.
        single_s: step time on the best single device, the reference, in the latest race.
        plan: the best so far; None before the first.
        best_ratio: its step time over the reference's; infinite before the first.
        best_s: its step time, at the reference of the race after which it was the best.

    Args:
        capacity: simulated placements that are kept to be run.
        single_s: step time on the best single device, before the first race.
    """

    def __init__(self, capacity: int, single_s: float) -> None:
        self.candidates = Candidates(capacity)
        self.races: list[Race] = []
        self.single_s = single_s
        self.plan: Plan | None = None
        self.best_ratio, self.best_s = float("inf"), float("inf")
        self._improved: list[tuple[float, BestSoFar]] = []

    def resume(self, before: MethodState) -> None:
        """Goes on from what an interrupted search had run, and would have run next."""
        self.single_s, self.races, self.plan = before.single_s, list(before.races), before.plan
        if before.unmeasured is not None:
            self.candidates.note(before.unmeasured.devices, before.unmeasured.simulated_s)
        for race in before.races:
            self.candidates.record(race.plans, race.outcomes)
        self._improved = [(best.best_s / self.single_s, best) for best in before.history]
        if before.plan is not None and before.history:
            self.best_s, self.best_ratio = before.best_s, self._improved[-1][0]
            if before.plan.fingerprint not in {plan.fingerprint for race in before.races for plan in race.plans}:
                known = Measurement("ok", before.best_s, reference_s=self.single_s)  # the store has lost it
                self.candidates.record([before.plan], [known])

    def record(
        self,
        plans: Sequence[Plan],
        measurements: Sequence[Measurement],
        *,
        is_final: bool,
        num_scored: int,
        seconds: float,
    ) -> bool:
        """Takes in a race; whether there is a new best plan.

        Args:
            plans: what ran.
            measurements: of each.
            is_final: whether it was the last race.
            num_scored: placements that the search has simulated so far.
            seconds: wall time since it began.
        """
        self.candidates.record(plans, measurements)
        self.races.append(Race(tuple(plans), tuple(measurements), is_final))
        references_s = [measurement.reference_s for measurement in measurements if measurement.ok]
        if references_s:
            self.single_s = float(np.median(references_s))
        leader = self.candidates.best_measured(1)[0]
        if leader.plan is None or not leader.ratio < self.best_ratio:
            return False
        self.plan, self.best_ratio, self.best_s = leader.plan, leader.ratio, leader.ratio * self.single_s
        self._improved.append((leader.ratio, self.so_far(num_scored, seconds)))
        return True

    def so_far(self, num_scored: int, seconds: float) -> BestSoFar:
        """The best so far, at the latest reference; `num_scored` and `seconds` as of `record`."""
        return BestSoFar(num_scored, self.candidates.num_measured, seconds, self.best_ratio * self.single_s)

    def best(self, count: int) -> list[Plan]:
        """At most `count` plans that ran to their end, the best first."""
        best = self.candidates.best_measured(count)
        return [one.plan for one in best if np.isfinite(one.ratio) and one.plan is not None]

    @property
    def history(self) -> tuple[BestSoFar, ...]:
        """The best ratio so far wherever it improved, as a step time at the latest one of the reference."""
        # step times as they were would go up and down with the machine; ratios only go down
        return tuple(replace(best, best_s=ratio * self.single_s) for ratio, best in self._improved)

    def tried(self, simulator: Simulator) -> tuple[tuple[float, float], ...]:
        """What the simulator says of every plan that ran, and what the host said, as of the latest reference.

        Seconds both, in the order in which they ran.
        """
        ran = [pair for race in self.races for pair in zip(race.plans, race.outcomes) if pair[1].ok]
        said = [(simulator.retime(plan), outcome.ratio * self.single_s) for plan, outcome in ran]
        return tuple((simulated.step_time_s, measured_s) for simulated, measured_s in said if simulated.ok)
