"""Weights that a policy begins with, and those that it cannot."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_measurer import chain_problem
from search_problems import barred

from rlplace.errors import FileProblem, InvalidValue, UnknownName
from rlplace.policy import LEARNERS, POLICIES, LearnConfig, PlacerArchitecture, Seq2SeqConfig
from rlplace.policy.policies import check_fit, checked_policy

SMALL = {
    "placer": PlacerArchitecture(hidden=8, num_layers=1),
    "seq2seq": Seq2SeqConfig(hidden=8, type_embedding=4, device_embedding=4, attention=4),
}
PROBLEM = chain_problem(4)
TEACHER = np.array([0, 1, 1, 0])


def config(policy: str, learner: str | None = None, init: str | None = None) -> LearnConfig:
    return LearnConfig(policy=policy, learner=learner, init=init, **SMALL)  # type: ignore[arg-type]


@pytest.fixture(params=["placer", "seq2seq"])
def taught(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """The name of a policy, and the file of one that was taught."""
    name, path = str(request.param), tmp_path / "policy.safetensors"
    policy = checked_policy(PROBLEM, config(name), 0).policy
    LEARNERS["reinforce"](policy, config(name), 0).imitate(TEACHER)
    policy.save(path)
    return name, path


def test_a_policy_begins_where_the_file_ends(taught: tuple[str, Path]) -> None:
    name, path = taught
    check_fit(config(name, init=str(path)))
    policy = checked_policy(PROBLEM, config(name, init=str(path)), 5)
    assert policy.mode().tolist() == TEACHER.tolist()


def test_a_placer_keeps_what_it_knows_of_its_own_problem(tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    checked_policy(PROBLEM, config("placer"), 0).policy.save(path)
    other = barred(chain_problem(4), {1: (0,)})
    begun = checked_policy(other, config("placer", init=str(path)), 0).policy
    assert begun.sample(200)[:, 1].max() == 0
    begun = checked_policy(PROBLEM, config("placer", init=str(path)), 0).policy
    assert begun.sample(200)[:, 1].max() == 1


def test_a_file_of_another_kind_is_refused_before_there_is_a_problem(taught: tuple[str, Path]) -> None:
    name, path = taught
    other = {"placer": "seq2seq", "seq2seq": "placer"}[name]
    with pytest.raises(FileProblem, match=f"kind '{other}', but of kind '{name}'"):
        check_fit(config(other, init=str(path)))


def test_a_file_of_another_size_is_refused(taught: tuple[str, Path]) -> None:
    name, path = taught
    with pytest.raises(FileProblem, match="another size"):
        checked_policy(chain_problem(5), config(name, init=str(path)), 0)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match="no such file"):
        check_fit(config("placer", init=str(tmp_path / "policy.safetensors")))


def test_there_are_no_pretrained_weights_for_one_problem() -> None:
    with pytest.raises(UnknownName, match="seq2seq"):
        check_fit(config("seq2seq", init="pretrained"))


def test_what_does_not_fit_is_refused_before_there_is_a_problem() -> None:
    coin = SimpleNamespace(num_groups=2, num_devices=2, sample=None, log_prob=None, mode=None, save=None)
    POLICIES.register("coin", lambda problem, config, seed: coin)  # type: ignore[arg-type, return-value]
    try:
        for learner in LEARNERS:
            with pytest.raises(InvalidValue, match=f"learner {learner}: policy is 'SimpleNamespace'"):
                check_fit(config("coin", learner))
    finally:
        POLICIES.unregister("coin")


@pytest.mark.parametrize("learner", ["ppo", "reinforce", "clone"])
@pytest.mark.parametrize("policy", ["placer", "seq2seq", "gnn", "improver"])
def test_pairs_that_fit_pass(policy: str, learner: str) -> None:
    check_fit(config(policy, learner))
