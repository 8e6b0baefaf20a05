"""`SequentialEnv`: checked by Gymnasium and Stable-Baselines3, its returns those of the one-shot env."""

from __future__ import annotations

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
from fake_measurer import CountingMeasurer, chain_problem
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import random_problem
from sb3_contrib import MaskablePPO
from search_problems import barred, fork_problem, tight_problem
from stable_baselines3 import PPO
from stable_baselines3.common.env_checker import check_env as check_sb3_env

from rlplace.env import POTENTIALS, OneShotEnv, SequentialEnv
from rlplace.errors import InvalidValue, UnknownName
from rlplace.measure.simulate.simulator import Simulator


@pytest.fixture
def measurer() -> CountingMeasurer:
    return CountingMeasurer(chain_problem(3), wanted=[0, 1, 1], failing=[1, 1, 1])


def play(env: SequentialEnv, placement: list[int]) -> tuple[float, dict[str, object]]:
    """The return of an episode that ends in a placement of groups, and the info of its last step."""
    observation, info = env.reset(seed=0)
    total, ended = 0.0, False
    while not ended:
        assert info == {}
        assert observation in env.observation_space
        observation, reward, ended, truncated, info = env.step(np.int64(placement[int(observation["group"])]))
        assert np.isfinite(reward)
        assert not truncated
        total += reward
    assert observation in env.observation_space
    return total, info


@pytest.mark.parametrize("name", ["rlplace/Sequential-v0", "rlplace/SequentialMeasured-v0"])
@pytest.mark.parametrize("choose_group", [False, True])
def test_gymnasiums_checks_pass(measurer: CountingMeasurer, name: str, choose_group: bool) -> None:
    check_env(gym.make(name, measurer=measurer, choose_group=choose_group).unwrapped)


@pytest.mark.parametrize("choose_group", [False, True])
def test_stable_baselines_checks_pass(measurer: CountingMeasurer, choose_group: bool) -> None:
    check_sb3_env(SequentialEnv(measurer, choose_group=choose_group))


def test_checks_pass_on_the_simulator() -> None:
    simulator = Simulator(random_problem(np.random.default_rng(0), 12), threads=1)
    check_env(gym.make("rlplace/Sequential-v0", measurer=simulator, reward="sqrt").unwrapped)


def test_a_spec_makes_another_env_on_the_same_measurer(measurer: CountingMeasurer) -> None:
    env = gym.make("rlplace/Sequential-v0", measurer=measurer, potential="none")
    assert env.spec is not None
    again = env.spec.make().unwrapped
    assert isinstance(again, SequentialEnv)
    assert again.scorer.measurer is measurer


def test_only_the_measured_env_is_nondeterministic(measurer: CountingMeasurer) -> None:
    assert not gym.spec("rlplace/Sequential-v0").nondeterministic
    assert gym.spec("rlplace/SequentialMeasured-v0").nondeterministic
    env = gym.make("rlplace/SequentialMeasured-v0", measurer=measurer, baseline_s=1.0).unwrapped
    assert isinstance(env, SequentialEnv)
    for _ in range(2):
        play(env, [0, 1, 1])
    assert len(measurer.batches) == 2


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 100_000), st.sampled_from(POTENTIALS), st.sampled_from(("sqrt", "log_speedup")))
def test_rewards_add_up_to_the_one_shot_return(seed: int, potential: str, reward: str) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, 10)
    if rng.random() < 0.3:
        problem = barred(problem, {int(rng.integers(10)): (0,)})
    simulator = Simulator(problem, threads=1)
    one_shot = OneShotEnv(simulator, reward, baseline_s=10.0)
    order = rng.random(10) if rng.random() < 0.5 else None
    env = SequentialEnv(simulator, reward, baseline_s=10.0, potential=potential, order=order)
    for _ in range(3):
        placement = rng.integers(0, problem.host.num_devices, 10)
        one_shot.reset()
        _, wanted, _, _, wanted_info = one_shot.step(placement)
        total, info = play(env, placement.tolist())
        assert total == pytest.approx(wanted, rel=1e-9, abs=1e-9)
        assert (info["step_time_s"], info["status"]) == (wanted_info["step_time_s"], wanted_info["status"])
        assert np.array_equal(info["placement"], wanted_info["placement"])


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 100_000), st.sampled_from(POTENTIALS))
def test_choosing_groups_changes_no_return(seed: int, potential: str) -> None:
    rng = np.random.default_rng(seed)
    simulator = Simulator(random_problem(rng, 8), threads=1)
    num_devices = simulator.problem.host.num_devices
    one_shot = OneShotEnv(simulator, baseline_s=10.0)
    env = SequentialEnv(simulator, baseline_s=10.0, potential=potential, choose_group=True)
    placement = rng.integers(0, num_devices, 8)
    one_shot.reset()
    wanted = one_shot.step(placement)[1]
    env.reset()
    total = 0.0
    for group in rng.permutation(8).tolist():
        assert env.action_masks().reshape(8, num_devices)[group].any()
        observation, reward, ended, _, _ = env.step(np.int64(group * num_devices + placement[group]))
        assert observation in env.observation_space
        total += reward
    assert ended
    assert total == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_an_action_against_a_pin_fails_in_the_end(measurer: CountingMeasurer) -> None:
    pins = np.array([[True, False], [True, True], [False, True]])
    measurer.problem = replace(measurer.problem, allowed=pins)
    env = SequentialEnv(measurer, "sqrt", baseline_s=1.0)
    total, info = play(env, [0, 0, 0])
    assert total == pytest.approx(-(10**0.5))
    assert (info["status"], info["step_time_s"]) == ("error", np.inf)
    assert measurer.batches == []
    env.reset()
    masks = []
    for device in (0, 1, 1):
        masks.append(env.action_masks().tolist())
        env.step(np.int64(device))
    assert masks == pins.tolist()


def test_a_group_that_is_chosen_twice_ends_the_episode(measurer: CountingMeasurer) -> None:
    env = SequentialEnv(measurer, "sqrt", baseline_s=1.0, choose_group=True)
    env.reset()
    assert env.action_masks().all()
    first = env.step(np.int64(2))[1]  # group 1 on device 0
    assert env.action_masks().tolist() == [True, True, False, False, True, True]
    observation, second, ended, _, info = env.step(np.int64(3))
    assert ended
    assert first + second == pytest.approx(-(10**0.5))
    assert (info["status"], info["placement"].tolist()) == ("error", [-1, 0, -1])
    assert observation in env.observation_space
    assert measurer.batches == []


def test_masks_follow_memory_and_can_leave_it_out() -> None:
    simulator = Simulator(tight_problem(2, 2), threads=1)
    for memory_mask, then in (("resident", [False, True]), ("none", [True, True])):
        env = SequentialEnv(simulator, memory_mask=memory_mask)
        env.reset()
        assert env.action_masks().tolist() == [True, True]
        env.step(np.int64(0))
        assert env.action_masks().tolist() == then
        env.step(np.int64(1))
        assert env.action_masks().tolist() == [True, True]


@pytest.mark.parametrize("choose_group", [False, True])
@pytest.mark.parametrize("agent_class", [PPO, MaskablePPO])
def test_the_agents_of_others_learn_on_it_as_it_is(agent_class: type[PPO], choose_group: bool) -> None:
    simulator = Simulator(fork_problem(seed=0), threads=1)
    env = gym.make("rlplace/Sequential-v0", measurer=simulator, choose_group=choose_group)
    agent = agent_class("MultiInputPolicy", env, n_steps=60, batch_size=30, n_epochs=2, seed=0)
    agent.learn(240)
    masks = {"action_masks": env.unwrapped.action_masks()} if agent_class is MaskablePPO else {}  # type: ignore[attr-defined]
    observation, _ = env.reset()
    action, _ = agent.predict(observation, deterministic=True, **masks)
    assert env.action_space.contains(int(action))


def test_bad_options_and_actions_are_named(measurer: CountingMeasurer) -> None:
    with pytest.raises(UnknownName, match="potential"):
        SequentialEnv(measurer, potential="finsh")
    with pytest.raises(UnknownName, match="render_mode"):
        SequentialEnv(measurer, render_mode="humane")
    env = SequentialEnv(measurer, choose_group=True)
    env.reset()
    for action in (6, -1, 0.5):
        with pytest.raises(InvalidValue, match="action"):
            env.step(np.asarray(action))  # type: ignore[arg-type]
    play(plain := SequentialEnv(measurer), [0, 0, 0])
    with pytest.raises(InvalidValue, match="reset"):
        plain.step(np.int64(0))
