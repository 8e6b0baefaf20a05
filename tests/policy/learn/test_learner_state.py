"""A learner that is stopped, kept in files and gone on with equals one that was never stopped, to the bit."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from search_problems import fork_problem

from rlplace.env.rewards import make_reward
from rlplace.errors import FileProblem, InvalidValue
from rlplace.measure.simulate.simulator import Simulator
from rlplace.policy import (
    LEARNERS,
    POLICIES,
    CloneConfig,
    GnnConfig,
    ImproverConfig,
    LearnConfig,
    Learner,
    PlacerArchitecture,
    Policy,
    PPOConfig,
    Reinforce,
    ReinforceConfig,
    Seq2SeqConfig,
    resume_learner,
    save_learner,
)
from rlplace.policy.learn.learners import Resumable

PROBLEM = fork_problem(0)
SIMULATOR = Simulator(PROBLEM, threads=1)
REWARD = make_reward("sqrt", 10.0)
SMALL = LearnConfig(
    placer=PlacerArchitecture(hidden=8, num_layers=1),
    gnn=GnnConfig(hidden=8),
    improver=ImproverConfig(hidden=8),
    seq2seq=Seq2SeqConfig(hidden=8, type_embedding=4, device_embedding=4, attention=4),
    ppo=PPOConfig(batch_size=5, num_elites=3),
    clone=CloneConfig(num_elites=3),
    reinforce=ReinforceConfig(logit_noise=0.3, noise_until=0.3),
)
PAIRS = [
    *(("placer", "ppo"), ("placer", "clone"), ("placer", "reinforce"), ("seq2seq", "reinforce")),
    *(("gnn", "ppo"), ("improver", "ppo"), ("improver", "reinforce"), ("schedule", "ppo")),
]


def make(policy: str, learner: str, seed: int) -> tuple[Policy, Learner]:
    config = dataclasses.replace(SMALL, policy=policy, learner=learner)
    made = POLICIES[policy](PROBLEM, config, seed)
    return made, LEARNERS[learner](made, config, seed)


def run(policy: Policy, learner: Learner, *, first: int, last: int) -> list[dict[str, float]]:
    figures = []
    for update in range(first, last):
        rows = policy.sample(16)
        rewards = REWARD(SIMULATOR.step_times(PROBLEM.grouping.expand(rows)))
        figures.append(learner.update(rows, rewards, progress=update / 20))
    return figures


@pytest.mark.slow
@pytest.mark.parametrize(("policy_name", "learner_name"), PAIRS)
def test_a_resumed_learner_equals_a_straight_one(policy_name: str, learner_name: str, tmp_path: Path) -> None:
    straight, learner = make(policy_name, learner_name, seed=3)
    run(straight, learner, first=0, last=4)
    assert isinstance(learner, Resumable)
    save_learner(tmp_path / "learner.safetensors", learner)
    expected = run(straight, learner, first=4, last=8)

    resumed, again = make(policy_name, learner_name, seed=8)
    assert isinstance(again, Resumable)
    resume_learner(tmp_path / "learner.safetensors", again)
    assert run(resumed, again, first=4, last=8) == expected
    assert np.array_equal(resumed.sample(20), straight.sample(20))
    assert isinstance(resumed, torch.nn.Module)
    assert isinstance(straight, torch.nn.Module)
    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_keeping_a_state_changes_nothing(tmp_path: Path) -> None:
    def figures(*, is_kept: bool) -> list[dict[str, float]]:
        policy, learner = make("seq2seq", "reinforce", seed=1)
        run(policy, learner, first=0, last=3)
        if is_kept:
            assert isinstance(learner, Resumable)
            save_learner(tmp_path / "learner.safetensors", learner)
        return run(policy, learner, first=3, last=6)

    assert figures(is_kept=True) == figures(is_kept=False)


def test_the_state_of_another_learner_or_policy_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "learner.safetensors"
    _, learner = make("placer", "ppo", 0)
    assert isinstance(learner, Resumable)
    save_learner(path, learner)
    _, clone = make("placer", "clone", 0)
    assert isinstance(clone, Resumable)
    with pytest.raises(FileProblem, match="state of a GroupPPO, expected of a CloneLearner"):
        resume_learner(path, clone)
    _, reinforce = make("placer", "reinforce", 0)
    assert isinstance(reinforce, Resumable)
    save_learner(path, reinforce)
    _, other = make("seq2seq", "reinforce", 0)
    assert isinstance(other, Resumable)
    with pytest.raises(FileProblem, match="not the state of this learner and its policy"):
        resume_learner(path, other)


def twisted(state: torch.Tensor) -> torch.Tensor:
    """A generator's state from which PyTorch would draw behind its numbers."""
    data = bytearray(state.numpy().tobytes())
    struct.pack_into("=QiiQ", data, 0, 1, 624, 1, 624)
    return torch.tensor(list(data), dtype=torch.uint8)


STRANGE: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "elites out of range": ("elites.group_devices", lambda rows: rows + 5),
    "elites below 0": ("elites.group_devices", lambda rows: rows - 1),
    "elites of other groups": ("elites.group_devices", lambda rows: rows[:, :-1].contiguous()),
    "elites without rewards": ("elites.rewards", lambda rewards: rewards[:0]),
    "a reward that is none": ("elites.rewards", lambda rewards: rewards * math.nan),
    "a placement that came less than never": ("elites.counts", lambda counts: counts * 0 - 1),
    "a generator behind its end": ("generator", twisted),
    "a weight that is none": ("policy.temperature", lambda value: value * math.nan),
    "a start out of range": ("policy.start", lambda start: start + 7),
    "a moment of another shape": ("optimizer.0.exp_avg", lambda moment: torch.zeros(3, 5, 7)),
}


@pytest.mark.parametrize("what", STRANGE)
def test_a_state_that_would_break_later_is_refused_at_once(what: str, tmp_path: Path) -> None:
    path, (name, change) = tmp_path / "learner.safetensors", STRANGE[what]
    policy, learner = make("improver" if name.endswith("start") else "placer", "ppo", 0)
    run(policy, learner, first=0, last=2)
    assert isinstance(learner, Resumable)
    save_learner(path, learner)
    tensors = load_file(path)
    save_file({**tensors, name: change(tensors[name])}, path)
    with pytest.raises(FileProblem, match="not the state of this learner and its policy"):
        resume_learner(path, learner)


def test_components_of_a_policy_are_not_taken_from_a_state(tmp_path: Path) -> None:
    path = tmp_path / "learner.safetensors"
    policy, learner = make("schedule", "ppo", 0)
    assert isinstance(policy, torch.nn.Module)
    assert isinstance(learner, Resumable)
    before = policy.get_buffer("network.grouping").clone()
    save_learner(path, learner)
    save_file({**load_file(path), "policy.network.grouping": before + 100}, path)
    resume_learner(path, learner)
    assert torch.equal(policy.get_buffer("network.grouping"), before)


@pytest.mark.parametrize(("policy", "named"), [("seq2seq", "allowed"), ("placer", "edge_source")])
def test_a_state_holds_nothing_of_the_problem(policy: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "learner.safetensors"
    _, learner = make(policy, "reinforce", 0)
    assert isinstance(learner, Resumable)
    save_learner(path, learner)
    tensors = load_file(path)
    assert not [name for name in tensors if name.endswith(("allowed", "adjacency", "edge_source", "group_cost"))]
    save_file({**tensors, f"policy.{named}": torch.ones(1, dtype=torch.bool)}, path)
    with pytest.raises(FileProblem, match="not the state of this learner and its policy"):
        resume_learner(path, learner)


def test_a_policy_without_a_generator_cannot_be_kept() -> None:
    policy, _ = make("seq2seq", "reinforce", 0)
    del policy.generator  # type: ignore[attr-defined]
    with pytest.raises(InvalidValue, match="generator"):
        Reinforce(policy).state()
