"""The graph as an observation: flat arrays of fixed shape, from which an ordinary policy learns."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from fake_measurer import CountingMeasurer, chain_problem
from gymnasium.utils.env_checker import check_env
from random_problems import plain_host, random_problem
from search_problems import brute_force_s, fork_problem
from stable_baselines3 import PPO
from stable_baselines3.common.env_checker import check_env as check_sb3_env

from rlplace.env import OneShotEnv, PlacementVecEnv, problem_features
from rlplace.env.problem_features import GraphObservation
from rlplace.errors import UnknownName
from rlplace.measure.simulate.simulator import Simulator


def test_gymnasiums_and_stable_baselines_checks_pass() -> None:
    measurer = CountingMeasurer(chain_problem(3), wanted=[0, 1, 1])
    check_env(gym.make("rlplace/OneShot-v0", measurer=measurer, observation="graph").unwrapped)
    check_sb3_env(OneShotEnv(measurer, observation="graph"))


def test_it_holds_the_features_of_groups_edges_and_devices() -> None:
    problem = random_problem(np.random.default_rng(3), 12, plain_host(3))
    features = problem_features(problem)
    seen = GraphObservation(problem, "graph").one()
    groups = seen["groups"].reshape(len(features.nodes), -1)
    width = features.nodes.shape[1]
    assert np.array_equal(groups[:, :width], features.nodes)
    assert np.array_equal(groups[:, width:], features.pairs.reshape(len(features.nodes), -1))
    assert np.array_equal(seen["devices"].reshape(features.devices.shape), features.devices)
    adjacency = seen["adjacency"].reshape(len(features.nodes), len(features.nodes))
    source, target = np.nonzero(adjacency)
    edges = features.arrays.edge_source, features.arrays.edge_target, features.edges[:, 0]
    assert set(zip(source.tolist(), target.tolist(), strict=True)) == {
        (int(a), int(b)) for a, b, sent in zip(*edges, strict=True) if sent > 0
    }
    assert adjacency.max() == 1.0


def test_a_chain_is_seen_as_a_chain() -> None:
    adjacency = GraphObservation(chain_problem(3), "graph").one()["adjacency"].reshape(3, 3)
    assert adjacency.tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 0]]


def test_both_envs_show_the_same_and_never_the_same_array() -> None:
    measurer = CountingMeasurer(chain_problem(3), wanted=[0, 1, 1])
    one, many = OneShotEnv(measurer, observation="graph"), PlacementVecEnv(measurer, 2, observation="graph")
    assert one.observation_space == many.observation_space
    first, _ = one.reset()
    second, *_ = one.step(np.zeros(3, dtype=np.int64))
    batch = many.reset()
    for name in ("groups", "adjacency", "devices"):
        assert first[name] is not second[name]
        assert np.array_equal(batch[name], [first[name], second[name]])


@pytest.mark.slow
def test_a_policy_of_stable_baselines_learns_from_it() -> None:
    problem = fork_problem(0)
    simulator = Simulator(problem, threads=1)
    envs = PlacementVecEnv(simulator, 32, observation="graph")
    agent = PPO("MultiInputPolicy", envs, n_steps=2, batch_size=64, learning_rate=3e-3, seed=0)
    agent.learn(4096)
    observation = {name: rows[0] for name, rows in envs.reset().items()}
    action, _ = agent.predict(observation, deterministic=True)
    assert simulator.step_times(action[None].astype(np.int32))[0] == pytest.approx(brute_force_s(problem), rel=1e-9)


def test_a_mistyped_observation_is_named() -> None:
    with pytest.raises(UnknownName, match="observation 'grph'"):
        OneShotEnv(CountingMeasurer(chain_problem(3), wanted=[0, 1, 1]), observation="grph")
