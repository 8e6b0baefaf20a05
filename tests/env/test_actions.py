"""A wrong action is one clear error that names what was expected, in every env alike."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from fake_measurer import CountingMeasurer, chain_problem
from gymnasium import spaces

from rlplace.env import OneShotEnv, PlacementVecEnv, SequentialEnv, SequentialVecEnv
from rlplace.env.placement_env import check_actions
from rlplace.errors import InvalidValue

MEASURER = CountingMeasurer(chain_problem(3), wanted=[0, 1, 1])


def one_shot(action: object) -> None:
    env = OneShotEnv(MEASURER)
    env.reset()
    env.step(action)  # type: ignore[arg-type]


def sequential(action: object) -> None:
    env = SequentialEnv(MEASURER)
    env.reset()
    env.step(action)  # type: ignore[arg-type]


def placements(action: object) -> None:
    env = PlacementVecEnv(MEASURER, 2)
    env.reset()
    env.step(action)  # type: ignore[arg-type]


def episodes(action: object) -> None:
    env = SequentialVecEnv(MEASURER, 2)
    env.reset()
    env.step(action)  # type: ignore[arg-type]


CASES = [
    (one_shot, [0, 1], "OneShotEnv: action is 'an array of shape (2,)', expected integers 0..1 of shape (3,)."),
    (one_shot, [[0, 1, 1]], "OneShotEnv: action is 'an array of shape (1, 3)', expected integers 0..1 of shape (3,)."),
    (one_shot, [0.0, 1.0, 1.0], "OneShotEnv: action is 'an array of float64', expected integers 0..1 of shape (3,)."),
    (one_shot, [True] * 3, "OneShotEnv: action is 'an array of bool', expected integers 0..1 of shape (3,)."),
    (one_shot, [0, 2, 1], "OneShotEnv: action is 'one with 2 in it', expected integers 0..1 of shape (3,)."),
    (one_shot, [0, -1, 1], "OneShotEnv: action is 'one with -1 in it', expected integers 0..1 of shape (3,)."),
    (one_shot, None, "OneShotEnv: action is 'an array of shape ()', expected integers 0..1 of shape (3,)."),
    (one_shot, [[0], [0, 1]], "OneShotEnv: action is [[0], [0, 1]], expected integers 0..1 of shape (3,)."),
    (sequential, 2, "SequentialEnv: action is 'one with 2 in it', expected integers 0..1 of shape ()."),
    (sequential, [0], "SequentialEnv: action is 'an array of shape (1,)', expected integers 0..1 of shape ()."),
    (
        placements,
        [0, 1, 1],
        "PlacementVecEnv: action is 'an array of shape (3,)', expected integers 0..1 of shape (2, 3).",
    ),
    (episodes, [0, 3], "SequentialVecEnv: action is 'one with 3 in it', expected integers 0..1 of shape (2,)."),
]


@pytest.mark.parametrize(("act", "action", "message"), CASES)
def test_a_wrong_action_is_one_clear_error(act: Callable[[object], None], action: object, message: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        act(action)
    assert str(caught.value) == message


def test_what_agents_give_is_taken() -> None:
    space = spaces.MultiDiscrete([2, 2, 2])
    for action in ([0, 1, 1], (0, 1, 1), np.array([0, 1, 1], dtype=np.int8), np.array([0, 1, 1], dtype=np.uint64)):
        found = check_actions(action, space, "env")
        assert (found.tolist(), found.dtype) == ([0, 1, 1], np.int64)
    for one in (1, np.int64(1), np.array(1)):
        assert check_actions(one, spaces.Discrete(2), "env") == 1
    assert check_actions(np.zeros((4, 3), dtype=int), space, "env", 4).shape == (4, 3)
