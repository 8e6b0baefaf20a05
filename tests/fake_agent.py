"""An agent that does as it is told: a stand-in for `rlplace.training.agent`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from rlplace.measure.measurement import PlanMeasurer
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.task import Budget


@dataclass(frozen=True)
class AgentConfig:
    evaluations: int = 10
    is_prior: bool = True
    is_thompson: bool = True
    is_permuted: bool = True


@dataclass(frozen=True)
class AgentResult:
    plan: Plan | None
    evaluations: int

    def say(self) -> list[str]:
        return [f"line {place}" for place in range(5)]


def fake_agent(measured: Sequence[Sequence[int]], answer: Sequence[int]) -> tuple[ModuleType, list[object]]:
    """The module, and a list that its calls are added to.

    Args:
        measured: placements that it measures, in one batch.
        answer: the placement that it names.
    """
    calls: list[object] = []

    def learn_host(
        problem: Problem,
        measurer: PlanMeasurer,
        budget: Budget,
        *,
        seed: int,
        config: AgentConfig | None = None,
        is_traced: bool = False,
    ) -> AgentResult:
        simulator = Simulator(problem, threads=1)
        plans = [simulator.plan(np.array(devices, dtype=np.int32)) for devices in measured]
        outcomes = measurer.measure_plans(plans)
        calls.append((config, budget, seed, [outcome.step_time_s for outcome in outcomes]))
        return AgentResult(simulator.plan(np.array(answer, dtype=np.int32)), 7)

    module = ModuleType("rlplace.training.agent")
    module.__dict__.update(AgentConfig=AgentConfig, AgentResult=AgentResult, learn_host=learn_host)
    return module, calls
