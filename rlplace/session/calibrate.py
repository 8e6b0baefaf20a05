"""Calibration of the simulator on steps measured here: the host model, fitted before anything is searched."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import RunnerError
from rlplace.measure import Measurement, Plan, Problem, RaceProtocol, Simulator
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.host_model import (
    HostKnowledge,
    HostModel,
    Posterior,
    Prior,
    Scales,
    TracedPrior,
    describe,
    prior_of,
)
from rlplace.measure.measurement import MeasurementLog
from rlplace.measure.prediction_error import draw_mix
from rlplace.search import eft
from rlplace.search.groupings import majority_devices

LEAST, LEAST_TRACED = 6, 2
"""Placements at least; with traced steps fewer, as each tells thousands of durations."""
ROUNDS, TRACED_ROUNDS = 5, 3
"""Times that each placement is measured."""
SURVEYS = 2
"""Of traced placements, those that are chosen for what their steps show."""
DRAWN = 16
"""Placements drawn, of which those whose steps show most are chosen."""


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
    """The host model fitted to measured steps, used only where it predicts plans that it has not seen better.

    A third of the plans at a time is not seen; where steps were traced, of which few tell enough, each plan by itself.
    """
    scales = Scales(
        known.problem, prior or prior_of(known.problem), knowledge, TracedPrior() if known.is_traced else None
    )
    model = HostModel(scales)
    model.learn(known.plans, known.outcomes)
    posterior = model.fit()
    before, after = _left_out_errors(known, scales) if known.is_traced else model.held_out_errors()
    problem = known.problem if after > before else posterior.problem
    return Calibration(problem, posterior, not after > before, before, after, len(known.plans))


def _left_out_errors(known: Known, scales: Scales) -> tuple[float, float]:
    """Mean |log(simulated / measured)| of each plan, as profiled, and by a fit to timelines and times of all others.

    Of a single plan both are the profile's; a plan that one of the two takes to be beyond memory does not count.
    """
    places, measured = range(len(known.plans)), np.log(step_times(known.outcomes))
    before = [Simulator(known.problem, threads=1).retime(plan).step_time_s for plan in known.plans]
    after = list(before)
    for out in places[: len(places) * (len(places) > 1)]:
        rest, model = [k for k in places if k != out], HostModel(scales)
        model.learn([known.plans[k] for k in rest], [known.outcomes[k] for k in rest])
        after[out] = Simulator(model.fit().problem, threads=1).retime(known.plans[out]).step_time_s
    errors = np.abs(np.log([before, after]) - measured)
    errors = errors[:, np.isfinite(errors).all(axis=0)]
    return (float(errors[0].mean()), float(errors[1].mean())) if errors.size else (0.0, 0.0)


def draw_spread(
    problem: Problem, simulator: Simulator, generator: np.random.Generator, count: int
) -> NDArray[np.int32]:
    """(<= count, G) placements of groups: of `DRAWN` ones that fit into memory, those whose steps show most.

    Each has the most pairs of an op's signature and a device, and of two devices that send to each other, that those
    before it have not.
    """
    graph, num_devices = problem.graph, problem.host.num_devices
    drawn = problem.draw_groups(generator, DRAWN)
    placements = problem.grouping.expand(drawn)
    signature, runs = np.unique(graph.signatures, return_inverse=True)[1], ~graph.is_source
    shown: dict[int, set[int]] = {}
    for row in np.flatnonzero(np.isfinite(simulator.step_times(placements))).tolist():
        devices = placements[row]
        ran = signature[runs] * num_devices + devices[runs]
        sent = devices[graph.tensor_op[graph.input_tensors]] * num_devices + devices[graph.edge_op]
        shown[row] = {*np.unique(ran).tolist(), *(-1 - np.unique(sent)).tolist()}
    chosen, seen = list[int](), set[int]()
    while shown and len(chosen) < count:
        row = max(shown, key=lambda row: len(shown[row] - seen))  # the first of those that show as much
        seen |= shown.pop(row)
        chosen.append(row)
    return drawn[chosen]


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
    before: Known | None = None,
    on_measured: Callable[[Known], None] = lambda known: None,
    most_s: float = float("inf"),
    evaluator: Evaluator | None = None,
    is_traced: bool = False,
) -> tuple[Problem, Known]:
    """The problem with figures fitted to the measured steps of `count` placements, unless it is better as it was.

    Args:
        problem: as profiled, on a host of this machine.
        count: how many placements to measure, at least 6, or 2 that are traced.
        seed: of the draws.
        say: told the learned factors, the error before and after, and whether the fit is used.
        prior: how far the host may be from the profile.
        knowledge: knowledge of this host from other workloads.
        log: keeps measurements.
        isolated: whether placements are measured in a worker process; see `Evaluator`.
        before: measurements of before an interruption; they are not measured again.
        on_measured: told the measurements, before anything is learned from them.
        most_s: seconds of measuring, after which there is no further round.
        evaluator: of the problem, without a reference; one is made, and closed, where none is given.
        is_traced: also run a traced step of each; then fewer placements and rounds do.

    Raises:
        RunnerError: too few placements could be measured.
    """
    simulator = Simulator(problem)
    start = majority_devices(problem, eft(problem))
    least, generator = LEAST_TRACED if is_traced else LEAST, np.random.default_rng(seed)
    surveys = draw_spread(problem, simulator, generator, SURVEYS) if is_traced else np.zeros((0, len(start)), np.int32)
    num_mixed = count - len(surveys)
    mixed, _ = draw_mix(problem, start, num_mixed + bool(len(surveys)), generator)
    plans = plans_of(problem, simulator, np.concatenate((surveys, mixed[len(mixed) - num_mixed :])))
    names = {plan.fingerprint for plan in plans}
    told = () if before is None else zip(before.plans, before.outcomes, strict=True)
    kept = [(plan, outcome) for plan, outcome in told if plan.fingerprint in names]
    known = Known(problem, [plan for plan, _ in kept], [outcome for _, outcome in kept])
    if len(kept) < least:
        say(f"measuring {len(plans)} placements to calibrate the simulator on")
        with contextlib.ExitStack() as own:
            if evaluator is None:
                evaluator = Evaluator(problem, simulator, seed=seed, log=log, isolated=isolated)
                own.callback(evaluator.close)
            known = _measured(problem, evaluator, plans, seed, say, time.monotonic() + most_s, is_traced=is_traced)
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
    *,
    is_traced: bool,
) -> Known:
    """The plans that could be measured; those that failed, and rounds that there was no time for, are told."""
    asked, least = (TRACED_ROUNDS, LEAST_TRACED) if is_traced else (ROUNDS, LEAST)
    outcomes = evaluator.measure_plans(plans, _all_rounds(asked, seed, int(is_traced)), deadline_s=deadline_s)
    rounds = min((len(outcome.samples_s) for outcome in outcomes if outcome.ok), default=asked)
    if rounds < asked:
        say(cut_words("calibration", rounds, asked))
    for outcome in outcomes:
        if not outcome.ok:
            say(f"a placement could not be measured ({outcome.status}): {outcome.why}")
    ran = [pair for pair in zip(plans, outcomes, strict=True) if pair[1].ok]
    if len(ran) < least:
        raise RunnerError(f"{len(ran)} of {len(plans)} placements could be measured, {least} are needed to calibrate")
    return Known(problem, [plan for plan, _ in ran], [outcome for _, outcome in ran])


def _all_rounds(rounds: int, seed: int, num_traced: int = 0) -> RaceProtocol:
    """A race that drops no contender."""
    return RaceProtocol(1, rounds, rounds, hopeless=float("inf"), seed=seed, num_traced=num_traced)


def measure_all(
    evaluator: Evaluator, plans: list[Plan], *, rounds: int, seed: int, num_traced: int = 0
) -> list[Measurement]:
    """Every plan's measurement, all in one race that drops no contender, and traced steps after it.

    Raises:
        RunnerError: a placement failed.
    """
    outcomes = evaluator.measure_plans(plans, _all_rounds(rounds, seed, num_traced))
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


def plans_of(problem: Problem, simulator: Simulator, groups: NDArray[np.int32]) -> list[Plan]:
    """The plans of placements of groups (P, G)."""
    return [simulator.plan(row) for row in problem.grouping.expand(groups)]


def cut_words(what: str, rounds: int, asked: int) -> str:
    """The message for a race that was cut short."""
    return f"the machine is slow: {what} was cut short, after {rounds} of {asked} rounds"
