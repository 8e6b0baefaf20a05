"""Chances: where they start, how they move, what is drawn from them; by hand.

Keys and what they decode to, by hand.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.search.improve.portfolio import (
    FLOOR,
    STEP,
    decode,
    draw,
    keys_of,
    population_size,
    start_chances,
    towards,
)

ALLOWED = np.array([[True, True], [True, False]])


def test_chances_start_near_the_start() -> None:
    assert start_chances(np.array([1, 0], dtype=np.int32), ALLOWED) == pytest.approx(
        np.array([[0.05, 0.95], [1.0, 0.0]])
    )


def test_chances_move_towards_the_elite_and_never_to_a_barred_device() -> None:
    chances = np.array([[0.5, 0.5], [1.0, 0.0]])
    moved = towards(chances, np.array([[1, 0], [1, 0], [1, 0], [0, 0]]), ALLOWED)
    expected = (1 - STEP) * 0.5 + STEP * 0.75
    assert moved == pytest.approx(np.array([[1 - expected, expected], [1.0, 0.0]]))


def test_no_allowed_device_is_lost() -> None:
    chances = np.array([[0.5, 0.5], [1.0, 0.0]])
    for _ in range(100):
        chances = towards(chances, np.array([[1, 0]]), ALLOWED)
    assert 0 < chances[0, 0] == pytest.approx(FLOOR / 2, rel=0.01)
    assert chances[1].tolist() == [1.0, 0.0]


def test_draws_follow_the_chances() -> None:
    drawn = draw(np.array([[0.2, 0.8], [1.0, 0.0]]), 4000, np.random.default_rng(0))
    assert drawn.shape == (4000, 2)
    assert drawn[:, 0].mean() == pytest.approx(0.8, abs=0.03)
    assert not drawn[:, 1].any()


def test_keys_are_cut_evenly_over_allowed_devices() -> None:
    allowed = np.array([[True, True, True, True], [False, True, False, True], [False, False, True, False]])
    keys = np.array([[0.0, 0.49, 0.99], [0.25, 0.5, 0.0], [0.99, 0.999, 0.5]])
    assert decode(keys, allowed).tolist() == [[0, 1, 2], [1, 3, 2], [3, 3, 2]]
    assert keys_of(np.array([[2, 3, 2]], dtype=np.int32), allowed).tolist() == [[0.625, 0.75, 0.5]]


@given(st.integers(0, 10_000))
def test_keys_of_placements_decode_to_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    allowed = rng.random((7, 4)) < 0.5
    allowed[np.arange(7), rng.integers(0, 4, 7)] = True
    placements = decode(rng.random((5, 7)), allowed)
    assert allowed[np.arange(7), placements].all()
    assert np.array_equal(decode(keys_of(placements, allowed), allowed), placements)


def test_populations_grow_with_the_budget() -> None:
    assert [population_size(n) for n in (1, 400, 2500, 1e6, math.inf)] == [10, 40, 100, 200, 100]
