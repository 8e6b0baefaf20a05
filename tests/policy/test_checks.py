"""What another package's policy or learner gets wrong is told by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_measurer import TimingMeasurer, chain_problem
from search_problems import barred

from rlplace.errors import InvalidValue
from rlplace.policy import LEARNERS, POLICIES, LearnConfig
from rlplace.policy.policies import CheckedPolicy, checked_learner, checked_policy
from rlplace.search.task import Budget, Task
from rlplace.training.policy_methods import search_by_policy

PROBLEM = chain_problem(3)
Register = Callable[[Any, Any], LearnConfig]


class ConstantPolicy:
    """Everything on device 0, for ever."""

    num_groups, num_devices = 3, 2

    def sample(self, num_samples: int, rng: np.random.Generator | None = None) -> Any:
        return np.zeros((num_samples, 3), dtype=np.int32)

    def log_prob(self, group_devices: Any) -> Any:
        return torch.zeros(len(group_devices))

    def mode(self) -> Any:
        return np.zeros(3, dtype=np.int32)

    def save(self, path: Path) -> None:
        pass


class IdleLearner:
    """Learns nothing, and says what it was given to say."""

    def __init__(self, figures: object) -> None:
        self.figures = figures

    def imitate(self, group_devices: Any) -> None:
        pass

    def update(self, group_devices: Any, rewards: Any, *, progress: float = 0.0) -> Any:
        return self.figures

    def forget(self) -> None:
        pass


@pytest.fixture
def register() -> Iterator[Register]:
    def both(policy: Any, learner: Any) -> LearnConfig:
        POLICIES.register("mine", lambda problem, config, seed: policy)
        LEARNERS.register("mine", lambda policy, config, seed: learner)
        return LearnConfig(policy="mine", learner="mine", init="none", share=1.0, num_samples=4)

    yield both
    POLICIES.unregister("mine")
    LEARNERS.unregister("mine")


def changed(function: str, answer: Any) -> ConstantPolicy:
    policy = ConstantPolicy()
    setattr(policy, function, lambda *arguments: answer)
    return policy


def task() -> Task:
    return Task(PROBLEM, TimingMeasurer(PROBLEM, wanted=[0, 0, 0]), Budget(evaluations=20))


def test_what_is_right_is_passed_on_as_int32() -> None:
    policy = CheckedPolicy(changed("sample", np.array([[0, 1, 1], [1, 0, 1]])), "mine", PROBLEM)
    assert policy.sample(2).tolist() == [[0, 1, 1], [1, 0, 1]]
    assert policy.sample(2).dtype == np.int32
    policy.check_guess()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (np.zeros((4, 5), dtype=int), r"shape is \(4, 5\), expected \(4, 3\)"),
        (np.zeros(3, dtype=int), r"shape is \(3,\), expected \(4, 3\)"),
        (np.zeros((2, 3), dtype=int), r"shape is \(2, 3\), expected \(4, 3\)"),
        (None, r"shape is \(\), expected \(4, 3\)"),
        (np.full((4, 3), np.nan), "dtype is 'float64', expected integers"),
        (np.full((4, 3), 2), r"device is 2, expected 0\.\.1"),
    ],
)
def test_samples_that_are_no_placements(register: Register, answer: Any, words: str) -> None:
    config = register(changed("sample", answer), IdleLearner({}))
    with pytest.raises(InvalidValue, match=f"policy 'mine': sample: {words}"):
        search_by_policy(task(), config)


def test_a_device_that_pins_bar() -> None:
    pinned = barred(chain_problem(3), {1: (1,)})
    policy = CheckedPolicy(changed("sample", np.array([[0, 1, 0], [0, 0, 0]])), "mine", pinned)
    with pytest.raises(InvalidValue, match=r"sample: device is '0 for group 1', expected one of \[1\], "):
        policy.sample(2)
    assert CheckedPolicy(changed("mode", np.array([0, 1, 0])), "mine", pinned).mode().tolist() == [0, 1, 0]


def test_weights_that_became_nan(register: Register) -> None:
    config = register(changed("log_prob", torch.tensor([float("nan")])), IdleLearner({}))
    with pytest.raises(InvalidValue, match=r"policy 'mine': log_prob: value is nan.*learning rate"):
        search_by_policy(task(), config)


@pytest.mark.parametrize(
    ("function", "answer", "words"),
    [
        ("mode", np.zeros((1, 3), dtype=int), r"mode: shape is \(1, 3\), expected \(3,\)"),
        ("log_prob", torch.zeros(1, 3), r"log_prob: shape is \(1, 3\), expected \(1,\)"),
    ],
)
def test_a_guess_of_the_wrong_shape(function: str, answer: Any, words: str) -> None:
    with pytest.raises(InvalidValue, match=words):
        CheckedPolicy(changed(function, answer), "mine", PROBLEM).check_guess()


def test_what_is_no_policy_or_no_learner(register: Register) -> None:
    config = register(IdleLearner({}), ConstantPolicy())
    with pytest.raises(InvalidValue, match=r"policy 'mine': type is 'IdleLearner without num_groups, .*save'"):
        checked_policy(PROBLEM, config, 0)
    with pytest.raises(InvalidValue, match=r"learner 'mine': .* without imitate, update, forget"):
        checked_learner(ConstantPolicy(), config, 0)


def test_a_policy_of_another_size(register: Register) -> None:
    config = register(ConstantPolicy(), IdleLearner({}))
    with pytest.raises(InvalidValue, match=r"num_devices\) is \(3, 2\), expected \(4, 2\)"):
        checked_policy(chain_problem(4), config, 0)


def test_figures_that_are_none(register: Register) -> None:
    config = register(ConstantPolicy(), IdleLearner(None))
    with pytest.raises(InvalidValue, match="learner 'mine': update: value is None, expected figures by name"):
        search_by_policy(task(), config)
