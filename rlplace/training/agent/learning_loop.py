"""`learn_host`: measure a few plans, fit the host model to them, plan in draws of it, measure those, and go on."""

from __future__ import annotations

import math
import time

from rlplace.errors import InvalidValue
from rlplace.measure.host_model import HostKnowledge, Prior
from rlplace.measure.measurement import PlanMeasurer
from rlplace.measure.problem import Problem
from rlplace.search.guide import Guide
from rlplace.search.task import Budget
from rlplace.training.agent.agent import Agent, AgentResult
from rlplace.training.agent.config import AgentConfig


def learn_host(
    problem: Problem,
    measurer: PlanMeasurer,
    budget: Budget,
    *,
    seed: int,
    config: AgentConfig | None = None,
    prior: Prior | None = None,
    guide: Guide | None = None,
    knowledge: HostKnowledge | None = None,
) -> AgentResult:
    """The best plan of as many as may be measured, each chosen with what those before it taught about the host.

    Model-based reinforcement learning with posterior sampling (Strens 2000, ICML; Osband et al. 2013, arXiv:1306.0940):
    a batch is searched for under the most probable factors of the host model and under draws of their posterior, is
    measured, and the model is fitted to all that was measured so far.

    Args:
        problem: as profiled or estimated.
        measurer: times plans.
        budget: `measurements`, the plans that may be measured, at least 1; placements simulated and seconds for all
            of them together.
        seed: of every draw.
        config: how it explores.
        prior: how far the host may be from the problem's figures.
        guide: suggests starts and moves to its searches.
        knowledge: what other workloads taught about this host (`knowledge_of`); nothing by default.

    Raises:
        InvalidValue: nothing may be measured, or the measurer gave more or fewer measurements than plans.
    """
    if not budget.measurements:
        hint = "For example: Budget(measurements=16)."
        raise InvalidValue("measurements", 0, "at least 1 plan to measure", where="budget of learn_host", hint=hint)
    config = (config or AgentConfig()).on(is_known=knowledge is not None)
    agent = Agent(problem, seed=seed, config=config, prior=prior, guide=guide, knowledge=knowledge)
    begin = time.monotonic()
    evaluations = budget.evaluations
    if math.isinf(evaluations) and math.isinf(budget.seconds):
        evaluations = config.whole_evaluations(budget.measurements)
    while (left := budget.measurements - agent.num_measured) > 0 and time.monotonic() - begin < budget.seconds:
        share = config.share(agent.num_measured, budget.measurements)
        placements = evaluations * share
        if math.isfinite(placements):  # whole: a rounding error must not change a search
            placements = max(round(placements), 1)
        each = Budget(placements, budget.seconds * share)
        plans = agent.propose(min(config.batch, left), each)
        if not plans:
            break
        outcomes = measurer.measure_plans(plans)
        if len(outcomes) != len(plans):
            expected = f"{len(plans)}, one for each plan"
            raise InvalidValue("number of measurements", len(outcomes), expected, where=type(measurer).__name__)
        agent.learn(plans, outcomes)
    return agent.result()
