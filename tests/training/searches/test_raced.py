"""What came of races is told apart by ratios, by hand: the machine slows down from race to race."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fake_measurer import chain_problem

from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Plan
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.task import BestSoFar
from rlplace.session.session_records import MethodResult
from rlplace.training.searches.racing_host import Raced

SIMULATOR = Simulator(chain_problem(3), threads=1)
SLOW, MIDDLE, FAST = (SIMULATOR.plan(np.array(row, dtype=np.int32)) for row in ([0, 0, 0], [0, 0, 1], [0, 1, 1]))
FAILED = Measurement("error", math.inf, why="a test")


def ran(step_s: float, reference_s: float) -> Measurement:
    return Measurement("ok", step_s, (step_s,), reference_s=reference_s)


def record(raced: Raced, plans: list[Plan], measurements: list[Measurement], seconds: float) -> bool:
    return raced.record(plans, measurements, is_final=False, num_scored=10, seconds=seconds)


def two_races() -> Raced:
    """The second plan takes longer than the first one did, but less of the reference."""
    raced = Raced(8, single_s=1.0)
    assert record(raced, [SLOW, FAST], [ran(3.0, 4.0), FAILED], 1.0)
    assert record(raced, [MIDDLE], [ran(4.0, 8.0)], 2.0)
    return raced


def test_the_best_is_the_one_with_the_lowest_ratio() -> None:
    raced = two_races()
    assert raced.plan is MIDDLE
    assert (raced.best_ratio, raced.best_s, raced.single_s) == (0.5, 4.0, 8.0)
    assert raced.best(3) == [MIDDLE, SLOW]  # not the one that failed
    assert not record(raced, [SLOW], [ran(9.0, 12.0)], 3.0)
    assert (raced.plan, raced.best_s, raced.single_s) == (MIDDLE, 4.0, 12.0)


def test_step_times_are_told_at_the_latest_reference() -> None:
    raced = two_races()
    assert raced.history == (BestSoFar(10, 2, 1.0, 6.0), BestSoFar(10, 3, 2.0, 4.0))
    assert raced.so_far(12, 5.0) == BestSoFar(12, 3, 5.0, 4.0)
    simulated_s = [SIMULATOR.retime(plan).step_time_s for plan in (SLOW, MIDDLE)]
    assert raced.tried(SIMULATOR) == ((simulated_s[0], 6.0), (simulated_s[1], 4.0))


def test_a_race_that_fails_changes_no_reference() -> None:
    raced = Raced(8, single_s=1.0)
    assert not record(raced, [SLOW], [FAILED], 1.0)
    assert (raced.plan, raced.single_s, raced.history, raced.best(1)) == (None, 1.0, (), [])


def state_of(raced: Raced) -> MethodResult:
    return MethodResult(
        budget=9.0,
        single_s=raced.single_s,
        history=raced.history,
        races=tuple(raced.races),
        plan=raced.plan,
        num_measured=3,
    )


def test_what_was_raced_is_taken_up_again() -> None:
    raced, again = two_races(), Raced(8, single_s=1.0)
    again.resume(state_of(raced))
    assert again.plan is MIDDLE
    assert (again.best_ratio, again.best_s, again.history) == (raced.best_ratio, raced.best_s, raced.history)
    assert again.tried(SIMULATOR) == raced.tried(SIMULATOR)
    assert again.best(3) == raced.best(3)


@pytest.mark.parametrize("step_s", [3.0, 5.0])
def test_a_best_plan_whose_race_nobody_knows_is_still_to_beat(step_s: float) -> None:
    state = MethodResult(budget=9.0, single_s=8.0, history=(BestSoFar(10, 3, 2.0, 4.0),), plan=MIDDLE)
    raced = Raced(8, single_s=1.0)
    raced.resume(state)
    assert raced.best(2) == [MIDDLE]
    assert record(raced, [FAST], [ran(step_s, 8.0)], 3.0) == (step_s < 4.0)
