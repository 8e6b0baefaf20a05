"""`judge`: faster, slower, no clear difference, or not known."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from rlplace.measure.timing.verdict import SpeedVerdict, disturbance, interval, judge, judged_rounds
from rlplace.records import read_record, to_plain

DRIFT = (1.0, 2.0, 2.0, 1.0, 1.0, 2.0, 1.0, 2.0)


@pytest.mark.parametrize(
    ("ratios", "others", "outcome"),
    [
        ((0.9,) * 8, 2, "faster"),
        ((0.9,) * 5, 2, "faster"),  # all of five have one sign by chance in 1 of 32 cases
        ((0.9,) * 5, 1, "no clear difference"),  # a single reference takes 1 of 40
        ((0.9,) * 6, 1, "faster"),
        ((0.9,) * 4, 2, "not known"),
        ((1.1,) * 8, 1, "slower"),
        ((1.1,) * 6, 1, "no clear difference"),  # 1 of 64 is more than 1 of 100
        ((0.9, 0.9, 1.1, 0.9, 1.1, 1.1, 0.9, 1.1), 1, "no clear difference"),
        ((0.9,) * 7 + (1.001,), 2, "faster"),  # the pair of the other sign has the smallest rank: 2 of 256
        ((0.9,) * 7 + (1.5,), 2, "no clear difference"),  # it has the largest rank: 26 of 256
    ],
)
def test_paired_rounds_decide_however_the_machine_drifts(ratios: tuple[float, ...], others: int, outcome: str) -> None:
    theirs = DRIFT[: len(ratios)]
    ours = [ratio * each for ratio, each in zip(ratios, theirs, strict=True)]
    assert judge(ours, {str(k): theirs for k in range(others)}).outcome == outcome


def test_it_has_to_be_faster_than_each_and_the_hardest_to_beat_comes_first() -> None:
    verdict = judge((1.0,) * 8, {"one device": (2.0,) * 8, "eager": (1.0,) * 8})
    assert verdict.outcome == "no clear difference"
    assert [(each.name, each.ratio, each.step_s) for each in verdict.beside] == [
        ("eager", 1.0, 1.0),
        ("one device", 0.5, 2.0),
    ]
    assert "not worth it, no clear difference to eager" in str(verdict)
    assert judge((1.0,) * 8, {"one device": (2.0,) * 8, "eager": (0.9,) * 8}).outcome == "slower"
    assert not verdict.is_worth_it


def test_a_step_chosen_from_many_in_the_same_race_has_to_be_clearer() -> None:
    ours, others = (0.9,) * 6, {"one": (1.0,) * 6, "two": (1.0,) * 6}
    assert judge(ours, others, candidates=3).outcome == "faster"  # 1 of 64 is less than 5 % over 3
    assert judge(ours, others, candidates=4).outcome == "no clear difference"


def test_a_disturbed_machine_and_no_other_step_leave_it_unknown() -> None:
    verdict = judge((0.5,) * 8, {"eager": (1.0,) * 8}, why=disturbance(0.4, 0.2, "eager"))
    assert verdict.outcome == "not known"
    assert "60 %" in str(verdict)
    assert "± 20 %" in str(verdict)
    assert judge((1.0,) * 8, {}).outcome == "not known"
    assert disturbance(0.9, 0.05, "eager") == disturbance(float("nan"), 0.0, "eager") == ""


@pytest.mark.parametrize(("ours", "outcome"), [(0.999, "faster"), (1.0, "no clear difference"), (1.001, "slower")])
def test_simulated_steps_compare_exactly(ours: float, outcome: str) -> None:
    verdict = judge((ours,), {"one device": (1.0,)}, is_exact=True)
    assert verdict.outcome == outcome
    assert verdict.rounds == 0
    assert "interval" not in str(verdict)
    assert judge((0.0,), {"one device": (0.0,)}, is_exact=True).outcome == "no clear difference"


@pytest.mark.parametrize("count", [5, 6, 8, 10])
def test_the_bounds_hold_by_brute_force_over_all_signs(count: int) -> None:
    """Distinct sizes, every choice of signs as probable: a bound is on the wrong side of 0 in `level` of cases.

    At the next larger number of means it would be in more: the bound is the tightest.
    """
    sizes = np.arange(1.0, count + 1)
    for level in (0.05, 0.1):
        wrong = np.mean([interval(sizes * signs, level)[2] < 0 for signs in product((-1, 1), repeat=count)])
        assert wrong <= level
        ranks = np.array([sizes[np.array(signs) > 0].sum() for signs in product((-1, 1), repeat=count)])
        beyond = next(most for most in range(100) if np.mean(ranks <= most) > level)
        assert wrong == pytest.approx(np.mean(ranks < beyond))


def test_the_estimate_is_the_median_of_means_of_pairs() -> None:
    assert interval(np.array([0.0, 1.0, 5.0]), 0.05).tolist() == [-np.inf, 1.75, np.inf]  # 0 0.5 1 | 2.5 3 5


def test_equal_steps_are_rarely_told_apart_and_a_faster_one_mostly_is() -> None:
    generator = np.random.default_rng(0)

    def outcomes(faster: float) -> list[str]:
        draws = 1 + 0.05 * generator.standard_normal((400, 3, 30))
        return [judge((1 - faster) * mine, {"a": one, "b": two}).outcome for mine, one, two in draws]

    assert outcomes(0.0).count("no clear difference") >= 380
    assert outcomes(0.05).count("faster") >= 370


def test_a_verdict_is_read_as_it_was_written() -> None:
    verdict = judge((0.9,) * 8, {"eager": (1.0,) * 8}, time_s=1.8e9)
    assert read_record(SpeedVerdict, to_plain(verdict), "x") == verdict


def test_a_race_has_its_rounds_also_where_steps_are_long() -> None:
    assert judged_rounds(60.0, 1e-3) == 40
    assert judged_rounds(1.0, 60.0) == 6
