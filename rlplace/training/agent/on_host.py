"""The method `learned`: the agent as a method of the registry, on a task whose host runs plans."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.host_model import HostKnowledge, Prior
from rlplace.measure.measurement import Measurement
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.timing.threads import one_thread_here
from rlplace.policy.learn.state import LearnerFile
from rlplace.policy.options import LearnConfig
from rlplace.search.guide import Guide
from rlplace.search.methods import METHODS
from rlplace.search.task import Budget, Task
from rlplace.session.calibrate import Known
from rlplace.training.agent.agent import Agent, AgentResult
from rlplace.training.agent.config import AgentConfig

WITHOUT_HOST = "portfolio"
"""What runs where nothing can be measured: then there is nothing to learn about the host."""
MOST_IDLE = 3
"""Batches without a new plan after which there are taken to be no more."""


@one_thread_here()
def solve(
    task: Task,
    config: AgentConfig | None = None,
    known: Known | None = None,
    prior: Prior | None = None,
    guide: LearnConfig | None = None,
    start: NDArray[np.int32] | None = None,
    knowledge: HostKnowledge | None = None,
    learner_file: LearnerFile | None = None,
) -> AgentResult | None:
    """Learns the host from its measured steps, as `learn_host` does; returns what it learned.

    A share of the task's evaluations or seconds goes to each plan that may be measured, and measuring goes on for as
    long as the host is open. Where a host measures some plans later than others, it learns from what has come. Without
    a host it is `portfolio`.

    Args:
        task: scores, measures and counts.
        config: how the agent explores.
        known: steps that were measured before, and the problem as it was profiled; the task's by default.
        prior: how far the host may be from the problem's figures.
        guide: the policy that suggests starts and moves to its searches; none by default.
        start: (N,) a placement that its first search starts from, besides its own starts.
        knowledge: what other workloads taught about this host; nothing by default.
        learner_file: keeps the state of the guide's learner, and gives it back; nobody by default.
    """
    if task.host is None or not task.budget.measurements:
        METHODS[WITHOUT_HOST].run(task, start=start)
        return None
    config = (config or AgentConfig()).on(is_known=knowledge is not None)
    seed, problem = int(task.generator.integers(2**31)), task.problem if known is None else known.problem
    guided = _guide(problem, guide, seed, learner_file)
    agent = Agent(problem, seed=seed, config=config, prior=prior, guide=guided, start=start, knowledge=knowledge)
    if known is not None:
        agent.learn(known.plans, known.outcomes)
    most, budget, idle, scale_s = task.budget.measurements, task.budget, 0, math.nan
    if task.raced:  # by an interrupted search: it need not be measured again to be known
        raced = [outcome for _, outcomes in task.raced for outcome in outcomes]
        scale_s = _reference_s(raced[: config.batch])
        agent.learn([plan for plans, _ in task.raced for plan in plans], [_steadied(one, scale_s) for one in raced])
    while (left := task.measurements_left) > 0 and idle < MOST_IDLE:
        share, before = config.share(task.measurements, most), agent.num_simulated
        each = Budget(max(budget.evaluations * share, 1), budget.seconds * share)
        plans = agent.propose(min(config.batch, left), each)
        task.count(agent.num_simulated - before)
        idle = 0 if plans else idle + 1
        if not plans:
            continue
        agent.expect(plans)
        came = task.measure_some(plans)
        if not came:
            break
        scale_s = _learn(agent, came, scale_s)
        task.tell(agent.figures())
    if late := task.measure_some([], is_all=True):
        _learn(agent, late, scale_s)
        task.tell(agent.figures())
    return agent.result()


def _learn(agent: Agent, came: Sequence[tuple[Plan, Measurement]], scale_s: float) -> float:
    """Has the agent learn what has come; the reference's step time that all of it is scaled to."""
    outcomes = [outcome for _, outcome in came]
    if math.isnan(scale_s):
        scale_s = _reference_s(outcomes)
    agent.learn([plan for plan, _ in came], [_steadied(outcome, scale_s) for outcome in outcomes])
    return scale_s


def _guide(problem: Problem, config: LearnConfig | None, seed: int, learner_file: LearnerFile | None) -> Guide | None:
    if config is None:
        return None
    from rlplace.training.guide import PolicyGuide

    return PolicyGuide(problem, config, seed=seed, learner_file=learner_file)


def _reference_s(outcomes: Sequence[Measurement]) -> float:
    """Median step time of the reference; NaN without one."""
    found = [outcome.reference_s for outcome in outcomes if outcome.ok and outcome.reference_s > 0]
    return float(np.median(found)) if found else math.nan


def _steadied(outcome: Measurement, reference_s: float) -> Measurement:
    """With the step time that it would have had beside a reference of `reference_s`: the machine's drift cancels."""
    if not outcome.ok or not outcome.reference_s or not math.isfinite(reference_s):
        return outcome
    factor = reference_s / outcome.reference_s
    samples_s = tuple(sample * factor for sample in outcome.samples_s)
    return dataclasses.replace(outcome, step_time_s=outcome.step_time_s * factor, samples_s=samples_s)
