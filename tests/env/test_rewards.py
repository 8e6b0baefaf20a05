import math

import numpy as np
import pytest
from fake_measurer import CountingMeasurer, chain_problem

from rlplace.env import LogSpeedupReward, OneShotEnv, SequentialEnv, SqrtReward, make_reward
from rlplace.errors import InvalidValue, UnknownName


def test_sqrt_is_the_papers():
    rewards = SqrtReward(baseline_s=1.0)(np.array([0.04, 0.25, 9.0]))
    assert rewards.tolist() == pytest.approx([-0.2, -0.5, -3.0])


def test_log_speedup_is_zero_at_the_baseline_and_symmetric_around_it():
    rewards = LogSpeedupReward(baseline_s=0.5)(np.array([0.5, 0.25, 1.0]))
    assert rewards.tolist() == pytest.approx([0.0, math.log(2), -math.log(2)])


def test_a_failure_counts_as_so_many_times_the_baseline():
    failed = np.array([np.inf])
    assert SqrtReward(0.4, failure_slowdown=10)(failed).tolist() == pytest.approx([-2.0])
    assert LogSpeedupReward(0.4, failure_slowdown=10)(failed).tolist() == pytest.approx([-math.log(10)])


def test_rewards_are_made_by_name():
    assert make_reward("sqrt", 2.0) == SqrtReward(2.0)
    assert make_reward("log_speedup", 2.0, 5.0) == LogSpeedupReward(2.0, 5.0)


def test_a_mistyped_name_gets_the_nearest():
    with pytest.raises(UnknownName, match="log_speedup") as caught:
        make_reward("logspeedup", 1.0)
    assert caught.value.nearest == ("log_speedup",)


@pytest.mark.parametrize(("baseline_s", "slowdown"), [(0.0, 10), (-1.0, 10), (math.inf, 10), (1.0, 0), (1.0, math.nan)])
def test_figures_must_be_positive_and_finite(baseline_s, slowdown):
    with pytest.raises(InvalidValue):
        SqrtReward(baseline_s, slowdown)


def test_the_baseline_is_worth_0_and_not_minus_0():
    assert str(LogSpeedupReward(0.5)(np.array([0.5]))) == "[0.]"


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (lambda step_time_s: -1.0, r"of shape \(\).*shape \(1,\)"),
        (lambda step_time_s: -step_time_s[:, None], r"of shape \(1, 1\)"),
        (lambda step_time_s: step_time_s * np.inf, "inf for a step of"),
        (lambda step_time_s: None, "finite numbers"),
        (lambda step_time_s: "good", "finite numbers"),
    ],
)
@pytest.mark.parametrize("env_of", [OneShotEnv, SequentialEnv])
def test_a_reward_of_the_users_is_checked(env_of, reward, words):
    env = env_of(CountingMeasurer(chain_problem(2), [0, 0]), reward)
    env.reset()
    with pytest.raises(InvalidValue, match=words):
        env.step(np.zeros(env.action_space.shape, dtype=np.int64))


def test_a_failure_that_is_worth_minus_infinity_is_told_what_to_do():
    env = OneShotEnv(CountingMeasurer(chain_problem(2), wanted=[1, 1], failing=[0, 0]), lambda seconds: -seconds)
    with pytest.raises(InvalidValue, match="A placement that failed has an infinite step time"):
        env.step(np.zeros(2, dtype=np.int64))


@pytest.mark.parametrize("reward", [None, 3.0])
def test_what_cannot_be_called_is_no_reward(reward):
    with pytest.raises(InvalidValue, match="log_speedup"):
        OneShotEnv(CountingMeasurer(chain_problem(2), [0, 0]), reward)
