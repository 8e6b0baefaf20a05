"""What goes with a policy and a learner where the user leaves it open."""

from __future__ import annotations

import pytest

from rlplace.errors import InvalidValue, UnknownName
from rlplace.policy import LearnConfig
from rlplace.policy.options import Recipe


def test_nothing_named_is_the_placer_beside_search() -> None:
    assert LearnConfig().recipe == Recipe("placer", "ppo", "log_speedup", "starts", 0.05, 8)


def test_seq2seq_is_the_recipe_of_2017() -> None:
    assert LearnConfig(policy="seq2seq").recipe == Recipe("seq2seq", "reinforce", "sqrt", "none", 1.0, 1, 16)


def test_the_reward_and_what_is_measured_go_with_the_learner() -> None:
    assert LearnConfig(learner="reinforce").recipe == Recipe("placer", "reinforce", "sqrt", "starts", 0.05, 1)
    assert LearnConfig(policy="seq2seq", learner="ppo").recipe.reward == "log_speedup"


def test_policies_whose_networks_fit_any_problem_learn_from_fewer_samples_at_once() -> None:
    for name in ("gnn", "improver"):
        assert LearnConfig(policy=name).recipe == Recipe(name, "ppo", "log_speedup", "starts", 1.0, 8, num_samples=16)
    assert LearnConfig(policy="gnn", num_samples=5).recipe.num_samples == 5


def test_what_is_chosen_stays() -> None:
    chosen = LearnConfig("seq2seq", "reinforce", reward="log_speedup", init="starts", share=0.0, screened=4)
    assert chosen.recipe == Recipe("seq2seq", "reinforce", "log_speedup", "starts", 0.0, 4, 16)


def test_policies_of_others_go_by_the_defaults() -> None:
    assert LearnConfig(policy="mine", learner="own").recipe == Recipe("mine", "own")


def test_a_file_of_weights_is_named_by_its_ending() -> None:
    assert LearnConfig(init="runs/one/policy.safetensors").recipe.init == "runs/one/policy.safetensors"
    with pytest.raises(UnknownName, match=r"pretrained.*FILE\.safetensors"):
        LearnConfig(init="pretraind")


def test_what_could_not_begin_is_refused_wherever_it_comes_from() -> None:
    with pytest.raises(InvalidValue, match="share"):
        LearnConfig(policy="seq2seq", share=0.0)  # its own start is none
    with pytest.raises(InvalidValue, match="screened"):
        LearnConfig(screened=0)
