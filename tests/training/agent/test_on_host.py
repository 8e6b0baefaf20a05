"""The method `learned` on a host that measures some plans later than others."""

from __future__ import annotations

from collections.abc import Sequence

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
from rlplace.training.agent import AgentConfig
from rlplace.training.agent.agent import solve

FEW = AgentConfig(batch=3, evaluations=60, later_evaluations=40)
PROBLEM = learnable_problem(plain_host(3, 100.0, 0.05), 12)


class PromptHost:
    """Measures on a hidden truth, always in time.

    Attributes:
        asked: fingerprints of the plans of every batch.
    """

    is_open = True

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
    ("is_given", "is_known", "batches"), [(True, False, [1, 3]), (False, False, [1, 3]), (True, True, [3])]
)
def test_a_traced_search_begins_with_a_survey_unless_timelines_are_known(
    is_given: bool, is_known: bool, batches: list[int]
) -> None:
    """Also where the host gives no timeline: then the survey is not repeated."""
    host, known = PromptHost(is_traced=is_given), None
    if is_known:
        plans = plans_of(PROBLEM, Simulator(PROBLEM), PROBLEM.draw_groups(np.random.default_rng(0), 2))
        known = Known(PROBLEM, plans, PromptHost(is_traced=True).measure_plans(plans))
    task = Task(PROBLEM, Simulator(PROBLEM, threads=1), Budget(200, measurements=sum(batches)), seed=1, host=host)
    agent = solve(task, FEW, known, is_traced=True)
    assert agent is not None
    assert [len(batch) for batch in host.asked] == batches
    assert agent.posterior.scales.is_traced


def test_a_traced_search_that_goes_on_is_not_surveyed_again() -> None:
    host, simulator = PromptHost(is_traced=True), Simulator(PROBLEM)
    task = Task(PROBLEM, simulator, Budget(200, measurements=4), seed=1, host=host)
    plans = plans_of(PROBLEM, simulator, PROBLEM.draw_groups(np.random.default_rng(0), 1))
    raced = [(plans, PromptHost(is_traced=True).measure_plans(plans))]
    task.resume(evaluations=50, measurements=1, elapsed_s=0.0, plan=None, history=[], raced=raced)
    assert solve(task, FEW, is_traced=True) is not None
    assert [len(batch) for batch in host.asked] == [3]
