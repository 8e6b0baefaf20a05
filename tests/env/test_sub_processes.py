"""Envs in processes of their own give what they give here: those of Stable-Baselines3, and those of Gymnasium."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from search_problems import fork_problem
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv

from rlplace.measure.simulate.simulator import Simulator

ONE_SHOT, SEQUENTIAL = "rlplace.env:rlplace/OneShot-v0", "rlplace.env:rlplace/Sequential-v0"


def envs(name: str, kind: type[DummyVecEnv] | type[SubprocVecEnv], simulator: Simulator) -> VecEnv:
    return make_vec_env(name, n_envs=2, seed=0, vec_env_cls=kind, env_kwargs={"measurer": simulator})


@pytest.mark.slow
@pytest.mark.parametrize("name", [ONE_SHOT, SEQUENTIAL])
def test_an_agent_learns_the_same_in_two_processes_as_in_this_one(name: str) -> None:
    simulator = Simulator(fork_problem(0), threads=1)
    learned = []
    for kind in (DummyVecEnv, SubprocVecEnv):
        vec = envs(name, kind, simulator)
        agent = PPO("MultiInputPolicy", vec, n_steps=12, batch_size=24, n_epochs=2, seed=0)
        agent.learn(72)
        learned.append([tensor.detach().numpy() for tensor in agent.policy.parameters()])
        vec.close()
    assert all(np.array_equal(here, there) for here, there in zip(*learned, strict=True))


@pytest.mark.slow
def test_a_pool_that_was_in_use_before_a_fork_is_no_trap() -> None:
    problem = fork_problem(0)
    simulator = Simulator(problem, threads=2)
    simulator.step_times(np.zeros((64, 6), dtype=np.int32))  # its threads run now, and will not in the children
    actions = np.random.default_rng(0).integers(0, 2, (4, 2, 6))
    rewards = []
    for mode in ("sync", "async"):
        vec = gym.make_vec(
            ONE_SHOT,
            num_envs=2,
            vectorization_mode=mode,
            vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
            measurer=simulator,
        )
        vec.reset(seed=0)
        rewards.append([vec.step(action)[1].tolist() for action in actions])
        vec.close()
    assert rewards[0] == rewards[1]
