import itertools

import numpy as np
import pytest
import torch
from fake_measurer import chain_problem

from rlplace.env.one_shot import action_space, observation_space
from rlplace.policy import PlacementRolloutBuffer


@pytest.fixture
def buffer():
    buffer = PlacementRolloutBuffer(2, observation_space(), action_space(chain_problem(3)), n_envs=2)
    for step in range(2):
        log_prob_BG = torch.arange(6.0).reshape(2, 3) + 10 * step
        actions_BG = np.full((2, 3), step)
        rewards = np.array([1.0, 2.0]) + step
        buffer.add({"graph": np.zeros(2)}, actions_BG, rewards, np.ones(2), torch.zeros(2), log_prob_BG)
    buffer.compute_returns_and_advantage(torch.zeros(2), np.ones(2, dtype=bool))
    return buffer


def test_log_probs_stay_apart_by_group(buffer):
    (samples,) = buffer.get()
    # environments first, then steps, as Stable-Baselines3 flattens them
    assert samples.old_log_prob.tolist() == [[0, 1, 2], [10, 11, 12], [3, 4, 5], [13, 14, 15]]
    assert samples.actions.tolist() == [[0, 0, 0], [1, 1, 1], [0, 0, 0], [1, 1, 1]]


def test_the_advantage_is_the_reward_less_the_mean_of_the_rollout(buffer):
    (samples,) = buffer.get()
    assert samples.returns.tolist() == [1, 2, 2, 3]
    assert samples.advantages.tolist() == [-1, 0, 0, 1]


def test_minibatches_cover_the_rollout_in_an_order_of_their_own(buffer):
    buffer.rng = np.random.default_rng(0)
    np.random.seed(0)
    first = [samples.returns.tolist() for samples in buffer.get(3)]
    buffer.rng = np.random.default_rng(0)
    np.random.seed(1)
    again = [samples.returns.tolist() for samples in buffer.get(3)]
    assert first == again
    assert [len(batch) for batch in first] == [3, 1]
    assert sorted(itertools.chain(*first)) == [1, 2, 2, 3]


def test_buffers_share_no_generator():
    one, other = (PlacementRolloutBuffer(2, observation_space(), action_space(chain_problem(3))) for _ in range(2))
    assert one.rng is not other.rng
    first = one.rng.random()
    assert other.rng.random() == first
