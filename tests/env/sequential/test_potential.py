"""Rewards of steps by hand."""

from __future__ import annotations

import numpy as np
import pytest
from search_problems import chain_problem

from rlplace.env import POTENTIALS, SequentialBatch, SqrtReward
from rlplace.env.sequential import Shaping
from rlplace.errors import UnknownName

REWARD = SqrtReward(baseline_s=1.0)


def rewards(potential: str) -> list[float]:
    """Of a chain of three seconds on one device whose step takes 4 seconds, then on two."""
    batch, shaping = SequentialBatch(chain_problem(3, 2), 1), Shaping(potential, REWARD, 1)
    given: list[float] = []
    for _ in range(2):
        batch.step(np.array([0]))
        given += shaping.step(batch).tolist()
    return given + shaping.finish(REWARD(np.array([4.0]))).tolist()


def test_the_finish_so_far() -> None:
    # one second, then two; but the chain cannot be faster than three
    assert rewards("finish") == pytest.approx([-(3**0.5), 0.0, -2.0 + 3**0.5])


def test_the_bound_moves_where_a_decision_costs_something() -> None:
    assert rewards("bound") == pytest.approx([-(3**0.5), 0.0, -2.0 + 3**0.5])
    batch, shaping = SequentialBatch(chain_problem(3, 2, output_bytes=100), 1), Shaping("bound", REWARD, 1)
    given = []
    for device in (0, 1):  # 100 bytes take a second: four at least
        batch.step(np.array([device]))
        given += shaping.step(batch).tolist()
    assert given == pytest.approx([-(3**0.5), -2.0 + 3**0.5])


def test_nothing_before_the_last_step() -> None:
    assert rewards("none") == pytest.approx([0.0, 0.0, -2.0])


@pytest.mark.parametrize("potential", POTENTIALS)
def test_a_new_episode_begins_at_nothing(potential: str) -> None:
    batch, shaping = SequentialBatch(chain_problem(1, 2), 2), Shaping(potential, REWARD, 2)
    for _ in range(2):
        batch.step(np.array([0, 1]))
        assert shaping.finish(np.array([-1.0, -2.0])).tolist() == [-1.0, -2.0]
        batch.reset()
        shaping.reset()


def test_a_mistyped_potential_is_named() -> None:
    with pytest.raises(UnknownName, match="finish"):
        Shaping("finsh", REWARD, 1)
