"""`MethodState`: what one method of a run has come to, so that another process can go on from there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.measurement import Measurement
from rlplace.measure.plan import Plan
from rlplace.search.task import BestSoFar, Failure


@dataclass(frozen=True, eq=False)
class Race:
    """Plans that were measured in turn, and what came of each.

    Attributes:
        plans: what ran.
        outcomes: of each.
        is_final: whether it was the last race, which decides and teaches nobody.
    """

    plans: tuple[Plan, ...]
    outcomes: tuple[Measurement, ...]
    is_final: bool = False


@dataclass(frozen=True, eq=False)
class Unmeasured:
    """Simulated placements that a search would have measured next.

    Attributes:
        devices: (C, N) int32.
        simulated_s: (C,) float64.
    """

    devices: NDArray[np.int32]
    simulated_s: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class MethodState:
    """What a method has come to.

    Attributes:
        budget: seconds, or placements, that it was given.
        seconds: wall time that it spent.
        num_scored: placements simulated.
        num_measured: placements run, each as often as it was, the last race aside.
        single_s: step time on the best single device, which those of `history` are to be set against.
        history: the best step time so far wherever it improved.
        learning: what it told of every update, figures by name.
        tried: simulated and measured step times of what ran, once it is done; see `LoopResult`.
        races: what it measured, in order.
        plan: the best so far; None before the first.
        start: (N,) int32, the placement that simulates best; None before the first.
        unmeasured: what it would measure next; None where nothing is measured.
        is_searched: whether the method itself has ended, so that what is left is to measure.
        is_done: whether everything of it has ended.
        failure: what the method raised; None of all others.
    """

    budget: float
    seconds: float = 0.0
    num_scored: int = 0
    num_measured: int = 0
    single_s: float = math.nan
    history: tuple[BestSoFar, ...] = ()
    learning: tuple[Mapping[str, float], ...] = ()
    tried: tuple[tuple[float, float], ...] = ()
    races: tuple[Race, ...] = ()
    plan: Plan | None = None
    start: NDArray[np.int32] | None = None
    unmeasured: Unmeasured | None = None
    is_searched: bool = False
    is_done: bool = False
    failure: Failure | None = None

    @property
    def best_s(self) -> float:
        """The best step time so far; infinite before the first."""
        return self.history[-1].best_s if self.history else math.inf

    @property
    def best_ratio(self) -> float:
        """The step time of `plan` over the reference's, as in the race that decided, else as of the best so far."""
        if self.is_done and self.plan is not None and self.races and self.races[-1].is_final:
            last, name = self.races[-1], self.plan.fingerprint
            for plan, outcome in zip(last.plans, last.outcomes, strict=True):
                if outcome.ok and plan.fingerprint == name:
                    return outcome.ratio
        return ratio_of(self.best_s, self.single_s)


def ratio_of(step_time_s: float, single_s: float) -> float:
    """A step time over that of the best single device, the reference, in the same race.

    A machine slows down and speeds up, so seconds of different races do not compare, but ratios do. Without a reference
    (on a simulated host, where no single device holds the step) it is the step time itself: nothing drifts there.
    """
    return step_time_s / single_s if 0.0 < single_s < math.inf else step_time_s
