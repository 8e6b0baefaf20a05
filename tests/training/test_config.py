"""Options are checked before anything runs."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from rlplace.errors import InvalidValue, UnknownName
from rlplace.policy.options import LearnConfig, PPOConfig
from rlplace.training.config import AgentConfig, SearchConfig, TrainConfig
from rlplace.training.method_choice import check_names, method_of


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"track": "onlin"}, UnknownName, "online"),
        ({"budget_s": -1.0}, InvalidValue, "budget_s"),
        ({"budget_s": float("inf")}, InvalidValue, "finite"),
        ({"num_groups": 0}, InvalidValue, "num_groups"),
        ({"seed": -1}, InvalidValue, "seed"),
        ({"seed": 1.5}, InvalidValue, "seed is 1.5, expected a whole number"),
        ({"seed": "1"}, InvalidValue, "seed"),
        ({"seed": True}, InvalidValue, "seed"),
        ({"budget_s": "60"}, InvalidValue, "budget_s is '60', expected a number"),
        ({"budget_s": None}, InvalidValue, "budget_s"),
        ({"total_s": "60"}, InvalidValue, "total_s"),
        ({"total_s": 0.0}, InvalidValue, "total_s"),
        ({"total_s": 9.0, "evaluations": 9}, InvalidValue, "total_s"),
        ({"evaluations": 1.5}, InvalidValue, "evaluations"),
        ({"num_groups": "8"}, InvalidValue, "num_groups"),
    ],
)
def test_mistakes_are_named(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TrainConfig(**options)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    config = TrainConfig(seed=np.int64(3), budget_s=np.float32(2.0))  # type: ignore[arg-type]
    assert (config.seed, config.budget_s) == (3, 2.0)


@pytest.mark.parametrize(
    "options",
    [{"simulate_share": 1.5}, {"simulate_share": "all"}, {"num_calibrated": -1}, {"table_rounds": 0}],
)
def test_mistakes_of_the_search_are_named(options: dict[str, float]) -> None:
    with pytest.raises(InvalidValue, match=next(iter(options))):
        SearchConfig(**options)  # type: ignore[arg-type]


def test_learning_that_could_not_begin_is_refused() -> None:
    with pytest.raises(InvalidValue, match="share"):
        LearnConfig(init="none", share=0.0)
    with pytest.raises(InvalidValue, match="batch_size"):
        PPOConfig(batch_size=1)


@pytest.mark.parametrize(
    ("config", "nearest"),
    [
        (TrainConfig(search=SearchConfig(method="portfoli")), "portfolio"),
        (TrainConfig(learn=LearnConfig(policy="placr")), "placer"),
        (TrainConfig(learn=LearnConfig(learner="pp")), "ppo"),
        (TrainConfig(learn=LearnConfig(reward="log_speedupp")), "log_speedup"),
    ],
)
def test_mistyped_names_are_told_the_nearest(config: TrainConfig, nearest: str) -> None:
    with pytest.raises(UnknownName, match=nearest):
        check_names(config)


def test_a_policy_that_is_named_as_a_method_is_told_its_option() -> None:
    with pytest.raises(UnknownName, match=r"unknown method 'seq2seq'.*It is a policy: `--policy seq2seq`"):
        check_names(TrainConfig(search=SearchConfig(method="seq2seq")))


@pytest.mark.parametrize(
    ("config", "on_this_machine", "simulated"),
    [
        (TrainConfig(), "learned", "policy"),
        (TrainConfig(learn=LearnConfig(policy="seq2seq")), "policy", "policy"),
        (TrainConfig(learn=LearnConfig(learner="clone")), "policy", "policy"),
        (TrainConfig(learn=LearnConfig(share=0.5)), "learned", "policy"),
        (TrainConfig(search=SearchConfig(method="learned"), learn=LearnConfig(policy="seq2seq")), "learned", "policy"),
        (TrainConfig(search=SearchConfig(method="anneal"), learn=LearnConfig(policy="seq2seq")), "anneal", "anneal"),
    ],
)
def test_a_policy_or_a_learner_that_is_named_is_what_runs(
    config: TrainConfig, on_this_machine: str, simulated: str
) -> None:
    assert method_of(config, is_simulated=False) == on_this_machine
    assert method_of(config, is_simulated=True) == simulated


def test_what_does_not_fit_is_refused_where_it_would_learn() -> None:
    unfit = LearnConfig(policy="seq2seq", init="pretrained")  # its weights serve one problem: none come with rlplace
    with pytest.raises(UnknownName, match="seq2seq"):
        check_names(TrainConfig(learn=unfit))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TrainConfig(search=SearchConfig(method="anneal"), learn=LearnConfig(init="pretrained")), "learn is 'init'"),
        (TrainConfig(learn=LearnConfig(ppo=PPOConfig(flips=3.0))), "learn is 'ppo', expected none with method learned"),
        (TrainConfig(search=SearchConfig(method="policy"), agent=AgentConfig(batch=5)), "agent is 'batch'"),
        (TrainConfig(search=SearchConfig(num_calibrated=1)), "num_calibrated is 1, expected at least 2, or 0"),
        (
            TrainConfig(search=SearchConfig(num_calibrated=3), is_traced=False),
            "num_calibrated is 3, expected at least 6, or 0",
        ),
    ],
)
def test_options_that_the_method_does_not_have_are_refused(config: TrainConfig, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        check_names(config)


def test_a_simulated_host_takes_the_options_of_a_measured_one() -> None:
    """`policy` takes the place of `learned` there, which is said: the same command runs on both."""
    check_names(TrainConfig(agent=AgentConfig(batch=5), learn=LearnConfig(share=0.5)), is_simulated=True)


@pytest.mark.parametrize("named", [{"policy": "gnn"}, {"learner": "clone"}])
@pytest.mark.parametrize("method", ["anneal", "learned"])
def test_a_policy_for_a_method_that_learns_none_is_refused(method: str, named: dict[str, str]) -> None:
    config = TrainConfig(search=SearchConfig(method=method), learn=LearnConfig(**named))
    ((field, value),) = named.items()
    with pytest.raises(InvalidValue, match=f"{field} is '{value}', expected none with method {method}"):
        check_names(config)


def test_the_options_of_a_command_line_import_no_torch() -> None:
    code = "import sys, rlplace.training.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
