"""`Seq2SeqPolicy`: its probabilities against a loop by hand, what it draws, and its files."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_measurer import chain_problem
from numpy.typing import NDArray
from search_problems import barred, fork_problem
from torch import Tensor

from rlplace.errors import FileProblem, InvalidValue
from rlplace.measure.problem import Problem
from rlplace.policy import PlacerArchitecture, Seq2SeqConfig, Seq2SeqPolicy, make_policy
from rlplace.policy.base import GroupPolicy, Loadable
from rlplace.policy.seq2seq import seq2seq_inputs

SMALL = Seq2SeqConfig(hidden=6, type_embedding=3, device_embedding=4, attention=5, tanh_constant=2.0, temperature=0.7)


def make(problem: Problem, seed: int = 0) -> Seq2SeqPolicy:
    """A policy that has an opinion."""
    policy = Seq2SeqPolicy(seq2seq_inputs(problem), SMALL, seed=seed)
    torch.nn.init.normal_(policy.network.device_net.weight, generator=torch.Generator().manual_seed(seed))
    return policy


def every_placement(num_groups: int, num_devices: int) -> NDArray[np.int32]:
    return np.array(list(itertools.product(range(num_devices), repeat=num_groups)), dtype=np.int32)


def log_probs_by_hand(policy: Seq2SeqPolicy, devices: list[int]) -> list[float]:
    """One placement, one step after the other, gate by gate (Hochreiter and Schmidhuber 1997, with forget gates)."""
    network, hidden = policy.network, SMALL.hidden
    encoded, first = network.encode(1, *policy.groups)
    state, cell = (part[0, 0] for part in first)
    decoder, last, found = network.decoder, network.begin, []
    for group, device in enumerate(devices):
        read = torch.cat((network.device_embedding.weight[last], encoded.states[group]))
        gates = decoder.weight_ih_l0 @ read + decoder.bias_ih_l0 + decoder.weight_hh_l0 @ state + decoder.bias_hh_l0
        enter, keep, new, show = gates.split(hidden)
        cell = torch.sigmoid(keep) * cell + torch.sigmoid(enter) * torch.tanh(new)
        state = torch.sigmoid(show) * torch.tanh(cell)
        scores = [network.score(torch.tanh(network.query(state) + network.key(h))).item() for h in encoded.states]
        weights = torch.softmax(torch.tensor(scores), dim=0)
        context = sum((w * h for w, h in zip(weights, encoded.states, strict=True)), torch.zeros(hidden))
        u = network.device_net(torch.cat((state, context)))
        logits: Tensor = 2.0 * torch.tanh(u / 0.7)
        logits[~policy.allowed[group]] = -math.inf
        found.append(torch.log_softmax(logits, dim=0)[device].item())
        last = device
    return found


@torch.no_grad()
def test_log_probabilities_are_those_of_a_loop_over_steps() -> None:
    policy = make(barred(fork_problem(3, 3), {2: (0, 2)}), seed=1)
    placements = [[0, 1, 2, 0, 1, 2], [2, 2, 0, 1, 1, 0], [1, 0, 2, 2, 0, 1]]
    log_prob_BG, entropy_BG = policy.evaluate(np.array(placements))
    for row, devices in enumerate(placements):
        assert log_prob_BG[row].tolist() == pytest.approx(log_probs_by_hand(policy, devices), abs=1e-5)
    assert policy.log_prob(np.array(placements)).tolist() == pytest.approx(log_prob_BG.sum(1).tolist(), abs=1e-5)
    assert entropy_BG.shape == (3, 6)
    assert (entropy_BG[:, 2] <= math.log(2) + 1e-6).all()


@torch.no_grad()
def test_probabilities_of_all_placements_add_up_to_one() -> None:
    policy = make(chain_problem(4, 3))
    assert policy.log_prob(every_placement(4, 3)).exp().sum().item() == pytest.approx(1.0, abs=1e-5)


@torch.no_grad()
def test_a_group_depends_on_those_before_it_and_on_none_after() -> None:
    policy = make(chain_problem(5))
    one, other = policy.evaluate(np.array([[0, 0, 1, 0, 1], [0, 0, 1, 1, 0]]))[0]
    assert torch.equal(one[:3], other[:3])
    one, other = policy.evaluate(np.array([[0, 0, 1, 0, 1], [1, 1, 0, 0, 1]]))[0]
    assert (one[3:] - other[3:]).abs().max() > 1e-4


@torch.no_grad()
def test_samples_come_as_often_as_their_probability() -> None:
    policy, every = make(chain_problem(3)), every_placement(3, 2)
    draws = policy.sample(8000, np.random.default_rng(0))
    shares = [(draws == row).all(axis=1).mean() for row in every]
    assert shares == pytest.approx(policy.log_prob(every).exp().tolist(), abs=0.02)


@torch.no_grad()
def test_the_mode_is_the_likeliest_device_step_by_step() -> None:
    policy, mode = make(chain_problem(5, 3)), []
    for group in range(5):
        tried = [[*mode, device, *[0] * (4 - group)] for device in range(3)]
        mode.append(int(policy.evaluate(np.array(tried))[0][:, group].argmax()))
    assert policy.mode().tolist() == mode
    assert policy.mode().dtype == np.int32


@pytest.mark.parametrize("noise", [0.0, 3.0])
def test_bars_are_never_sampled(noise: float) -> None:
    policy = make(barred(chain_problem(4, 3), {1: (2,), 3: (0, 1)}))
    policy.logit_noise = noise
    draws = np.concatenate((policy.sample(2000, np.random.default_rng(0)), policy.mode()[None]))
    assert set(draws[:, 1]) == {2}
    assert set(draws[:, 3]) <= {0, 1}
    log_prob, entropy = policy.evaluate(draws[:50])
    (log_prob.sum() + entropy.sum()).backward()
    assert all(parameter.grad is None or torch.isfinite(parameter.grad).all() for parameter in policy.parameters())


def test_noise_on_the_logits_makes_unlikely_devices_come_more_often() -> None:
    policy = make(chain_problem(6))
    rare = 1 - policy.mode()
    plain = (policy.sample(3000, np.random.default_rng(0)) == rare).mean()
    policy.logit_noise = 4.0
    assert (policy.sample(3000, np.random.default_rng(0)) == rare).mean() > plain + 0.03


def test_a_new_policy_finds_every_device_as_likely() -> None:
    policy = Seq2SeqPolicy(seq2seq_inputs(chain_problem(3, 4)), seed=7)
    assert isinstance(policy, GroupPolicy)
    assert isinstance(policy, Loadable)
    assert policy.log_prob(np.array([[0, 3, 2]])).item() == pytest.approx(-3 * math.log(4), abs=1e-5)


def test_the_graph_is_encoded_once_a_batch() -> None:
    policy, calls = make(chain_problem(4)), []
    policy.network.encoder.register_forward_hook(lambda *_: calls.append(1))
    policy.evaluate(policy.sample(64))
    assert len(calls) == 2


def test_known_placements_take_one_call_of_the_decoder() -> None:
    policy, calls = make(chain_problem(4)), []
    policy.network.decoder.register_forward_hook(lambda *_: calls.append(1))
    policy.evaluate(np.zeros((64, 4), dtype=np.int32))
    assert len(calls) == 1
    policy.sample(64)
    assert len(calls) == 1 + 4


def test_the_seed_decides_weights_and_samples_and_nothing_else_does() -> None:
    def draw(seed: int) -> tuple[NDArray[np.int32], float]:
        torch.randn(3)  # other users of the global generator must not matter
        before = torch.get_rng_state()
        policy = make(chain_problem(5), seed)
        drawn = policy.sample(40), policy.log_prob(np.zeros((1, 5), dtype=np.int32)).item()
        assert torch.equal(torch.get_rng_state(), before)
        return drawn

    first, again, other = draw(3), draw(3), draw(4)
    assert np.array_equal(first[0], again[0])
    assert first[1] == again[1] != other[1]


@torch.no_grad()
def test_a_policy_takes_the_weights_that_another_one_kept(tmp_path: Path) -> None:
    problem, path = chain_problem(4, 3), tmp_path / "policy.safetensors"
    kept, other = make(problem, 1), make(problem, 2)
    kept.save(path)
    every = every_placement(4, 3)
    assert not torch.equal(kept.log_prob(every), other.log_prob(every))
    other.load(path)
    assert torch.equal(kept.log_prob(every), other.log_prob(every))


def test_weights_of_another_kind_size_or_graph_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    make(chain_problem(4)).save(path)
    with pytest.raises(FileProblem, match=r"another size: .*, expected"):
        make(chain_problem(5)).load(path)
    with pytest.raises(FileProblem, match="a problem of other types"):
        make(chain_with_a_parameter()).load(path)
    with pytest.raises(FileProblem, match="kind 'placer', but of kind 'seq2seq'"):
        make_policy(chain_problem(4), PlacerArchitecture(hidden=8)).load(path)
    make_policy(chain_problem(4), PlacerArchitecture(hidden=8)).save(path)
    with pytest.raises(FileProblem, match="kind 'seq2seq', but of kind 'placer'"):
        make(chain_problem(4)).load(path)


def chain_with_a_parameter() -> Problem:
    """Four groups like those of a chain, one of them a parameter."""
    problem = chain_problem(4)
    return replace(problem, graph=replace(problem.graph, targets=("parameter", *problem.graph.targets[1:])))


@pytest.mark.parametrize(
    "options", [{"hidden": 7}, {"hidden": 0}, {"attention": 0}, {"temperature": 0.0}, {"tanh_constant": -1.0}]
)
def test_bad_options_are_named(options: dict[str, float]) -> None:
    with pytest.raises(InvalidValue, match=next(iter(options))):
        Seq2SeqConfig(**options)  # type: ignore[arg-type]
