import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_measurer import chain_problem
from permuted_devices import permuted
from search_problems import barred

from rlplace.errors import FileProblem, InvalidValue
from rlplace.measure.costs.costs import Costs
from rlplace.policy import GnnConfig, GnnPolicy, ImproverPolicy, imitate
from rlplace.policy.gnn import AssignmentNetwork

SMALL = GnnConfig(hidden=8, marks=4)


def taught(problem, seed=0):
    """A policy that has an opinion."""
    policy = GnnPolicy(problem, SMALL, seed=seed)
    imitate(policy, problem.draw_groups(np.random.default_rng(seed), 1)[0], num_steps=20)
    return policy


def uneven(num_ops=5, num_devices=3):
    """A chain on devices of which no two are alike."""
    costs = Costs(np.random.default_rng(0).uniform(0.5, 3.0, (num_ops, num_devices)), "estimated")
    return replace(chain_problem(num_ops, num_devices), costs=costs)


def test_log_probabilities_are_those_of_the_softmax():
    policy = taught(chain_problem(4, num_devices=3))
    policy.set_flips(1.0)
    rows = np.array([[0, 1, 2, 0], [2, 2, 1, 1]])
    log_prob_BG, entropy_BG = policy.evaluate(rows)
    p_GD = torch.softmax(policy.logits() / policy.temperature, dim=-1)
    for row, placement in enumerate(rows):
        for group, device in enumerate(placement):
            assert log_prob_BG[row, group].item() == pytest.approx(p_GD[group, device].log().item(), abs=1e-5)
            by_hand = -(p_GD[group] * p_GD[group].log()).sum().item()
            assert entropy_BG[row, group].item() == pytest.approx(by_hand, abs=1e-5)
    assert policy.log_prob(rows).tolist() == pytest.approx(log_prob_BG.sum(dim=1).tolist())


def test_probabilities_add_up_and_are_drawn():
    policy = taught(chain_problem(3))
    policy.set_flips(1.0)
    every = np.array(list(itertools.product(range(2), repeat=3)), dtype=np.int32)
    probabilities = policy.log_prob(every).exp()
    assert probabilities.sum().item() == pytest.approx(1.0, abs=1e-5)
    draws = policy.sample(20_000, np.random.default_rng(0))
    for placement, probability in zip(every, probabilities.tolist(), strict=True):
        assert (draws == placement).all(axis=1).mean() == pytest.approx(probability, abs=0.02)


def test_a_new_policy_finds_every_device_as_likely():
    assert torch.equal(GnnPolicy(chain_problem(6, num_devices=3), SMALL, seed=5).logits(), torch.zeros(6, 3))


@pytest.mark.slow
def test_equal_devices_can_be_told_apart():
    policy = GnnPolicy(chain_problem(6, num_devices=3), SMALL)
    imitate(policy, np.array([0, 1, 2, 2, 1, 0]), num_steps=200, learning_rate=1e-2)
    assert policy.mode().tolist() == [0, 1, 2, 2, 1, 0]


def test_permuting_devices_that_differ_permutes_the_answer():
    problem, order = uneven(), [2, 0, 1]
    policy = taught(problem)
    other = GnnPolicy(permuted(problem, order), SMALL, network=policy.network)
    assert torch.allclose(other.logits(), policy.logits()[:, order], atol=1e-4)
    assert np.array_equal(np.array(order)[other.mode()], policy.mode())


def test_bars_are_never_sampled():
    problem = barred(chain_problem(4, num_devices=3), {0: (2,), 2: (0, 1)})
    policy = taught(problem)
    for flips in (0.1, 0.5, 3.0):
        policy.set_flips(flips)
        draws = np.concatenate((policy.sample(500), policy.mode()[None]))
        assert problem.group_allowed[np.arange(4), draws].all()
    log_prob_BG, entropy_BG = policy.evaluate(draws[:4])
    (log_prob_BG.sum() + entropy_BG.sum()).backward()
    assert all(torch.isfinite(weight.grad).all() for weight in policy.parameters() if weight.grad is not None)


def test_samples_depend_on_the_seed_alone():
    first, again, other = (GnnPolicy(chain_problem(9), SMALL, seed=seed).sample(8) for seed in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert first.dtype == np.int32


def test_a_saved_policy_answers_the_same(tmp_path):
    policy = taught(chain_problem(5, num_devices=3), seed=1)
    policy.set_flips(0.7)
    policy.save(tmp_path / "policy.safetensors")
    loaded = GnnPolicy(chain_problem(5, num_devices=3), SMALL, seed=9)
    loaded.load(tmp_path / "policy.safetensors")
    assert torch.equal(loaded.logits(), policy.logits())
    assert loaded.temperature == policy.temperature


def test_weights_fit_other_groups_and_devices(tmp_path):
    taught(chain_problem(5, num_devices=3)).save(tmp_path / "policy.safetensors")
    wider = GnnPolicy(uneven(8, 5), SMALL)
    wider.load(tmp_path / "policy.safetensors")
    assert wider.logits().shape == (8, 5)
    assert wider.logits().detach().abs().sum() > 0
    assert wider.sample(4).shape == (4, 8)


def test_networks_can_be_shared():
    network = AssignmentNetwork(SMALL)
    first, second = (GnnPolicy(problem, SMALL, network=network) for problem in (chain_problem(4), uneven()))
    imitate(first, np.array([0, 1, 0, 1]), num_steps=5)
    assert second.logits().detach().abs().sum() > 0


def test_weights_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "policy.safetensors"
    GnnPolicy(chain_problem(3), SMALL).save(path)
    with pytest.raises(InvalidValue, match="hidden=8"):
        GnnPolicy(chain_problem(3)).load(path)
    ImproverPolicy(chain_problem(3)).save(path)
    with pytest.raises(FileProblem, match="kind 'gnn', but of kind 'improver'"):
        GnnPolicy(chain_problem(3), SMALL).load(path)


@pytest.mark.parametrize("options", [{"hidden": 0}, {"num_layers": -1}, {"num_rounds": 0}, {"marks": -1}])
def test_sizes_are_checked(options):
    with pytest.raises(InvalidValue, match=next(iter(options))):
        GnnConfig(**options)
