"""`Plausibility`: which measured ratios cannot be true, as a race of few rounds on a disturbed machine gives them."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.bounds.figures import figures
from rlplace.measure.bounds.work import even_weights, work_of_labels_s
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator

BELOW = 3.0
"""The figures that a bound is made of are measured too: a ratio is impossible where it is so many times below it."""
OFF = 2.0
"""A reference that took so many times what it usually takes, or as much less, was not timed on the same machine."""
AGREES = 1.25
"""Two ratios of one plan that differ by no more than this factor confirm each other, whatever was expected."""
REMEMBERED = 9
"""Races whose references say what is usual: a machine may also change for good."""


class Plausibility:
    """What a ratio to the reference can be, and how long the reference usually takes.

    Attributes:
        least_ratio: below it no ratio is believed; 0 where nothing is known.

    Args:
        least_ratio: see there.
    """

    def __init__(self, least_ratio: float = 0.0) -> None:
        self.least_ratio = least_ratio
        self._references: deque[float] = deque(maxlen=REMEMBERED)

    @classmethod
    def of(cls, problem: Problem, simulator: Simulator, reference: NDArray[np.int32] | None) -> Plausibility:
        """Of the placements of a problem: no device does more than a second of work a second.

        Args:
            problem: with the figures that are known of the host.
            simulator: of it.
            reference: (N,) placement that ratios are to; None for none.
        """
        if reference is None:
            return cls()
        reference_s = float(simulator.step_times(reference[None])[0])
        known = figures(problem)
        work_s = float(work_of_labels_s(known, even_weights(known)).sum())
        is_known = math.isfinite(reference_s) and math.isfinite(work_s) and reference_s > 0
        return cls(work_s / reference_s / BELOW if is_known else 0.0)

    @property
    def usual_s(self) -> float:
        """Median of what the reference took in the latest races; NaN before the first."""
        return float(np.median(self._references)) if self._references else math.nan

    def note(self, outcomes: Iterable[Measurement]) -> None:
        """Takes note of what the reference took in a race: that of the contender that ran the most rounds counts."""
        timed = [outcome for outcome in outcomes if outcome.ok and outcome.reference_s > 0]
        if timed:
            self._references.append(max(timed, key=lambda outcome: len(outcome.samples_s)).reference_s)

    def judge(self, outcomes: Sequence[Measurement]) -> list[bool]:
        """Which outcomes of a race are believed, by the references of earlier races; of the first, by its own.

        Takes note of the reference, unless none is believed: then it is that of the race that is run again that counts.
        """
        if not self._references:
            self.note(outcomes)
            return [self.is_believed(outcome) for outcome in outcomes]
        believed = [self.is_believed(outcome) for outcome in outcomes]
        self.note(outcome for outcome, is_one in zip(outcomes, believed, strict=True) if is_one)
        return believed

    def is_possible(self, outcome: Measurement) -> bool:
        """Whether its ratio can be true; a failure, and a step time beside no reference, can."""
        return not outcome.ok or not outcome.reference_s > 0 or outcome.ratio >= self.least_ratio

    def is_believed(self, outcome: Measurement) -> bool:
        """Whether its ratio can be true, and the reference beside it took about as long as usual."""
        if not outcome.ok or not outcome.reference_s > 0 or math.isnan(self.usual_s):
            return self.is_possible(outcome)
        return self.is_possible(outcome) and 1.0 / OFF <= outcome.reference_s / self.usual_s <= OFF

    def settle(self, first: Measurement, again: Measurement) -> tuple[Measurement, bool]:
        """What two measurements of one plan come to, and whether that is confirmed.

        The second counts if it is believed or has about the same ratio; otherwise the slower of the two, as `careful`
        makes it: a placement that is taken for too slow loses its own chance, one taken for too fast everybody's.

        Args:
            first: not believed.
            again: of the same plan, later.
        """
        if self.is_believed(again) or max(first.ratio, again.ratio) <= AGREES * min(first.ratio, again.ratio):
            return again, True
        return self.careful(max(first, again, key=lambda outcome: outcome.ratio)), False

    def careful(self, outcome: Measurement) -> Measurement:
        """An outcome that nothing confirms: beside the usual reference if that makes it slower, else as it is.

        Where its ratio still cannot be true, an `error` that says so.
        """
        if outcome.reference_s > self.usual_s:
            outcome = dataclasses.replace(outcome, reference_s=self.usual_s)
        if self.is_possible(outcome):
            return outcome
        why = (
            f"{outcome.ratio:.3g} of the reference's step time was measured, but no placement can take less than "
            f"{self.least_ratio:.3g} of it: something disturbed the machine"
        )
        return dataclasses.replace(outcome, status="error", step_time_s=math.inf, why=why)
