"""`SequentialVecEnv`: many episodes in step, the same as the single env, and fit for the agents of others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_measurer import TimingMeasurer, chain_problem
from random_problems import random_problem
from sb3_contrib import MaskablePPO
from search_problems import barred, fork_problem
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecMonitor

from rlplace.env import POTENTIALS, SequentialEnv, SequentialVecEnv
from rlplace.errors import InvalidValue
from rlplace.measure.simulate.simulator import Simulator


def make(num_envs: int, **options: Any) -> tuple[SequentialVecEnv, TimingMeasurer]:
    measurer = TimingMeasurer(chain_problem(3), wanted=[0, 1, 1], failing=[1, 1, 1])
    return SequentialVecEnv(measurer, num_envs, "sqrt", baseline_s=3.0, **options), measurer


def play(env: SequentialVecEnv, placements: np.ndarray) -> list[tuple[Any, ...]]:
    """What the steps of an episode return, where the groups come in order of their index."""
    env.reset()
    return [env.step(placements[:, group]) for group in range(placements.shape[1])]


def test_what_episodes_place_is_one_call_of_the_measurer() -> None:
    env, measurer = make(4)
    steps = play(env, np.array([[0, 1, 1], [0, 0, 0], [0, 1, 1], [1, 1, 1]]))
    assert [batch.tolist() for batch in measurer.timed] == [[[0, 1, 1], [0, 0, 0], [1, 1, 1]]]
    assert [done.any() for _, _, done, _ in steps] == [False, False, True]
    assert [infos for _, _, _, infos in steps[:2]] == [[{}] * 4] * 2
    observations, _, done, infos = steps[-1]
    assert done.all()
    assert sum(rewards for _, rewards, _, _ in steps).tolist() == pytest.approx(
        [-1, -(3**0.5), -1, -(30**0.5)], rel=1e-5
    )
    assert [info["step_time_s"] for info in infos] == [1.0, 3.0, 1.0, np.inf]
    assert [info["episode"]["r"] for info in infos] == pytest.approx([-1, -(3**0.5), -1, -(30**0.5)])
    assert {info["episode"]["l"] for info in infos} == {3}
    assert infos[3]["status"] == "oom"
    assert observations["group"].tolist() == [0] * 4
    assert infos[0]["terminal_observation"] in env.observation_space
    assert env.last_scores is not None
    assert env.last_scores.status == ("ok", "ok", "ok", "oom")


@pytest.mark.parametrize("potential", POTENTIALS)
@pytest.mark.parametrize("seed", range(3))
def test_it_agrees_with_the_single_env(potential: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = barred(random_problem(rng, 8), {3: (0,)})
    simulator = Simulator(problem, threads=1)
    options: dict[str, Any] = {"baseline_s": 10.0, "potential": potential, "order": rng.random(8)}
    env, single = SequentialVecEnv(simulator, 3, **options), SequentialEnv(simulator, **options)
    assert env.observation_space == single.observation_space
    assert env.action_space == single.action_space
    actions = rng.integers(0, problem.host.num_devices, (8, 3))
    together = [(env.reset(), None, None, None)]
    masks = [env.action_masks()]
    for row in actions:
        together.append(env.step(row))
        masks.append(env.action_masks())
    for index in range(3):
        observation, _ = single.reset()
        for step in range(8):
            assert observation["group"] == together[step][0]["group"][index]
            assert np.array_equal(observation["features"], together[step][0]["features"][index])
            assert single.action_masks().tolist() == masks[step][index].tolist()
            observation, reward, ended, _, info = single.step(actions[step, index])
            assert reward == pytest.approx(together[step + 1][1][index], rel=1e-5, abs=1e-6)
        assert ended
        assert info["status"] == together[-1][3][index]["status"]
        assert np.array_equal(observation["features"], together[-1][3][index]["terminal_observation"]["features"])


def test_observations_are_not_used_again() -> None:
    env, _ = make(2)
    first = env.reset()
    before = first["features"].copy()
    env.step(np.array([0, 1]))
    assert np.array_equal(first["features"], before)


def test_masks_are_those_of_each_env() -> None:
    measurer = TimingMeasurer(barred(chain_problem(3), {1: (1,)}), wanted=[0, 1, 1])
    env = SequentialVecEnv(measurer, 2, baseline_s=1.0)
    env.reset()
    env.step(np.array([0, 1]))
    assert env.action_masks().tolist() == [[False, True]] * 2
    assert np.stack(env.env_method("action_masks", indices=[1])).tolist() == [[False, True]]
    assert env.env_method("get_images", indices=0) == [[None, None]]


@pytest.mark.parametrize("agent_class", [PPO, MaskablePPO])
def test_the_agents_of_others_learn_on_it_as_it_is(agent_class: type[PPO]) -> None:
    env = SequentialVecEnv(Simulator(fork_problem(seed=0), threads=1), 8)
    agent = agent_class("MultiInputPolicy", VecMonitor(env), n_steps=12, batch_size=48, n_epochs=2, seed=0)
    agent.learn(384)
    assert agent.num_timesteps == 384
    assert env.last_scores is not None


def test_masked_agents_never_break_a_pin() -> None:
    problem = barred(fork_problem(seed=0, num_devices=3), {1: (2,), 4: (0, 1)})
    seen: list[str] = []

    class Watched(SequentialVecEnv):
        def step_wait(self) -> Any:
            step = super().step_wait()
            seen.extend(info["status"] for info in step[3] if info)
            return step

    env = Watched(Simulator(problem, threads=1), 4)
    MaskablePPO("MultiInputPolicy", env, n_steps=6, batch_size=24, n_epochs=1, seed=0).learn(96)
    assert len(seen) == 16
    assert set(seen) == {"ok"}


def test_bad_use_is_named() -> None:
    with pytest.raises(InvalidValue, match="SequentialVecEnv: num_envs"):
        make(0)
    env, _ = make(1)
    with pytest.raises(InvalidValue, match="step_async"):
        env.step_wait()
