"""Policy `schedule` learns a small problem to its optimum, by either learner, and goes on after imitation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from search_problems import brute_force_s, fork_problem

from rlplace.env.rewards import make_reward
from rlplace.measure.simulate.simulator import Simulator
from rlplace.policy.options import LearnConfig
from rlplace.policy.policies import LEARNERS, POLICIES


@pytest.mark.slow
@pytest.mark.parametrize(("learner", "updates"), [("ppo", 30), ("reinforce", 60)])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_mode_becomes_the_optimum(learner: str, updates: int, seed: int) -> None:
    problem = fork_problem(seed)
    config = LearnConfig(policy="schedule", learner=learner)
    policy = POLICIES["schedule"](problem, config, 0)
    teacher = LEARNERS[learner](policy, config, 0)
    simulator = Simulator(problem, threads=1)
    reward = make_reward("log_speedup", float(problem.costs.op_time_s.mean(axis=1).sum()))
    for update in range(updates):
        rows = policy.sample(32)
        rewards = reward(simulator.step_times(problem.grouping.expand(rows)))
        teacher.update(rows, rewards, progress=update / updates)
    found_s = float(simulator.step_times(problem.grouping.expand(policy.mode()[None]))[0])
    assert found_s == pytest.approx(brute_force_s(problem))


def test_a_placement_is_imitated() -> None:
    problem = fork_problem(3)
    config = LearnConfig(policy="schedule", learner="ppo")
    policy = POLICIES["schedule"](problem, config, 0)
    wanted = 1 - policy.mode()
    with torch.no_grad():
        before = policy.log_prob(wanted[None]).item()
    LEARNERS["ppo"](policy, config, 0).imitate(wanted)
    with torch.no_grad():
        assert policy.log_prob(wanted[None]).item() > before
    assert np.mean(policy.mode() == wanted) > 0.5
