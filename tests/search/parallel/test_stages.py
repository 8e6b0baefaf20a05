"""Stages against every way to cut a short chain."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rlplace.search.parallel.layouts import cut_stages


def test_equal_links_are_cut_into_equal_stages() -> None:
    assert cut_stages(np.ones(6), np.ones(3)).tolist() == [0, 0, 1, 1, 2, 2]


def test_a_fast_stage_takes_more() -> None:
    assert cut_stages(np.ones(6), np.array([2.0, 1.0])).tolist() == [0, 0, 0, 0, 1, 1]


def test_a_thin_cut_is_worth_a_less_even_one() -> None:
    crossing = np.array([0.0, 9.0, 9.0, 9.0, 1.0, 9.0, 0.0])
    assert cut_stages(np.ones(6), np.ones(2), crossing).tolist() == [0, 0, 0, 0, 1, 1]


def test_fewer_links_than_stages_leave_some_empty() -> None:
    assert sorted(cut_stages(np.ones(2), np.ones(3)).tolist()) == sorted(
        set(cut_stages(np.ones(2), np.ones(3)).tolist())
    )
    assert cut_stages(np.zeros(0), np.ones(3)).tolist() == []


@pytest.mark.parametrize("seed", range(10))
def test_the_worst_stage_is_as_good_as_any_cut_allows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    load, rate, crossing = rng.uniform(0.1, 2, 9), rng.uniform(0.5, 2, 3), rng.uniform(0, 1, 10)
    crossing[[0, -1]] = 0.0

    def worst(cuts: tuple[int, ...]) -> float:
        ends = (0, *cuts, 9)
        return max(
            load[a:b].sum() / rate[stage] + crossing[a] + crossing[b]
            for stage, (a, b) in enumerate(itertools.pairwise(ends))
        )

    found = cut_stages(load, rate, crossing)
    cuts = tuple(np.searchsorted(found, [1, 2]).tolist())
    assert worst(cuts) == pytest.approx(min(worst(pair) for pair in itertools.combinations(range(1, 9), 2)))


def test_a_long_chain_is_cut_at_its_thin_places() -> None:
    crossing = np.ones(2001)
    crossing[::10] = 0.0
    found = cut_stages(np.ones(2000), np.ones(4), crossing)
    starts = np.searchsorted(found, [1, 2, 3])
    assert (starts % 10 == 0).all()
    assert np.bincount(found).max() <= 510
