"""Policies learn a tiny problem to its optimum, with every learner."""

from __future__ import annotations

import numpy as np
import pytest
from search_problems import brute_force_s, fork_problem

from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.policy import LEARNERS, POLICIES, CloneConfig, LearnConfig, PPOConfig, ReinforceConfig
from rlplace.search.methods import find
from rlplace.search.task import Budget

SAMPLES = 16
PPO = LearnConfig(ppo=PPOConfig(flips=1.5))
REINFORCE = LearnConfig(reinforce=ReinforceConfig(learning_rate=3e-3))
KEPT_TRYING = LearnConfig(reinforce=ReinforceConfig(flips=1.5, elite_coef=1.0))
"""For what becomes sure of a placement that no single move improves, of which this problem has 20."""
KEPT_NOISY = LearnConfig(reinforce=ReinforceConfig(logit_noise=1.0, noise_until=1.0, elite_coef=1.0))
"""The same for a policy that has noise instead of flips."""
CASES = [
    *(("placer", "ppo", PPO, 80), ("gnn", "ppo", PPO, 80), ("improver", "ppo", PPO, 80), ("schedule", "ppo", PPO, 80)),
    *(("placer", "reinforce", REINFORCE, 80), ("improver", "reinforce", REINFORCE, 80)),
    *(("gnn", "reinforce", KEPT_TRYING, 80), ("seq2seq", "reinforce", KEPT_NOISY, 120)),
]


def mode_s(policy: str, learner: str, config: LearnConfig, problem: Problem, updates: int) -> float:
    """The step time of a policy's mode after it has learned from its own samples."""
    simulator = Simulator(problem, threads=1)
    learned = POLICIES[policy](problem, config, 0)
    teacher = LEARNERS[learner](learned, config, 0)
    for turn in range(updates):
        rows = learned.sample(SAMPLES)
        teacher.update(rows, -simulator.step_times(rows), progress=turn / updates)
    return float(simulator.step_times(learned.mode()[None])[0])


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "learner", "config", "updates"), CASES)
def test_the_best_of_all_placements_is_learned(policy: str, learner: str, config: LearnConfig, updates: int) -> None:
    problem = fork_problem(0, num_devices=3)
    assert mode_s(policy, learner, config, problem, updates) == pytest.approx(brute_force_s(problem), rel=1e-9)


@pytest.mark.slow
def test_seq2seq_leaves_a_placement_that_no_single_move_improves() -> None:
    problem = fork_problem(1, num_devices=3)  # with the paper's options alone it stays at 1.005 times the optimum
    found_s = mode_s("seq2seq", "reinforce", KEPT_NOISY, problem, updates=120)
    assert found_s == pytest.approx(brute_force_s(problem), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["placer", "gnn", "improver", "schedule", "seq2seq"])
def test_what_search_finds_is_cloned(policy: str) -> None:
    problem = fork_problem(0, num_devices=3)
    simulator = Simulator(problem, threads=1)
    found = find(problem, "anneal", simulator, Budget(evaluations=600), seed=0)
    assert found.devices is not None
    assert found.step_time_s == pytest.approx(brute_force_s(problem), rel=1e-9)
    config = LearnConfig(clone=CloneConfig(num_elites=1))
    learned = POLICIES[policy](problem, config, 0)
    learner = LEARNERS["clone"](learned, config, 0)
    for _ in range(30):
        rows = np.concatenate([learned.sample(7), found.devices[None]])
        learner.update(rows, -simulator.step_times(rows))
    assert learned.mode().tolist() == found.devices.tolist()
