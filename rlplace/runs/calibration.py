"""Calibration of the simulator on steps measured here, before anything is learned from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import RunnerError
from rlplace.measure.calibrate import Calibration, calibrate
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.fidelity import draw_mix
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.run.race import RaceProtocol
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search import eft
from rlplace.search.groups import majority_devices

LEAST = 6


def calibrated(problem: Problem, count: int, *, seed: int, say: Callable[[str], None]) -> Problem:
    """The problem with figures fitted to the measured steps of `count` placements, unless it is better as it was.

    Args:
        problem: as profiled, on a host of this machine.
        count: how many placements to measure; at least 6 are.
        seed: of what is drawn.
        say: told what was fitted, what that gained, and whether it is used.

    Raises:
        RunnerError: a placement failed.
    """
    simulator = Simulator(problem)
    generator = np.random.default_rng(seed)
    groups, _ = draw_mix(problem, majority_devices(problem, eft(problem)), max(count, LEAST), generator)
    evaluator = Evaluator(problem, simulator, seed=seed)
    try:
        plans = plans_of(problem, simulator, groups)
        say(f"measuring {len(plans)} placements to calibrate the simulator on")
        fitted = calibrate(problem, plans, measure_all(evaluator, plans, rounds=5, seed=seed).tolist(), seed=seed)
    finally:
        evaluator.close()
    say(describe(fitted))
    return fitted.problem


def measure_all(evaluator: Evaluator, plans: list[Plan], *, rounds: int, seed: int) -> NDArray[np.float64]:
    """(P,) median step times, all plans in one race that drops nobody.

    Raises:
        RunnerError: a placement failed.
    """
    protocol = RaceProtocol(warmup=1, min_rounds=rounds, max_rounds=rounds, hopeless=float("inf"), seed=seed)
    outcomes = evaluator.measure_plans(plans, protocol)
    for outcome in outcomes:
        if not outcome.ok:
            raise RunnerError(f"a placement could not be measured: {outcome.why}")
    return np.array([outcome.step_time_s for outcome in outcomes])


def plans_of(problem: Problem, simulator: Simulator, groups: NDArray[np.int32]) -> list[Plan]:
    """The plans of placements of groups (P, G)."""
    return [simulator.plan(row) for row in problem.grouping.expand(groups)]


def describe(calibration: Calibration) -> str:
    """What was fitted, the error before and after, and which of the two is used, in a line."""
    figures = ", ".join(f"{name} {value:.3g}" for name, value in dataclasses.asdict(calibration.figures).items())
    used = "the fit is used" if calibration.is_kept else "the fit is worse, so the simulator stays as profiled"
    return (
        f"calibrated ({figures}): median error on {calibration.num_held_out} held-out placements "
        f"{calibration.error_before:.1%} before, {calibration.error_after:.1%} after: {used}"
    )
