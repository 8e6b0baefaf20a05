"""`POLICIES` and `LEARNERS`: what they make keeps the protocols, and takes its options."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_measurer import chain_problem

from rlplace.errors import InvalidValue, UnknownName
from rlplace.policy import LEARNERS, POLICIES, GroupPPO, LearnConfig, Learner, PlacerArchitecture, Policy, PPOConfig
from rlplace.policy.options import CloneConfig

SMALL = LearnConfig(
    placer=PlacerArchitecture(hidden=8, num_layers=1),
    ppo=PPOConfig(flips=0.5, n_epochs=7),
    clone=CloneConfig(flips=0.5),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy_keeps_the_protocol(name: str, tmp_path: Path) -> None:
    policy = POLICIES[name](chain_problem(3), SMALL, 0)
    assert isinstance(policy, Policy)
    assert (policy.num_groups, policy.num_devices) == (3, 2)
    every = np.array(list(itertools.product(range(2), repeat=3)), dtype=np.int32)
    assert policy.log_prob(every).exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    assert policy.mode().shape == (3,)
    draws = policy.sample(4000, np.random.default_rng(0))
    share = (draws == every[5]).all(axis=1).mean()
    assert share == pytest.approx(policy.log_prob(every[5:6]).exp().item(), abs=0.03)
    policy.save(tmp_path / "policy.safetensors")
    assert (tmp_path / "policy.safetensors").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.parametrize("policy_name", list(POLICIES))
@pytest.mark.parametrize("name", list(LEARNERS))
def test_every_learner_makes_rewarded_placements_likelier(name: str, policy_name: str) -> None:
    policy = POLICIES[policy_name](chain_problem(4), SMALL, 0)
    learner = LEARNERS[name](policy, SMALL, 0)
    assert isinstance(learner, Learner)
    good, bad = np.array([[0, 1, 1, 0]]), np.array([[1, 1, 0, 1]])
    learner.imitate(bad[0])
    assert policy.mode().tolist() == bad[0].tolist()
    with torch.no_grad():
        before = policy.log_prob(good).item()
    for _ in range(5):
        figures = learner.update(np.concatenate((good, bad)), np.array([1.0, -1.0]), progress=0.5)
    with torch.no_grad():
        assert policy.log_prob(good).item() > before
    assert all(np.isfinite(value) for value in figures.values())
    learner.forget()


def test_options_reach_the_learner() -> None:
    policy = POLICIES["placer"](chain_problem(3), SMALL, 0)
    learner = LEARNERS["ppo"](policy, SMALL, 0)
    assert isinstance(learner, GroupPPO)
    assert (learner.config.n_epochs, learner.config.flips) == (7, 0.5)


@pytest.mark.parametrize("name", ["ppo", "clone"])
def test_a_learner_that_needs_log_probabilities_by_group_says_so(name: str) -> None:
    class Coin:
        pass

    with pytest.raises(InvalidValue, match=r"Coin.*`evaluate`"):
        LEARNERS[name](Coin(), SMALL, 0)  # type: ignore[arg-type]


def test_a_mistyped_name_is_told_the_nearest() -> None:
    with pytest.raises(UnknownName, match="placer"):
        POLICIES["placr"]
    with pytest.raises(UnknownName, match="ppo"):
        LEARNERS["pp0"]


@pytest.mark.parametrize(
    ("options", "named"),
    [({"share": 1.5}, "share"), ({"num_samples": 0}, "num_samples"), ({"init": "start"}, "starts")],
)
def test_bad_options_are_named(options: dict[str, object], named: str) -> None:
    with pytest.raises((InvalidValue, UnknownName), match=named):
        LearnConfig(**options)  # type: ignore[arg-type]
