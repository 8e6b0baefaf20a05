"""`GroupPPO`: the stated loss and its gradient, and what the policy is told."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from fake_measurer import TimingMeasurer, chain_problem
from micrographs import op_graph
from random_problems import plain_host
from search_problems import brute_force_s

from rlplace.env.rewards import make_reward
from rlplace.errors import InvalidValue
from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.policy import GnnConfig, GnnPolicy, GroupPPO, PlacerArchitecture, PPOConfig, make_policy
from rlplace.policy.learn.ppo import clipped_group_loss, relative_advantages

SMALL = PlacerArchitecture(hidden=8, num_layers=1)
ROWS, REWARDS = np.array([[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 1]]), np.array([0.5, -1.0, -0.2])


def learner(problem, *, seed=0, **options):
    return GroupPPO(make_policy(problem, SMALL, seed=seed), PPOConfig(**options), seed=seed)


def test_each_groups_ratio_is_clipped_by_itself():
    ratio_BG = np.array([[1.5, 1.0, 0.5], [1.5, 0.9, 0.5]])
    advantages = np.array([2.0, -1.0])
    # clip range 0.2. Better than average: min(A r, A clip(r)); worse: the larger loss
    by_hand = [
        [2.0 * 1.2, 2.0 * 1.0, 2.0 * 0.5],
        [-1.5, -0.9, -0.8],
    ]
    loss = clipped_group_loss(torch.tensor(ratio_BG).log(), torch.tensor(advantages), 0.2)
    assert loss.item() == pytest.approx(-np.mean(by_hand))


def test_clipped_groups_get_no_gradient_and_the_others_do():
    log_ratio_BG = torch.tensor([[math.log(1.5), math.log(1.1)]], requires_grad=True)
    clipped_group_loss(log_ratio_BG, torch.tensor([1.0]), 0.2).backward()
    # the ratio of the whole placement, 1.65, would be clipped and teach neither
    assert log_ratio_BG.grad.tolist()[0] == pytest.approx([0.0, -1.1 / 2])


def test_advantages_are_relative_to_the_batch():
    assert relative_advantages(np.array([1.0, 3.0]), normalize=False).tolist() == [-1.0, 1.0]
    assert relative_advantages(np.array([1.0, 3.0]), normalize=True).tolist() == pytest.approx([-(2**-0.5), 2**-0.5])
    assert relative_advantages(np.array([7.0]), normalize=True).tolist() == [0.0]
    assert relative_advantages(np.array([7.0, 7.0]), normalize=True).tolist() == [0.0, 0.0]


def test_an_update_minimises_the_stated_loss():
    model = learner(chain_problem(3), elite_coef=0.5, elite_smoothing=0.1, ent_coef=0.01)
    torch.nn.init.normal_(model.policy.table_GD, std=0.1, generator=torch.Generator().manual_seed(0))
    rows_BG, elite_G = np.array([[0, 1, 1], [0, 0, 0]]), np.array([0, 1, 1])
    model.elites.add(elite_G[None], np.array([1.0]))
    advantages_B = torch.tensor([2**-0.5, -(2**-0.5)])
    loss, _ = model._loss(rows_BG, advantages_B, torch.full((2, 3), math.log(0.4)), defaultdict(list))

    probabilities_GD = torch.softmax(model.policy.logits(), dim=-1).detach().numpy()
    surrogate, elite, entropy = [], [], []
    for placement, advantage in zip(rows_BG, advantages_B.tolist(), strict=True):
        for group, device in enumerate(placement):
            ratio = probabilities_GD[group, device] / 0.4
            surrogate.append(min(advantage * ratio, advantage * min(max(ratio, 0.8), 1.2)))
    for group, device in enumerate(elite_G):
        p = probabilities_GD[group]
        elite.append(-(0.9 * math.log(p[device]) + 0.1 * math.log(1 - p[device])))
        entropy.append(-(p * np.log(p)).sum())
    by_hand = -np.mean(surrogate) + 0.5 * np.mean(elite) - 0.01 * np.mean(entropy)
    assert loss.item() == pytest.approx(by_hand, rel=1e-5)


def test_the_first_gradient_is_that_of_reinforce():
    """At a ratio of 1 the surrogate's gradient is that of advantage times log-probability."""
    model = learner(chain_problem(4), elite_coef=0.0)
    torch.nn.init.normal_(model.policy.table_GD, std=0.1, generator=torch.Generator().manual_seed(0))
    advantages_B = relative_advantages(REWARDS, normalize=True)
    old_BG = model.policy.evaluate(ROWS)[0].detach()
    model.elites.add(ROWS[:1], REWARDS[:1])
    loss, _ = model._loss(ROWS, advantages_B, old_BG, defaultdict(list))
    (gradient_GD,) = torch.autograd.grad(loss, model.policy.table_GD)
    probabilities_GD = torch.softmax(model.policy.logits(), dim=-1).detach()
    by_hand_GD = torch.zeros(4, 2)
    for row, advantage in zip(ROWS, advantages_B.tolist(), strict=True):
        for group, device in enumerate(row):
            one_hot = torch.nn.functional.one_hot(torch.tensor(device), 2)
            by_hand_GD[group] -= advantage * (one_hot - probabilities_GD[group]) / ROWS.size
    assert torch.allclose(gradient_GD, SMALL.table_scale * by_hand_GD, atol=1e-6)


def test_it_learns_from_placements_that_were_measured_elsewhere():
    model = learner(chain_problem(4))
    for _ in range(40):
        figures = model.update(ROWS, REWARDS)
    assert model.policy.mode().tolist() == [1, 0, 1, 0]
    assert figures["best_reward"] == 0.5
    assert model.elites.group_devices.tolist() == [[1, 0, 1, 0]]


def test_minibatches_are_the_whole_batch():
    model = learner(chain_problem(4), batch_size=2, n_epochs=1)
    parts = list(model._minibatches(5))
    assert sorted(np.concatenate(parts).tolist()) == [0, 1, 2, 3, 4]
    assert [len(part) for part in parts] == [2, 2, 1]


def test_learning_stops_when_the_divergence_passes_its_target():
    model = learner(chain_problem(4), target_kl=1e-9, n_epochs=8)
    assert model.update(ROWS, REWARDS)["n_updates"] == 2  # the first pass cannot diverge, the second is given up


def test_samples_stray_as_far_as_asked():
    model = learner(chain_problem(6, num_devices=3), flips=1.0)
    model.imitate(np.array([0, 1, 2, 0, 1, 2]))
    different = (model.policy.sample(5000, np.random.default_rng(0)) != model.policy.mode()).sum(axis=1)
    assert different.mean() == pytest.approx(1.0, rel=0.05)


def test_forgetting_lets_new_rewards_decide():
    model = learner(chain_problem(3))
    model.update(np.array([[0, 0, 0], [0, 0, 1]]), np.array([9.0, 8.0]))
    model.forget()
    for _ in range(60):
        model.update(np.array([[1, 1, 0], [0, 0, 0]]), np.array([-5.0, -6.0]))
    assert model.policy.mode().tolist() == [1, 1, 0]


def test_two_seeded_runs_agree_to_the_bit():
    def run():
        torch.randn(3)  # other users of the global generators must not matter
        policy = GnnPolicy(chain_problem(5, num_devices=3), GnnConfig(hidden=8), seed=4)
        model = GroupPPO(policy, PPOConfig(batch_size=3), seed=4)
        for _ in range(3):
            rows = policy.sample(8)
            model.update(rows, -np.abs(rows - np.array([0, 1, 2, 1, 0])).sum(axis=1).astype(float))
        return policy

    first, again = run(), run()
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert np.array_equal(first.sample(9), again.sample(9))


@pytest.mark.parametrize("options", [{"n_epochs": 0}, {"num_elites": 0}, {"batch_size": 1}, {"flips": 0.0}])
def test_bad_options_are_named(options):
    with pytest.raises(InvalidValue, match=next(iter(options))):
        PPOConfig(**options)


def taught(measurer, *, updates=60, seed=0, **options):
    """A learner after updates on 16 samples each, whose rewards are those of their step times."""
    model, reward = learner(measurer.problem, seed=seed, **options), make_reward("log_speedup", 10.0)
    grouping = measurer.problem.grouping
    for _ in range(updates):
        rows = model.policy.sample(16)
        model.update(rows, reward(measurer.step_times(grouping.expand(rows))))
    return model


def branches_problem(seed):
    """Two groups of branches of uneven costs between a fork and a join, on two devices with slow links."""
    rng = np.random.default_rng(seed)
    graph = op_graph([[], [0], [0], [0], [0], [1, 2], [3, 4], [5, 6]], rng.integers(10, 60, 8).tolist())
    costs = Costs(rng.uniform(0.5, 3.0, (8, 2)), "estimated")
    return Problem(graph, plain_host(2), costs, Grouping(np.arange(8)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_it_finds_the_best_of_all_placements(seed):
    problem = branches_problem(seed)
    simulator = Simulator(problem, threads=1)
    found = taught(simulator, updates=150, seed=seed).policy.mode()
    assert simulator.step_times(problem.grouping.expand(found[None]))[0] == pytest.approx(brute_force_s(problem))


@pytest.mark.slow
def test_plain_ppo_learns_too():
    measurer = TimingMeasurer(chain_problem(8), wanted=[0, 1, 1, 0, 1, 0, 0, 1])
    assert taught(measurer, updates=150, elite_coef=0.0).policy.mode().tolist() == measurer.wanted.tolist()


def test_failures_are_learned_from():
    measurer = TimingMeasurer(chain_problem(3), wanted=[0, 1, 1], failing=[0, 1, 0])
    assert taught(measurer).policy.mode().tolist() == [0, 1, 1]
