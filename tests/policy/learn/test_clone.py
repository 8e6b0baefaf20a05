"""`CloneLearner`: the best placements seen are what the policy comes to propose."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from fake_measurer import TimingMeasurer, chain_problem

from rlplace.errors import InvalidValue
from rlplace.policy import CloneConfig, CloneLearner, PlacerArchitecture, make_policy

SMALL = PlacerArchitecture(hidden=8, num_layers=1)


def test_it_finds_the_best_of_all_placements() -> None:
    measurer = TimingMeasurer(chain_problem(5), wanted=[0, 1, 1, 0, 1])
    policy = make_policy(measurer.problem, SMALL, seed=1)
    learner = CloneLearner(policy, CloneConfig(num_elites=1))
    every = np.array(list(itertools.product(range(2), repeat=5)), dtype=np.int32)
    assert measurer.step_times(every).min() == 1.0
    for _ in range(60):
        rows = policy.sample(8)
        figures = learner.update(rows, -measurer.step_times(rows))
    assert policy.mode().tolist() == [0, 1, 1, 0, 1]
    assert figures["best_reward"] == -1.0


def test_forgetting_lets_new_rewards_decide() -> None:
    policy = make_policy(chain_problem(3), SMALL, seed=0)
    learner = CloneLearner(policy, CloneConfig(num_elites=1))
    learner.update(np.array([[0, 0, 0]]), np.array([9.0]))
    learner.forget()
    for _ in range(60):
        learner.update(np.array([[1, 1, 0]]), np.array([-5.0]))
    assert policy.mode().tolist() == [1, 1, 0]


def test_imitation_comes_first() -> None:
    policy = make_policy(chain_problem(4, num_devices=3), SMALL, seed=0)
    CloneLearner(policy).imitate(np.array([2, 0, 1, 2]))
    assert policy.mode().tolist() == [2, 0, 1, 2]


@pytest.mark.parametrize("options", [{"num_elites": 0}, {"num_steps": 0}, {"learning_rate": 0.0}, {"flips": -1.0}])
def test_bad_options_are_named(options: dict[str, float]) -> None:
    with pytest.raises(InvalidValue, match=next(iter(options))):
        CloneConfig(**options)  # type: ignore[arg-type]
