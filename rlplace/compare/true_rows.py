"""`ROWS`: what is compared where the truth is hidden: ways to name one plan after a few measurements."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import RunnerError
from rlplace.measure.measurement import Measurement, PlanMeasurer
from rlplace.measure.plan import Plan
from rlplace.measure.prediction_error import calibrate
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.registry import METHODS, find
from rlplace.search.task import BestSoFar, Budget, Task
from rlplace.search.winners import SEARCH, find_winners

LINES = 3
"""What an agent learned about the host, of which a row says the surest."""
LEAST_FITTED = 4
"""Measured plans without which nothing is calibrated."""


class Meter:
    """A measurer that keeps what it measured, and refuses to measure more than it may.

    Attributes:
        kept: plans and measurements, in order.
        seconds: wall time spent measuring.
        history: the best measured step time wherever it improved.

    Args:
        measurer: what measures.
        most: plans measured at most.
    """

    def __init__(self, measurer: PlanMeasurer, most: int) -> None:
        self.kept: list[tuple[Plan, Measurement]] = []
        self.seconds = 0.0
        self.history: list[BestSoFar] = []
        self._measurer, self._most, self._begin = measurer, most, time.monotonic()

    def measure_plans(self, plans: Sequence[Plan]) -> list[Measurement]:
        """One `Measurement` for each plan.

        Raises:
            RunnerError: more than may be measured.
        """
        if len(self.kept) + len(plans) > self._most:
            raise RunnerError(f"{len(self.kept) + len(plans)} measurements were asked for, {self._most} are allowed")
        begin = time.monotonic()
        outcomes = self._measurer.measure_plans(plans)
        self.seconds += time.monotonic() - begin
        for plan, outcome in zip(plans, outcomes, strict=True):
            self.kept.append((plan, outcome))
            if outcome.ok and outcome.step_time_s < (self.history[-1].best_s if self.history else math.inf):
                seconds = time.monotonic() - self._begin
                self.history.append(BestSoFar(0, len(self.kept), seconds, outcome.step_time_s))
        return outcomes

    @property
    def best(self) -> Plan | None:
        """The plan with the least measured step time; None where none fitted into memory."""
        ok = [(outcome.step_time_s, plan) for plan, outcome in self.kept if outcome.ok]
        return min(ok, key=lambda pair: pair[0])[1] if ok else None


@dataclass(frozen=True)
class Trial:
    """What a row knows and may spend.

    Attributes:
        problem: the nominal one.
        simulator: of the nominal problem; makes plans.
        meter: measures on the true one.
        budget: simulated placements, seconds and measurements.
        seed: of every draw.
    """

    problem: Problem
    simulator: Simulator
    meter: Meter
    budget: Budget
    seed: int

    def halved(self) -> Budget:
        """Half of the simulated placements and seconds."""
        return Budget(max(self.budget.evaluations // 2, 1), self.budget.seconds / 2)

    def measure(self, placements: Sequence[NDArray[np.int32]], simulator: Simulator | None = None) -> None:
        """Measures the plans that a simulator makes of placements (N,); the nominal one by default."""
        self.meter.measure_plans([(simulator or self.simulator).plan(devices) for devices in placements])


@dataclass(frozen=True)
class Answer:
    """What a row comes to.

    Attributes:
        plan: the one plan that it names; None where it has none.
        evaluations: placements simulated.
        why: a remark: what it learned.
    """

    plan: Plan | None
    evaluations: int
    why: str = ""


def _single(trial: Trial) -> Answer:
    found = find(trial.problem, "single", trial.simulator, seed=trial.seed)
    return Answer(None if found.devices is None else trial.simulator.plan(found.devices), found.evaluations)


def _portfolio(trial: Trial) -> Answer:
    found = find_winners(trial.problem, trial.simulator, trial.budget, trial.budget.measurements, seed=trial.seed)
    trial.measure(found.devices)
    return Answer(trial.meter.best, found.evaluations)


class _OnTheHost:
    """A step timer that measures what it is asked to score."""

    threads = 1

    def __init__(self, trial: Trial) -> None:
        self._trial = trial

    def step_times(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
        plans = [self._trial.simulator.plan(devices) for devices in placements]
        return np.array([outcome.step_time_s for outcome in self._trial.meter.measure_plans(plans)])


def _portfolio_measured(trial: Trial) -> Answer:
    budget = Budget(trial.budget.measurements, trial.budget.seconds)
    METHODS[SEARCH].run(Task(trial.problem, _OnTheHost(trial), budget, seed=trial.seed))
    return Answer(trial.meter.best, 0)


def _calibrated(trial: Trial) -> Answer:
    """Half of everything for plans to calibrate on, half for a search on the calibrated problem."""
    first = trial.budget.measurements // 2
    evaluations = 0
    if first:
        found = find_winners(trial.problem, trial.simulator, trial.halved(), first, seed=trial.seed)
        trial.measure(found.devices)
        evaluations = found.evaluations
    fitted = [(plan, outcome.step_time_s) for plan, outcome in trial.meter.kept if outcome.ok]
    problem = trial.problem
    if len(fitted) >= LEAST_FITTED:
        plans, times_s = zip(*fitted, strict=True)
        problem = calibrate(problem, plans, times_s, seed=trial.seed).problem
    simulator, seen = Simulator(problem, threads=trial.simulator.threads), [p.devices for p, _ in trial.meter.kept]
    left = trial.budget.measurements - len(trial.meter.kept)
    found = find_winners(problem, simulator, trial.halved(), left, seed=trial.seed, seen=seen)
    trial.measure(found.devices, simulator)
    return Answer(trial.meter.best, evaluations + found.evaluations)


def _learned(trial: Trial, **changes: bool) -> Answer:
    from rlplace.training.agent import AgentConfig, learn_host

    config = AgentConfig(**changes)
    result = learn_host(trial.problem, trial.meter, trial.budget, seed=trial.seed, config=config)
    return Answer(result.plan, result.evaluations, "; ".join(result.say()[:LINES]))


ROWS: Mapping[str, Callable[[Trial], Answer]] = {
    "single": _single,
    "portfolio": _portfolio,
    "portfolio-measured": _portfolio_measured,
    "calibrated": _calibrated,
    "learned": _learned,
    "learned-no-prior": partial(_learned, is_prior=False),
    "learned-mean": partial(_learned, is_thompson=False),
    "learned-no-permutations": partial(_learned, is_permuted=False),
}
"""Rows by name, in the order in which they run."""
