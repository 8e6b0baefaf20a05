"""Policies learn a tiny problem to its optimum, with every learner that is made for them."""

from __future__ import annotations

import pytest
from search_problems import brute_force_s, fork_problem

from rlplace.measure.simulate.simulator import Simulator
from rlplace.policy import LEARNERS, POLICIES, LearnConfig, PPOConfig, ReinforceConfig

CONFIG = LearnConfig(ppo=PPOConfig(flips=1.5), reinforce=ReinforceConfig(learning_rate=3e-3))
PAIRS = [
    *(("placer", "ppo"), ("placer", "reinforce"), ("gnn", "ppo"), ("improver", "ppo"), ("improver", "reinforce")),
    ("schedule", "ppo"),
]


@pytest.mark.parametrize(("policy_name", "learner_name"), PAIRS)
def test_the_best_of_all_placements_is_learned(policy_name: str, learner_name: str) -> None:
    problem = fork_problem(0, num_devices=3)
    simulator, best_s = Simulator(problem, threads=1), brute_force_s(problem)
    policy = POLICIES[policy_name](problem, CONFIG, 0)
    learner = LEARNERS[learner_name](policy, CONFIG, 0)
    for turn in range(80):
        rows = policy.sample(16)
        learner.update(rows, -simulator.step_times(rows), progress=turn / 80)
    assert simulator.step_times(policy.mode()[None])[0] == pytest.approx(best_s, rel=1e-9)
