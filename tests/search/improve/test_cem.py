"""Chances: where they start, how they move, what is drawn from them; by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rlplace.search.improve.random_keys import FLOOR, STEP, draw, start_chances, towards

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
