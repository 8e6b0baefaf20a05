"""A placement that is known before, as from the race for the number of micro-batches, is where searches go on from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from random_problems import plain_host, random_problem

from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.policy import LearnConfig
from rlplace.search.methods import find
from rlplace.search.task import Budget
from rlplace.training import SearchConfig
from rlplace.training.agent.agent import Agent
from rlplace.training.method_choice import METHODS
from rlplace.training.run import train

FEW = Budget(evaluations=12)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return random_problem(np.random.default_rng(7), 40, plain_host(4))


@pytest.fixture(scope="module")
def known(problem: Problem) -> NDArray[np.int32]:
    found = find(problem, "portfolio", Simulator(problem, threads=1), Budget(evaluations=3000), seed=5)
    assert found.devices is not None
    return found.devices


def step_s(problem: Problem, devices: NDArray[np.int32]) -> float:
    return float(Simulator(problem, threads=1).step_times(devices[None])[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options"), [("portfolio", {}), ("guided", {"config": LearnConfig()}), ("policy", {})]
)
def test_a_search_never_ends_behind_it(
    method: str, options: dict[str, Any], problem: Problem, known: NDArray[np.int32]
) -> None:
    assert method in METHODS
    without = find(problem, method, Simulator(problem, threads=1), FEW, **options)
    found = find(problem, method, Simulator(problem, threads=1), FEW, start=known, **options)
    assert found.evaluations <= FEW.evaluations
    assert found.step_time_s <= step_s(problem, known) < without.step_time_s


def test_the_agents_first_plan_is_no_worse(problem: Problem, known: NDArray[np.int32]) -> None:
    (plan,) = Agent(problem, seed=0, start=known).propose(1, FEW)
    assert step_s(problem, plan.devices) <= step_s(problem, known)
    (other,) = Agent(problem, seed=0).propose(1, FEW)
    assert step_s(problem, other.devices) > step_s(problem, known)


def test_training_takes_it(problem: Problem, known: NDArray[np.int32]) -> None:
    result = train(problem, budget_s=0.05, search=SearchConfig(method="portfolio"), start=known)
    assert result.table.row("portfolio")["step_time_s"] <= step_s(problem, known)
