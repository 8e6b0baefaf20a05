"""The method `schedule`: guesses of the pretrained policy, variations of the best of them, then learning."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from rlplace.env.schedule_batch import ListSchedules
from rlplace.measure.timing.threads import one_thread_here
from rlplace.policy.base import Policy
from rlplace.policy.checkpoint import pretrained_path
from rlplace.policy.learn.state import LearnerFile
from rlplace.policy.options import LearnConfig
from rlplace.policy.schedule import propose
from rlplace.policy.schedule_network import KIND, load_network
from rlplace.search.improve.portfolio import vary
from rlplace.search.improve.starting_points import check_budget, score_weights
from rlplace.search.parallel.hybrid import parallel_starts
from rlplace.search.task import Task
from rlplace.training.policy_search import PolicySearch

GUESSES = 16
"""Guesses that come before anything else ..."""
GUESSES_SHARE = 0.25
"""... or this share of the budget, where that is more ..."""
MOST_GUESSES = 64
"""... but no more than these."""


@one_thread_here()  # ops are tiny: a team of threads slows them down, and must not decide what is found
def solve(task: Task, config: LearnConfig | None = None, learner_file: LearnerFile | None = None) -> Policy | None:
    """Places zero-shot, as far as the budget goes; returns the policy where it came to learn.

    First come guesses that ask the simulator nothing (`propose`), the best first; with a budget of `GUESSES` there is
    nothing else. In a step that is cut into micro-batches, layouts by stages and replicas, which no list schedule
    finds, come after the first guess. Then the weights of the best guesses are varied, and last the policy learns on
    the problem from its samples, beginning with the best placement so far.

    Args:
        task: scores and counts.
        config: how the policy learns; which one is not its to say.
        learner_file: keeps the state of its learner, and gives it back; nobody by default.

    Raises:
        InvalidValue: the task's budget is infinite.
    """
    check_budget(task)
    network, schedules = load_network(pretrained_path(KIND)), ListSchedules(task.problem)
    guesses = propose(task.problem, network, _num_guesses(task), schedules=schedules)
    pairs = [(schedules.schedulers[name], np.array(weights)) for name, weights in guesses.pairs]
    seen: set[bytes] = set()
    leaders = score_weights(task, pairs[:1], seen, until=1.0)
    parallel_starts(task)
    leaders = sorted([*leaders, *score_weights(task, pairs[1:], seen, until=1.0)], key=lambda one: one.loss)
    vary(task, leaders, until=1.0)
    if task.is_spent or task.best_devices is None:
        return None
    config = dataclasses.replace(config or LearnConfig(), policy=KIND)
    search = PolicySearch(task, config, learner_file)
    search.imitate(task.best_devices)
    search.learn(until=1.0)
    return search.policy


def _num_guesses(task: Task) -> int:
    evaluations = task.budget.evaluations
    if math.isinf(evaluations):
        return MOST_GUESSES
    return int(min(max(GUESSES, GUESSES_SHARE * evaluations), MOST_GUESSES, evaluations))
