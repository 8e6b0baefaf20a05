"""Geometric means over suites: by hand, and their intervals."""

from __future__ import annotations

import math

import pytest

from rlplace.compare.comparison import mean_ratio, paired_ratio
from rlplace.errors import InvalidValue


def test_a_mean_by_hand() -> None:
    told = mean_ratio([1.0, 2.0, 4.0, 8.0], ["a", "a", "b", "b"])
    assert told.mean == pytest.approx(8 ** (1 / 2))
    assert told.num_problems == 4
    # two clusters: both drawn alike give their own means, sqrt(2) and sqrt(32)
    assert (told.low, told.high) == (pytest.approx(math.sqrt(2)), pytest.approx(math.sqrt(32)))


def test_one_workload_has_no_spread() -> None:
    told = mean_ratio([0.5, 2.0], ["a", "a"])
    assert (told.mean, told.low, told.high) == (pytest.approx(1.0), pytest.approx(1.0), pytest.approx(1.0))


def test_the_same_seed_gives_the_same_interval() -> None:
    ratios, names = [1.0, 1.1, 1.3, 2.0, 0.9], list("abcde")
    assert mean_ratio(ratios, names, seed=3) == mean_ratio(ratios, names, seed=3)
    told = mean_ratio(ratios, names)
    assert told.low < told.mean < told.high


@pytest.mark.parametrize(("ratios", "names"), [([], []), ([1.0], ["a", "b"]), ([0.0], ["a"]), ([math.inf], ["a"])])
def test_mistakes_are_refused(ratios: list[float], names: list[str]) -> None:
    with pytest.raises(InvalidValue, match="ratios"):
        mean_ratio(ratios, names)


def test_a_paired_mean_and_its_t_interval_by_hand() -> None:
    """Means of the workloads are e^0.1, e^0.3 and e^0.2; t at 97.5 % with two degrees of freedom is 4.3027."""
    logs = [0.0, 0.2, 0.3, 0.2]
    told = paired_ratio([math.exp(value) for value in logs], ["a", "a", "b", "c"])
    half = 4.302652729749464 * 0.1 / math.sqrt(3)
    assert told.mean == pytest.approx(math.exp(0.2))
    assert (told.low, told.high) == (pytest.approx(math.exp(0.2 - half)), pytest.approx(math.exp(0.2 + half)))
    assert told.num_problems == 4


def test_a_paired_mean_of_one_workload_says_nothing_of_others() -> None:
    told = paired_ratio([0.5, 0.5], ["a", "a"])
    assert (told.mean, told.low, told.high) == (pytest.approx(0.5), 0.0, math.inf)


@pytest.mark.parametrize(("ratios", "names"), [([], []), ([1.0], ["a", "b"]), ([-1.0], ["a"]), ([math.nan], ["a"])])
def test_mistakes_in_pairs_are_refused(ratios: list[float], names: list[str]) -> None:
    with pytest.raises(InvalidValue, match="ratios"):
        paired_ratio(ratios, names)
