"""How weights are drawn, varied and chosen."""

from __future__ import annotations

import numpy as np

from rlplace.env.sequential import GROUPINGS
from rlplace.policy.schedule import best_together
from rlplace.pretrain.pretraining import draw, over_groupings, vary


def test_columns_are_taken_for_what_they_add() -> None:
    log_ratios = np.array([[0.0, 0.1, 0.9], [0.9, 0.4, 0.0], [0.9, 0.1, 0.9]])
    # alone, column 1 is the least on average (0.2); with it, column 2 gains 0.4 and column 0 gains 0.1
    assert best_together(log_ratios, 3) == [1, 2, 0]
    assert best_together(log_ratios, 9) == [1, 2, 0]


def test_weights_are_drawn_by_the_generator_alone() -> None:
    first, same = (draw(np.random.default_rng(5), 40) for _ in range(2))
    assert first.tolist() == same.tolist()
    assert 0.15 < (first == 0).mean() < 0.35
    assert (first[:, :7] >= 0).all()
    assert (first[:, 8] < 0).any()


def test_variations_stay_near_their_bases_and_memory_never_attracts() -> None:
    bases = np.array([[1.0] * 9, [0.0] * 9])
    varied = vary(np.random.default_rng(0), bases, 200)
    assert (varied[:, 5] >= 0).all()
    near_one = varied[:, 0] > 0.5
    assert 0.3 < near_one.mean() < 0.7
    assert (varied[:, 0] == 1.0).mean() > 0.1  # some weights are left alone


def test_every_grouping_takes_every_weight() -> None:
    pairs = over_groupings(np.arange(18.0).reshape(2, 9))
    assert [name for name, _ in pairs] == [*GROUPINGS, *GROUPINGS]
    assert pairs[len(GROUPINGS)][1] == tuple(range(9, 18))
