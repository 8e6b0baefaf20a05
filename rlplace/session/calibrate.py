"""Calibration of the simulator on steps measured here: the host model, fitted before anything is searched."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import RunnerError
from rlplace.measure import Measurement, Plan, Problem, RaceProtocol, Simulator
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.host_model import HostKnowledge, HostModel, Posterior, Prior, Scales, describe
from rlplace.measure.host_model.scales import prior_of
from rlplace.measure.measurement import MeasurementLog
from rlplace.measure.prediction_error import draw_mix
from rlplace.search import eft
from rlplace.search.groupings import majority_devices

LEAST = 6
ROUNDS = 5
"""Times that each placement is measured."""


@dataclass(frozen=True, eq=False)
class Known:
    """Steps that were measured before a search.

    Attributes:
        problem: as profiled.
        plans: the measured plans.
        outcomes: of each.
    """

    problem: Problem
    plans: Sequence[Plan]
    outcomes: Sequence[Measurement]

    @property
    def is_traced(self) -> bool:
        """Whether any of them has a timeline."""
        return any(outcome.timeline is not None for outcome in self.outcomes)


@dataclass(frozen=True, eq=False)
class Calibration:
    """A problem as profiled, or under the factors learned from measured steps, if these predict better.

    Attributes:
        problem: the same graph and groups, with fitted costs, links and host figures where they are kept.
        posterior: the learned factors, also where they are not kept.
        is_kept: whether it predicts plans that it has not seen better than the profile does.
        error_before: mean |log of simulated / measured| of every plan, as profiled.
        error_after: the same of fits that have not seen the plan.
        num_measured: plans measured.
    """

    problem: Problem
    posterior: Posterior
    is_kept: bool
    error_before: float
    error_after: float
    num_measured: int

    def say(self) -> list[str]:
        """The error before and after and which of the two is used, in a line; then the learned factors, a line each."""
        used = "the fit is used" if self.is_kept else "the fit is worse, so the simulator stays as profiled"
        return [
            f"calibrated on {self.num_measured} placements: mean error on those that a fit has not seen "
            f"{self.error_before:.1%} before, {self.error_after:.1%} after: {used}",
            *describe(self.posterior),
        ]


def calibrate_on(known: Known, prior: Prior | None = None, knowledge: HostKnowledge | None = None) -> Calibration:
    """The host model fitted to measured steps, used only where it predicts plans that it has not seen better."""
    model = HostModel(Scales(known.problem, prior or prior_of(known.problem), knowledge))
    model.learn(known.plans, known.outcomes)
    posterior, (before, after) = model.fit(), model.held_out_errors()
    problem = known.problem if after > before else posterior.problem
    return Calibration(problem, posterior, not after > before, before, after, len(known.plans))


def calibrated(
    problem: Problem,
    count: int,
    *,
    seed: int,
    say: Callable[[str], None],
    prior: Prior | None = None,
    knowledge: HostKnowledge | None = None,
    log: MeasurementLog | None = None,
    isolated: bool | None = None,
    before: Sequence[tuple[str, Measurement]] = (),
    on_measured: Callable[[Known], None] = lambda known: None,
    most_s: float = float("inf"),
    evaluator: Evaluator | None = None,
) -> tuple[Problem, Known]:
    """The problem with figures fitted to the measured steps of `count` placements, unless it is better as it was.

    Args:
        problem: as profiled, on a host of this machine.
        count: how many placements to measure; at least 6 are.
        seed: of the draws.
        say: told the learned factors, the error before and after, and whether the fit is used.
        prior: how far the host may be from the profile.
        knowledge: knowledge of this host from other workloads.
        log: keeps measurements.
        isolated: whether placements are measured in a worker process; see `Evaluator`.
        before: measurements of before an interruption, with the fingerprint of each plan; it is not measured again.
        on_measured: told the measurements, before anything is learned from them.
        most_s: seconds of measuring, after which there is no further round.
        evaluator: of the problem, without a reference; one is made, and closed, where none is given.

    Raises:
        RunnerError: too few placements could be measured.
    """
    simulator = Simulator(problem)
    start = majority_devices(problem, eft(problem))
    groups, _ = draw_mix(problem, start, max(count, LEAST), np.random.default_rng(seed))
    plans = plans_of(problem, simulator, groups)
    by_name = {plan.fingerprint: plan for plan in plans}
    kept = [(by_name[name], outcome) for name, outcome in before if name in by_name]
    known = Known(problem, [plan for plan, _ in kept], [outcome for _, outcome in kept])
    if len(kept) < LEAST:
        few = f", not {count}: fewer say too little" if count < len(plans) else ""
        say(f"measuring {len(plans)} placements to calibrate the simulator on{few}")
        with contextlib.ExitStack() as own:
            if evaluator is None:
                evaluator = Evaluator(problem, simulator, seed=seed, log=log, isolated=isolated)
                own.callback(evaluator.close)
            known = _measured(problem, evaluator, plans, seed, say, time.monotonic() + most_s)
        on_measured(known)
    found = calibrate_on(known, prior, knowledge)
    for line in found.say():
        say(line)
    return found.problem, known


def _measured(
    problem: Problem,
    evaluator: Evaluator,
    plans: list[Plan],
    seed: int,
    say: Callable[[str], None],
    deadline_s: float,
) -> Known:
    """The plans that could be measured; those that failed, and rounds that there was no time for, are told."""
    outcomes = evaluator.measure_plans(plans, _all_rounds(ROUNDS, seed), deadline_s=deadline_s)
    rounds = min((len(outcome.samples_s) for outcome in outcomes if outcome.ok), default=ROUNDS)
    if rounds < ROUNDS:
        say(cut_words("calibration", rounds, ROUNDS))
    for outcome in outcomes:
        if not outcome.ok:
            say(f"a placement could not be measured ({outcome.status}): {outcome.why}")
    ran = [pair for pair in zip(plans, outcomes, strict=True) if pair[1].ok]
    if len(ran) < LEAST:
        raise RunnerError(f"{len(ran)} of {len(plans)} placements could be measured, {LEAST} are needed to calibrate")
    return Known(problem, [plan for plan, _ in ran], [outcome for _, outcome in ran])


def _all_rounds(rounds: int, seed: int) -> RaceProtocol:
    """A race that drops no contender."""
    return RaceProtocol(warmup=1, min_rounds=rounds, max_rounds=rounds, hopeless=float("inf"), seed=seed)


def measure_all(evaluator: Evaluator, plans: list[Plan], *, rounds: int, seed: int) -> list[Measurement]:
    """Every plan's measurement, all in one race that drops no contender.

    Raises:
        RunnerError: a placement failed.
    """
    outcomes = evaluator.measure_plans(plans, _all_rounds(rounds, seed))
    if failed := [outcome for outcome in outcomes if not outcome.ok]:
        raise RunnerError(f"a placement could not be measured: {failed[0].why}")
    return outcomes


def step_times(outcomes: Sequence[Measurement]) -> NDArray[np.float64]:
    """(P,) median step times."""
    return np.array([outcome.step_time_s for outcome in outcomes])


def reference_s(outcomes: Iterable[Measurement]) -> float:
    """Median step time of the reference that plans were timed beside; NaN without one."""
    found = [outcome.reference_s for outcome in outcomes if outcome.ok and outcome.reference_s > 0]
    return float(np.median(found)) if found else math.nan


def steadied(outcome: Measurement, scale_s: float) -> Measurement:
    """With the step time that it would have had beside a reference of `scale_s`: a drift of the machine cancels."""
    if not outcome.ok or not outcome.reference_s or not math.isfinite(scale_s):
        return outcome
    factor = scale_s / outcome.reference_s
    samples_s = tuple(sample_s * factor for sample_s in outcome.samples_s)
    return replace(outcome, step_time_s=outcome.step_time_s * factor, samples_s=samples_s)


def plans_of(problem: Problem, simulator: Simulator, groups: NDArray[np.int32]) -> list[Plan]:
    """The plans of placements of groups (P, G)."""
    return [simulator.plan(row) for row in problem.grouping.expand(groups)]


def cut_words(what: str, rounds: int, asked: int) -> str:
    """The message for a race that was cut short."""
    return f"the machine is slow: {what} was cut short, after {rounds} of {asked} rounds"
