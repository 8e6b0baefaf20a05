import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_measurer import chain_problem
from hypothesis import given, settings
from hypothesis import strategies as st
from permuted_devices import permuted
from random_problems import random_problem
from search_problems import barred, fork_problem

from rlplace.errors import InvalidValue
from rlplace.measure.costs.costs import Costs
from rlplace.policy import ImproverConfig, ImproverPolicy
from rlplace.policy.improver import ImproverNetwork, PassState

SMALL = ImproverConfig(hidden=8, num_layers=1)


def lively(problem, seed=0):
    """A policy that has an opinion, in the middle of somewhere."""
    policy = ImproverPolicy(problem, SMALL, seed=seed)
    torch.nn.init.normal_(policy.network.score.weight, generator=torch.Generator().manual_seed(seed))
    policy.start_from(problem.draw_groups(np.random.default_rng(seed), 1)[0])
    return policy


@pytest.mark.parametrize("moves", [0.3, 1.0])
def test_a_new_policy_keeps_what_is_there_but_for_some_moves(moves):
    problem = chain_problem(12, num_devices=3)
    policy = ImproverPolicy(problem, replace(SMALL, moves=moves))
    policy.start_from(np.arange(12) % 3)
    draws = policy.sample(20_000, np.random.default_rng(0))
    assert (draws != np.arange(12) % 3).sum(axis=1).mean() == pytest.approx(moves, rel=0.05)
    stays = 1 - moves / 12
    log_prob_BG, _ = policy.evaluate(np.stack([np.arange(12) % 3, np.zeros(12, dtype=int)]))
    assert log_prob_BG[0].tolist() == pytest.approx([np.log(stays)] * 12, abs=1e-4)
    assert log_prob_BG[1, 1].item() == pytest.approx(np.log((1 - stays) / 2), abs=1e-3)
    assert policy.mode().tolist() == (np.arange(12) % 3).tolist()


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_known_placements_are_evaluated_as_step_by_step(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, int(rng.integers(1, 9)))
    policy = lively(problem, seed % 1000)
    rows = problem.draw_groups(rng, 3)
    log_prob_BG, entropy_BG = policy.evaluate(rows)
    num_devices = problem.host.num_devices
    chance = min(2.0 / policy.num_groups, 0.25) if num_devices > 1 else 0.0
    state = PassState(policy._arrays, policy.start.numpy(), len(rows))
    with torch.no_grad():
        pairs_GDH = policy.network.encode(policy.problem)
        for group in policy._arrays.order.tolist():
            scores_BD = policy.network(pairs_GDH[group], torch.from_numpy(state.look(group)))
            scores_BD[:, policy.start[group]] += policy.keep
            p_BD = 0.5 * torch.softmax(scores_BD, dim=-1) + 0.5 * chance / max(num_devices - 1, 1)
            p_BD[:, policy.start[group]] += 0.5 * (1 - chance - chance / max(num_devices - 1, 1))
            log_p_BD = p_BD.log()
            for row, placement in enumerate(rows):
                expected = log_p_BD[row, placement[group]].item()
                assert log_prob_BG[row, group].item() == pytest.approx(expected, abs=1e-4)
                by_hand = -(log_p_BD[row].exp() * log_p_BD[row]).sum().item()
                assert entropy_BG[row, group].item() == pytest.approx(by_hand, abs=1e-4)
            state.move(group, rows[:, group])


def test_probabilities_add_up_and_are_drawn():
    policy = lively(fork_problem(3))
    every = np.array(list(itertools.product(range(2), repeat=6)), dtype=np.int32)
    probabilities = policy.log_prob(every).exp()
    assert probabilities.sum().item() == pytest.approx(1.0, abs=1e-4)
    draws = policy.sample(20_000, np.random.default_rng(0))
    for placement, probability in zip(every, probabilities.tolist(), strict=True):
        assert (draws == placement).all(axis=1).mean() == pytest.approx(probability, abs=0.02)


def test_the_gradient_is_the_analytic_one():
    """Of the score's weights: over devices, q_a / p_a (1[d] - q_d) times their hidden layer, half of p being q."""
    policy = lively(chain_problem(2, num_devices=3))
    rows = np.array([[2, 1]])
    log_prob_1G, _ = policy.evaluate(rows)
    (gradient_1H,) = torch.autograd.grad(log_prob_1G.sum(), policy.network.score.weight)
    hidden = []
    policy.network.score.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0].detach()))
    logits_GD = policy._scores(rows)[0].detach() + policy.keep * policy._stays()
    one_hot_GD, q_GD = torch.nn.functional.one_hot(torch.from_numpy(rows[0]), 3), torch.softmax(logits_GD, dim=-1)
    half_G = 0.5 * (q_GD * one_hot_GD).sum(dim=-1) / log_prob_1G[0].detach().exp()
    by_hand_H = (half_G[:, None, None] * (one_hot_GD - q_GD)[..., None] * hidden[0][0]).sum(dim=(0, 1))
    assert torch.allclose(gradient_1H[0], by_hand_H, atol=1e-5)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_permuting_devices_and_the_start_permutes_the_answer(seed):
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, int(rng.integers(2, 10)))
    order = rng.permutation(problem.host.num_devices)
    policy = lively(problem, seed % 1000)
    other = ImproverPolicy(permuted(problem, order), SMALL, network=policy.network)
    place = np.argsort(order)  # where each device is listed now
    other.start_from(place[policy.start.numpy()])
    other.keep.copy_(policy.keep)
    rows = problem.draw_groups(rng, 3)
    if np.array_equal(other._arrays.order, policy._arrays.order):  # mean transfers differ by rounding: ranks may tie
        assert torch.allclose(other.evaluate(place[rows])[0], policy.evaluate(rows)[0], atol=2e-3)


def test_bars_are_never_sampled():
    problem = barred(chain_problem(4, num_devices=3), {0: (2,), 2: (0, 1)})
    policy = lively(problem)
    policy.set_flips(3.0)
    draws = np.concatenate((policy.sample(500), policy.mode()[None]))
    assert problem.group_allowed[np.arange(4), draws].all()
    log_prob_BG, entropy_BG = policy.evaluate(draws[:4])
    (log_prob_BG.sum() + entropy_BG.sum()).backward()
    assert all(torch.isfinite(weight.grad).all() for weight in policy.parameters() if weight.grad is not None)


def test_it_starts_where_all_groups_are_fastest_together():
    costs = Costs(np.array([[3.0, 1.0], [1.0, 2.0], [3.0, 1.0]]), "estimated")
    problem = replace(chain_problem(3), costs=costs)
    assert ImproverPolicy(problem, SMALL).start.tolist() == [1, 1, 1]
    assert ImproverPolicy(barred(problem, {1: (0,)}), SMALL).start.tolist() == [1, 0, 1]


def test_a_pass_never_moves_more_than_a_quarter_however_many_are_asked_for():
    policy = ImproverPolicy(chain_problem(8), SMALL)
    policy.set_flips(100.0)
    moved = (policy.sample(20_000, np.random.default_rng(0)) != policy.start.numpy()).sum(axis=1)
    assert moved.mean() == pytest.approx(2.0, rel=0.05)


def test_samples_depend_on_the_seed_alone():
    first, again, other = (ImproverPolicy(chain_problem(9), SMALL, seed=seed).sample(8) for seed in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert first.dtype == np.int32


def test_a_saved_policy_answers_the_same(tmp_path):
    policy = lively(chain_problem(5, num_devices=3), seed=1)
    policy.set_flips(0.7)
    policy.save(tmp_path / "policy.safetensors")
    loaded = ImproverPolicy(chain_problem(5, num_devices=3), SMALL, seed=9)
    loaded.load(tmp_path / "policy.safetensors")
    rows = policy.sample(6)
    assert torch.equal(loaded.evaluate(rows)[0], policy.evaluate(rows)[0])
    assert loaded.mode().tolist() == policy.mode().tolist()


def test_weights_fit_other_groups_and_devices_and_the_start_stays(tmp_path):
    lively(chain_problem(5, num_devices=3)).save(tmp_path / "policy.safetensors")
    for other in (chain_problem(8, num_devices=2), barred(chain_problem(5, num_devices=3), {0: (1,)})):
        policy = ImproverPolicy(other, SMALL)
        before = policy.start.tolist()
        policy.load(tmp_path / "policy.safetensors")
        assert policy.start.tolist() == before
        assert other.group_allowed[np.arange(policy.num_groups), policy.sample(4)].all()


def test_networks_can_be_shared():
    network = ImproverNetwork(SMALL)
    first, second = (ImproverPolicy(chain_problem(n), SMALL, network=network) for n in (3, 6))
    assert all(one is other for one, other in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("options", [{"hidden": 0}, {"num_layers": -1}, {"moves": 0.0}, {"explore": 0.0}])
def test_options_are_checked(options):
    with pytest.raises(InvalidValue, match=next(iter(options))):
        ImproverConfig(**options)
