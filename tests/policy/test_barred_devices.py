"""A policy never puts a group where it may not be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_measurer import TimingMeasurer, chain_problem

from rlplace.errors import InvalidValue
from rlplace.policy import GroupPPO, PlacerArchitecture, PPOConfig, imitate, make_policy
from rlplace.policy.base import chosen_and_entropy

ALLOWED = np.array([[True, False, True], [False, True, False], [True, True, True], [True, True, False]])
GROUPS = np.arange(4)


@pytest.fixture
def problem():
    return replace(chain_problem(4, num_devices=3), allowed=ALLOWED)


@pytest.fixture
def policy(problem):
    policy = make_policy(problem, PlacerArchitecture(hidden=8, num_layers=1), seed=0)
    torch.nn.init.normal_(policy.table_GD, generator=torch.Generator().manual_seed(0))
    return policy


@pytest.mark.parametrize("flips", [0.1, 1.0, 3.0])
def test_samples_and_mode_are_allowed(policy, flips):
    policy.set_flips(flips)
    assert ALLOWED[GROUPS, policy.sample(2000, np.random.default_rng(0))].all()
    assert ALLOWED[GROUPS, policy.mode()].all()
    assert torch.isfinite(policy.log_prob(policy.sample(64))).all()


def test_probabilities_are_those_of_the_allowed_devices_alone():
    logits = torch.tensor([1.0, 2.0, -torch.inf, 0.5], requires_grad=True)
    barred_B1, entropy_B1 = chosen_and_entropy(logits[None, None], np.array([[0], [1], [3]]))
    alone_B1, alone_entropy_B1 = chosen_and_entropy(logits.detach()[[0, 1, 3]][None, None], np.array([[0], [1], [2]]))
    assert barred_B1.detach().numpy() == pytest.approx(alone_B1.numpy())
    assert entropy_B1.detach().numpy() == pytest.approx(alone_entropy_B1.numpy())
    entropy_B1[0].sum().backward()
    assert torch.isfinite(logits.grad[[0, 1, 3]]).all()
    assert logits.grad[2] == 0


def test_imitation_stays_finite_and_refuses_a_barred_teacher(problem):
    policy = make_policy(problem, PlacerArchitecture(hidden=8, num_layers=1), seed=0)
    assert np.isfinite(imitate(policy, np.array([2, 1, 0, 1])))
    assert policy.mode().tolist() == [2, 1, 0, 1]
    assert all(torch.isfinite(parameter).all() for parameter in policy.parameters())
    with pytest.raises(InvalidValue, match="may not be"):
        imitate(policy, np.array([1, 1, 0, 1]))


def test_learning_finds_the_best_allowed_placement_and_tries_no_other(problem):
    measurer = TimingMeasurer(problem, wanted=[1, 1, 2, 0])
    policy = make_policy(problem, PlacerArchitecture(hidden=8, num_layers=1), seed=0)
    learner = GroupPPO(policy, PPOConfig(ent_coef=0.01), seed=0)
    for _ in range(40):
        rows = policy.sample(16)
        learner.update(rows, -np.log(measurer.step_times(rows)))
    assert ALLOWED[GROUPS, np.concatenate(measurer.timed)].all()
    assert policy.mode().tolist()[1:] == [1, 2, 0]
    assert all(torch.isfinite(parameter).all() for parameter in policy.parameters())
