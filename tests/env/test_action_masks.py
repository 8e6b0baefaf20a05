"""Devices where a group may not be: what the envs say of them, and do about them."""

from __future__ import annotations

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
from fake_measurer import CountingMeasurer, TimingMeasurer, chain_problem
from gymnasium.utils.env_checker import check_env

from rlplace.env import OneShotEnv, PlacementVecEnv, single_device_s

MASKS = np.array([[True, False], [True, True], [False, True]])


@pytest.fixture(params=[CountingMeasurer, TimingMeasurer])
def measurer(request):
    return request.param(replace(chain_problem(3), allowed=MASKS), wanted=[0, 0, 0])


def test_masks_are_flat_by_group(measurer):
    assert OneShotEnv(measurer, "sqrt").action_masks().tolist() == MASKS.flatten().tolist()
    env = PlacementVecEnv(measurer, 2, "sqrt")
    assert np.stack(env.env_method("action_masks")).tolist() == [MASKS.flatten().tolist()] * 2


def test_a_barred_action_fails_and_is_not_measured(measurer):
    env = PlacementVecEnv(measurer, 3, "sqrt", baseline_s=1.0)
    _, rewards, _, infos = env.step(np.array([[0, 0, 1], [1, 0, 1], [0, 1, 0]]))
    assert [(info["status"], info["step_time_s"]) for info in infos] == [
        ("ok", 2.0),
        ("error", np.inf),
        ("error", np.inf),
    ]
    assert rewards.tolist() == pytest.approx([-(2**0.5), -(10**0.5), -(10**0.5)])
    batches = getattr(measurer, "timed", measurer.batches)
    assert [batch.tolist() for batch in batches] == [[[0, 0, 1]]]


def test_the_baseline_is_the_best_that_is_nearly_one_device(measurer):
    # from device 0: [0, 0, 1], a second over the wanted one; from device 1: [0, 1, 1]
    assert single_device_s(measurer) == 2.0


def test_checks_pass_where_devices_are_barred(measurer):
    check_env(gym.make("rlplace/OneShot-v0", measurer=measurer).unwrapped)
