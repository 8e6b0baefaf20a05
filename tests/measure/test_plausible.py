"""Which measured ratios are believed, and what comes of those that are not: by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fake_measurer import chain_problem

from rlplace.measure import Simulator
from rlplace.measure.evaluator import BELOW, OFF, REMEMBERED, Plausibility
from rlplace.measure.measurement import Measurement


def timed(step_s: float, reference_s: float, rounds: int = 5) -> Measurement:
    return Measurement("ok", step_s, (step_s,) * rounds, reference_s=reference_s)


def test_the_least_ratio_is_that_of_work_shared_by_all_devices() -> None:
    """Six seconds of work: alone they take six, on three devices at least two."""
    problem = chain_problem(6, 3)
    known = Plausibility.of(problem, Simulator(problem), np.zeros(6, dtype=np.int32))
    assert known.least_ratio == pytest.approx(2.0 / 6.0 / BELOW)
    assert Plausibility.of(problem, Simulator(problem), None).least_ratio == 0.0


def test_what_cannot_be_true_is_not_believed_whatever_the_reference() -> None:
    known = Plausibility(0.2)
    assert not known.is_possible(timed(0.067, 1.0))
    assert not known.is_believed(timed(0.067, 1.0))
    assert known.is_believed(timed(0.2, 1.0))
    assert known.is_believed(timed(0.067, 0.0)), "beside no reference there is no ratio"
    assert known.is_believed(Measurement("oom", math.inf, reference_s=1.0))


def test_a_reference_far_from_the_usual_one_is_not_believed_either_way() -> None:
    known = Plausibility()
    assert known.is_believed(timed(0.5, 15.0)), "nothing is usual yet"
    for reference_s in (1.0, 1.2, 0.9):
        known.note([timed(0.5, reference_s)])
    assert known.usual_s == 1.0
    believed = [known.is_believed(timed(0.5, s)) for s in (15.0, 1.01 * OFF, OFF, 1.0 / OFF, 0.99 / OFF)]
    assert believed == [False, False, True, True, False]


def test_of_a_race_the_reference_of_the_most_rounds_is_usual() -> None:
    """Who was dropped after the first round has the reference of that round alone, which was disturbed."""
    known, dropped, leader = Plausibility(), timed(1.6, 15.0, 1), timed(1.0, 1.0, 5)
    known.note([dropped, leader, Measurement("error", math.inf)])
    assert known.usual_s == 1.0
    assert [known.is_believed(one) for one in (dropped, leader)] == [False, True]


def test_what_is_usual_follows_a_machine_that_stays_slower() -> None:
    known = Plausibility()
    for reference_s in [1.0] * REMEMBERED + [3.0] * (REMEMBERED // 2 + 1):
        known.note([timed(1.0, reference_s)])
    assert known.usual_s == 3.0
    assert math.isnan(Plausibility().usual_s)


def test_a_second_measurement_that_is_believed_counts() -> None:
    again = timed(0.6, 1.0)
    assert Plausibility(0.2).settle(timed(0.067, 1.0), again) == (again, True)
    failed = Measurement("timeout", math.inf, why="for ever")
    assert Plausibility(0.2).settle(timed(0.067, 1.0), failed) == (failed, True)


def test_a_ratio_that_comes_again_is_confirmed_whatever_was_expected() -> None:
    first, again = timed(0.10, 1.0), timed(0.24, 2.0)
    assert Plausibility(0.2).settle(first, again) == (again, True)


def test_of_two_that_disagree_the_slower_stays_unconfirmed() -> None:
    known = Plausibility(0.2)
    known.note([timed(1.0, 1.0)])
    first, again = timed(1.5, 5.0), timed(1.5, 3.0)  # ratios 0.3 and 0.5; beside the usual reference 1.5
    outcome, is_confirmed = known.settle(first, again)
    assert (outcome.ratio, outcome.step_time_s, is_confirmed) == (1.5, 1.5, False)


def test_two_impossible_ones_that_disagree_are_an_error_that_says_why() -> None:
    outcome, is_confirmed = Plausibility(0.2).settle(timed(0.067, 1.0), timed(0.1, 1.0))
    assert (outcome.status, outcome.step_time_s, outcome.ratio, is_confirmed) == ("error", math.inf, math.inf, False)
    assert "0.1 of the reference's step time" in outcome.why
    assert "less than 0.2" in outcome.why


def test_a_reference_that_was_too_fast_makes_nothing_faster() -> None:
    known = Plausibility()
    known.note([timed(1.0, 1.0)])
    assert known.careful(timed(1.0, 0.1)).ratio == pytest.approx(10.0)
