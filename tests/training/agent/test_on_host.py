"""The method `learned` on a host that measures some plans later than others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from host_models import learnable_problem
from numpy.typing import NDArray
from random_problems import plain_host

from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.truth import TrueTimer, Truth, true_problem
from rlplace.search.task import Budget, LateHost, Task
from rlplace.session.calibrate import Known, plans_of
from rlplace.training.agent import Agent, AgentConfig, learn_host
from rlplace.training.agent.agent import solve

FEW = AgentConfig(batch=3, evaluations=60, later_evaluations=40)
PROBLEM = learnable_problem(plain_host(3, 100.0, 0.05), 12)


class PromptHost:
    """Measures on a hidden truth, always in time.

    Attributes:
        asked: fingerprints of the plans of every batch.
    """

    seconds_left = math.inf

    def __init__(self, *, is_traced: bool = False) -> None:
        self.asked: list[list[str]] = []
        self._timer = TrueTimer(true_problem(PROBLEM, Truth("hard", 1)), 1, is_traced=is_traced)

    @property
    def problem(self) -> Problem:
        return PROBLEM

    def promising(self, count: int) -> NDArray[np.int32]:
        return np.zeros((0, PROBLEM.graph.num_ops), dtype=np.int32)

    def measure(self, placements: NDArray[np.int32]) -> list[Measurement]:
        raise AssertionError("the agent measures plans")

    def measure_plans(self, plans: Sequence[Plan]) -> list[Measurement]:
        self.asked.append([plan.fingerprint for plan in plans])
        return self._timer.measure_plans(plans)


class SlowHost(PromptHost):
    """The same, but the last plan of a batch comes with the next one.

    Attributes:
        told: fingerprints of what was given back, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []
        self._late: list[tuple[Plan, Measurement]] = []

    def measure_some(self, plans: Sequence[Plan], *, is_all: bool = False) -> list[tuple[Plan, Measurement]]:
        came = [*self._late, *zip(plans, self.measure_plans(plans) if plans else [], strict=True)]
        self._late = [] if is_all else came[-1:]
        came = came if is_all else came[:-1]
        self.told += [plan.fingerprint for plan, _ in came]
        return came


@pytest.fixture
def surveys(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of plans that were measured before each survey."""
    found, real = list[int](), Agent.survey

    def survey(agent: Agent) -> list[Plan]:
        found.append(agent.num_measured)
        return real(agent)

    monkeypatch.setattr(Agent, "survey", survey)
    return found


def task_on(host: PromptHost) -> Task:
    return Task(PROBLEM, Simulator(PROBLEM, threads=1), Budget(600, measurements=12), seed=1, host=host)


def test_it_learns_from_what_has_come_and_leaves_nothing_behind() -> None:
    host = SlowHost()
    assert isinstance(host, LateHost)
    task = task_on(host)
    result = solve(task, FEW)
    assert result is not None
    asked = [name for batch in host.asked for name in batch]
    assert len(asked) == task.measurements == 12
    assert sorted(host.told) == sorted(asked)
    assert len(set(asked)) == 12  # nothing is proposed again while it is being measured
    assert result.plan is not None
    assert len(result.history) == len({best.best_s for best in result.history})
    assert result.history[-1].measurements <= 12


def test_a_host_that_is_always_in_time_is_no_late_one_and_is_asked_in_batches() -> None:
    host = PromptHost()
    assert not isinstance(host, LateHost)
    assert solve(task_on(host), FEW) is not None
    assert [len(batch) for batch in host.asked] == [3, 3, 3, 3]


@pytest.mark.parametrize(
    ("is_given", "is_known", "batches"),
    [(True, False, [1, 1, 2, 1]), (False, False, [1, 1, 2, 1]), (True, True, [2, 2])],
)
def test_a_traced_search_begins_with_a_survey_unless_timelines_are_known(
    is_given: bool, is_known: bool, batches: list[int], surveys: list[int]
) -> None:
    """Also where the host gives no timeline: then the survey is not repeated. Batches grow with what is known."""
    host, known, most = PromptHost(is_traced=is_given), None, sum(batches) + 1  # one is kept for the last search
    if is_known:
        plans = plans_of(PROBLEM, Simulator(PROBLEM), PROBLEM.draw_groups(np.random.default_rng(0), 2))
        known = Known(PROBLEM, plans, PromptHost(is_traced=True).measure_plans(plans))
    task = Task(PROBLEM, Simulator(PROBLEM, threads=1), Budget(200, measurements=most), seed=1, host=host)
    agent = solve(task, replace(FEW, least_gain=0.0), known, is_traced=True)
    assert agent is not None
    assert [len(batch) for batch in host.asked][: len(batches)] == batches
    assert len(surveys) == (not is_known)
    assert agent.posterior.scales.is_traced


def test_a_traced_search_that_goes_on_is_not_surveyed_again(surveys: list[int]) -> None:
    host, simulator = PromptHost(is_traced=True), Simulator(PROBLEM)
    task = Task(PROBLEM, simulator, Budget(200, measurements=3), seed=1, host=host)
    plans = plans_of(PROBLEM, simulator, PROBLEM.draw_groups(np.random.default_rng(0), 1))
    raced = [(plans, PromptHost(is_traced=True).measure_plans(plans))]
    task.resume(evaluations=50, measurements=1, elapsed_s=0.0, plan=None, history=[], raced=raced)
    assert solve(task, FEW, is_traced=True) is not None
    assert [len(batch) for batch in host.asked] == [1, 1]
    assert surveys == []


@pytest.mark.slow
@pytest.mark.parametrize("is_traced", [False, True])
def test_a_host_of_a_task_and_a_measurer_see_the_same_plans(is_traced: bool) -> None:
    """One loop serves a run and a table: the seed of the agent is all that differs."""
    host, timer, config = PromptHost(is_traced=is_traced), PromptHost(is_traced=is_traced), FEW
    task = task_on(host)
    agent = solve(task, config, is_traced=is_traced)
    seed = int(np.random.default_rng(1).integers(2**31))
    budget = Budget(600, measurements=12)
    other = learn_host(PROBLEM, timer, budget, seed=seed, config=config, is_traced=is_traced)
    assert agent is not None
    assert host.asked == timer.asked
    assert agent.evaluations == other.evaluations == task.evaluations
    assert agent.plan is not None
    assert other.plan is not None
    assert agent.plan.fingerprint == other.plan.fingerprint


@pytest.mark.parametrize("traced_share", [0.1, 0.8])
def test_the_first_traced_search_gets_its_share(traced_share: float) -> None:
    """Of what is not for the last search; the survey before it simulates what it draws."""
    host = PromptHost(is_traced=True)
    spent: list[int] = []
    task = Task(PROBLEM, Simulator(PROBLEM, threads=1), Budget(6000, measurements=8), seed=1, host=host)
    measure = host.measure_plans
    host.measure_plans = lambda plans: (spent.append(task.evaluations), measure(plans))[1]  # type: ignore[method-assign, assignment, return-value]
    assert solve(task, replace(FEW, traced_share=traced_share, last_share=0.5), is_traced=True) is not None
    assert spent[1] == pytest.approx(6000 * 0.5 * traced_share, rel=0.15, abs=120)


class ClosingHost(PromptHost):
    """The same, with a clock of its own on which a plan takes a second.

    Attributes:
        limit_s: when it takes no more plans.
        now_s: its time.
    """

    def __init__(self, limit_s: float) -> None:
        super().__init__(is_traced=True)
        self.limit_s, self.now_s = limit_s, 0.0

    @property
    def seconds_left(self) -> float:  # type: ignore[override]
        return self.limit_s - self.now_s

    def measure_plans(self, plans: Sequence[Plan]) -> list[Measurement]:
        self.now_s += len(plans)
        return super().measure_plans(plans)


def test_a_host_that_closes_early_leaves_time_for_the_last_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two fifths of the seconds of all searches, and those that its two plans take, a second each."""
    host, asked = ClosingHost(16.0), list[float]()
    monkeypatch.setattr("rlplace.training.agent.agent.time", SimpleNamespace(monotonic=lambda: host.now_s))
    monkeypatch.setattr(Agent, "last", lambda self, count, budget: asked.append(budget.seconds) or [])
    task = Task(PROBLEM, Simulator(PROBLEM, threads=1), Budget(2000, 20.0, measurements=40), seed=1, host=host)
    assert solve(task, replace(FEW, least_gain=0.0), is_traced=True) is not None
    assert host.now_s - len(host.asked[-1]) < 16.0 - 0.4 * 20.0 - 2.0 <= host.now_s
    assert asked == [16.0 - host.now_s - 2.0]
