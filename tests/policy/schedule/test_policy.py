"""`SchedulePolicy`: decides group by group; its log-probabilities are those of its decisions."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from permuted_devices import permuted
from random_problems import plain_host, random_problem
from search_problems import barred, chain_problem, fork_problem, tight_problem

from rlplace.env import SequentialBatch
from rlplace.env.sequential import FIRST_WEIGHTS
from rlplace.errors import FileProblem
from rlplace.measure.problem import Problem
from rlplace.policy.base import GroupPolicy
from rlplace.policy.options import ScheduleConfig
from rlplace.policy.schedule import LOG_PROB_BARRED, SchedulePolicy
from rlplace.policy.schedule_network import ScheduleNetwork, new_network
from rlplace.search.schedule.partial_schedule import Greedy


def shaken(seed: int = 0, scale: float = 0.5) -> ScheduleNetwork:
    """A network of which no weight is 0."""
    network = new_network(ScheduleConfig(hidden=8), seed=seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=draw))
    return network


def policy_of(problem: Problem, network: ScheduleNetwork | None = None, **options: float) -> SchedulePolicy:
    return SchedulePolicy(problem, network or new_network(), ScheduleConfig(**options), seed=0)  # type: ignore[arg-type]


def test_it_begins_as_the_list_scheduler() -> None:
    own = next(weights for name, weights in FIRST_WEIGHTS if name == "own")
    for seed in range(5):
        problem = fork_problem(seed, num_devices=3)
        assert policy_of(problem).mode().tolist() == Greedy.of(problem).place(np.array(own))[0].tolist()


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_a_replayed_placement_has_the_log_probability_of_its_decisions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, int(rng.integers(2, 10)))
    policy = policy_of(problem, shaken(seed))
    rows = problem.draw_groups(rng, 3)
    log_prob, entropy = policy.evaluate(rows)
    order = policy.order()
    for row in range(3):
        episode, stepwise = SequentialBatch(problem, 1, order=order), np.zeros(problem.grouping.num_groups)
        spread = np.zeros_like(stepwise)
        while not episode.is_done:
            seen = episode.observe()
            group = int(seen.group[0])
            logits = policy._scores(torch.from_numpy(seen.features), torch.from_numpy(seen.group))[0].detach()
            logits = logits.masked_fill(~torch.from_numpy(seen.mask[0]), -torch.inf)
            probability = torch.softmax(logits, -1)
            device = rows[row, group]
            stepwise[group] = probability[device].log() if seen.mask[0, device] else LOG_PROB_BARRED
            spread[group] = torch.special.entr(probability).sum()
            episode.step(np.array([device]))
        assert log_prob[row].detach().numpy() == pytest.approx(stepwise, abs=1e-4)
        assert entropy[row].detach().numpy() == pytest.approx(spread, abs=1e-4)


def test_gradients_reach_what_scores_devices() -> None:
    network = shaken()
    policy = policy_of(fork_problem(0), network)
    policy.log_prob(np.zeros((2, 6), dtype=np.int64)).sum().backward()
    assert network.correction[0].weight.grad.abs().sum() > 0
    assert network.hyper.weight.grad.abs().sum() > 0


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6))
def test_no_sample_is_where_memory_or_a_pin_bars_it(seed: int) -> None:
    problem = tight_problem(6, 2, seed % 100)
    problem = barred(problem, {6: (1,), 0: (1,)})
    policy = policy_of(problem, shaken(seed))
    episode, rows = SequentialBatch(problem, 16, order=policy.order()), policy.sample(16)
    while not episode.is_done:
        seen = episode.observe()
        chosen = rows[np.arange(16), seen.group]
        assert seen.mask[np.arange(16), chosen].all()
        episode.step(chosen)
    assert (rows[:, 0] == 1).all()


def test_a_known_placement_that_an_estimate_of_memory_bars_can_be_learned_from() -> None:
    problem = tight_problem(6, 2)
    policy = policy_of(problem)
    everything_on_one = np.zeros((1, problem.grouping.num_groups), dtype=np.int64)
    log_prob = policy.log_prob(everything_on_one)
    assert torch.isfinite(log_prob).all()
    assert log_prob.item() < LOG_PROB_BARRED / 2


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6))
def test_permuting_devices_permutes_the_placement(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = fork_problem(seed % 1000, num_devices=3)
    order = rng.permutation(3)
    network = shaken(seed)
    mode, turned = policy_of(problem, network).mode(), policy_of(permuted(problem, order.tolist()), network).mode()
    assert order[turned].tolist() == mode.tolist()


def test_learned_priorities_change_the_order_and_nothing_else_does() -> None:
    problem = fork_problem(0)
    assert policy_of(problem).order() is None
    policy = policy_of(problem, shaken())
    order = policy.order()
    assert order is not None
    first = int(SequentialBatch(problem, 1, order=order).observe().group[0])
    assert first == int(np.argmax(order))


def test_the_seed_and_a_generator_decide_on_samples() -> None:
    problem = fork_problem(0)
    first, same = policy_of(problem), policy_of(problem)
    assert first.sample(5).tolist() == same.sample(5).tolist()
    drawn = first.sample(5, np.random.default_rng(7)).tolist()
    assert drawn == same.sample(5, np.random.default_rng(7)).tolist()


def test_the_temperature_says_how_many_groups_differ_from_the_mode() -> None:
    """As long as it flips few: what is flipped early changes what is likely later."""
    policy = policy_of(random_problem(np.random.default_rng(3), 24, plain_host(3)), shaken())
    flips = []
    for wanted in (0.05, 12.0):
        policy.set_flips(wanted)
        flips.append(float((policy.sample(300) != policy.mode()).any(axis=1).mean()))
    assert flips[0] < 0.3 < 0.9 < flips[1]


def test_weights_of_one_problem_are_loaded_into_another(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    network = shaken(4)
    policy_of(fork_problem(0), network).save(path)
    other = policy_of(chain_problem(5, 4))
    other.load(path)
    expected = policy_of(chain_problem(5, 4), network)
    assert other.mode().tolist() == expected.mode().tolist()
    rows = np.zeros((1, 5), dtype=np.int64)
    assert other.log_prob(rows).item() == pytest.approx(expected.log_prob(rows).item(), rel=1e-6)
    assert isinstance(other, GroupPolicy)


def test_a_file_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "policy.safetensors"
    policy_of(fork_problem(0)).save(path)
    text = path.with_suffix(".json").read_text().replace('"twin"', '"twins"')
    path.with_suffix(".json").write_text(text)
    with pytest.raises(FileProblem, match="features are not those of this version"):
        policy_of(fork_problem(0)).load(path)


def test_a_network_may_be_shared() -> None:
    network = shaken()
    policies = [policy_of(fork_problem(seed), network) for seed in range(2)]
    with torch.no_grad():
        network.correction[2].bias.add_(1.0)
    assert policies[0].network is policies[1].network
    assert dict(policies[0].named_parameters()).keys() == dict(policies[1].named_parameters()).keys()


def test_memory_of_devices_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = fork_problem(0)
    small = dataclasses.replace(
        problem.host, devices=tuple(dataclasses.replace(device, memory_bytes=4000) for device in problem.host.devices)
    )
    tight = dataclasses.replace(problem, host=small)
    network = shaken()
    rows = np.zeros((1, 6), dtype=np.int64)
    assert policy_of(problem, network).log_prob(rows).item() != policy_of(tight, network).log_prob(rows).item()
