import gymnasium as gym
import numpy as np
import pytest
from fake_measurer import CountingMeasurer, chain_problem
from gymnasium.utils.env_checker import check_env
from random_problems import random_problem
from stable_baselines3.common.env_checker import check_env as check_sb3_env

from rlplace.env import LogSpeedupReward, OneShotEnv
from rlplace.errors import UnknownName
from rlplace.measure.simulate.simulator import Simulator


@pytest.fixture
def measurer():
    return CountingMeasurer(chain_problem(3), wanted=[0, 1, 1], failing=[1, 1, 1])


@pytest.mark.parametrize("name", ["rlplace/OneShot-v0", "rlplace/OneShotMeasured-v0"])
def test_gymnasiums_checks_pass(measurer, name):
    check_env(gym.make(name, measurer=measurer).unwrapped)


def test_stable_baselines_checks_pass(measurer):
    check_sb3_env(OneShotEnv(measurer))


def test_checks_pass_on_the_simulator():
    simulator = Simulator(random_problem(np.random.default_rng(0), 12), threads=1)
    check_env(gym.make("rlplace/OneShot-v0", measurer=simulator, reward="sqrt").unwrapped)


def test_a_spec_makes_another_env_on_the_same_measurer(measurer):
    env = gym.make("rlplace/OneShot-v0", measurer=measurer)
    assert env.spec.make().unwrapped.scorer.measurer is measurer


def test_only_the_measured_env_is_nondeterministic():
    assert not gym.spec("rlplace/OneShot-v0").nondeterministic
    assert gym.spec("rlplace/OneShotMeasured-v0").nondeterministic


def test_a_step_measures_a_placement_and_ends_the_episode(measurer):
    env = OneShotEnv(measurer, LogSpeedupReward(3.0))
    env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step(np.array([0, 1, 0]))
    assert observation in env.observation_space
    assert reward == pytest.approx(np.log(1.5))
    assert (terminated, truncated) == (True, False)
    assert (info["step_time_s"], info["status"], info["placement"].tolist()) == (2.0, "ok", [0, 1, 0])


def test_a_failed_placement_says_so(measurer):
    env = OneShotEnv(measurer, baseline_s=3.0)
    env.reset()
    _, reward, _, _, info = env.step(np.array([1, 1, 1]))
    assert reward == pytest.approx(-np.log(10))
    assert (info["step_time_s"], info["status"]) == (np.inf, "oom")


def test_a_named_reward_compares_with_the_best_single_device(measurer):
    env = OneShotEnv(measurer)  # everything on device 0 takes 3 seconds, on device 1 nothing runs
    env.reset()
    assert env.step(np.array([0, 0, 0]))[1] == pytest.approx(0.0)


def test_an_action_has_a_device_for_each_group():
    env = OneShotEnv(CountingMeasurer(chain_problem(4, num_devices=3), wanted=[0] * 4))
    assert env.action_space.nvec.tolist() == [3, 3, 3, 3]


def test_bad_options_are_named(measurer):
    with pytest.raises(UnknownName):
        OneShotEnv(measurer, "sqrtt")
    with pytest.raises(UnknownName):
        OneShotEnv(measurer, render_mode="humane")
