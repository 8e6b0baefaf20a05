"""Rows under a hidden truth, on graphs small enough to know every placement."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence

import numpy as np
import pytest
from fake_agent import AgentConfig, fake_agent
from search_problems import chain_problem, fork_problem

from rlplace.compare.true_rows import ROWS, Meter, Trial
from rlplace.errors import RunnerError
from rlplace.measure.costs.costs import Costs
from rlplace.measure.measurement import Measurement
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.task import Budget


class Exact:
    """A measurer without noise."""

    def __init__(self, true: Problem) -> None:
        self.simulator = Simulator(true, threads=1)

    def measure_plans(self, plans: Sequence[Plan]) -> list[Measurement]:
        return [self.simulator.retime(plan) for plan in plans]


def trial(problem: Problem, true: Problem, measured: int, evaluations: int = 400) -> Trial:
    meter = Meter(Exact(true), measured)
    return Trial(problem, Simulator(problem, threads=1), meter, Budget(evaluations, math.inf, measured), seed=3)


def slower(problem: Problem, device: int, factor: float) -> Problem:
    """The problem as it is where one device is slower than known."""
    op_time_s = problem.costs.op_time_s.copy()
    op_time_s[:, device] *= factor
    return dataclasses.replace(problem, costs=Costs(op_time_s, "estimated"))


def true_s(true: Problem, plan: Plan | None) -> float:
    assert plan is not None
    return Simulator(true, threads=1).retime(plan).step_time_s


def test_portfolio_measures_as_many_as_it_may_and_names_the_best_of_them() -> None:
    problem = fork_problem(0)
    true = slower(problem, 0, 3.0)
    one = trial(problem, true, 8)
    answer = ROWS["portfolio"](one)
    assert len(one.meter.kept) == 8
    assert true_s(true, answer.plan) == min(outcome.step_time_s for _, outcome in one.meter.kept)
    assert 0 < answer.evaluations <= 400


def test_portfolio_finds_the_device_that_is_really_fast_among_alike_ones() -> None:
    """A chain belongs on one device; nominally three are alike, in truth two are slower."""
    problem = chain_problem(4, 3)
    true = slower(slower(problem, 0, 2.0), 1, 2.0)
    answer = ROWS["portfolio"](trial(problem, true, 12, 600))
    assert answer.plan is not None
    assert answer.plan.devices.tolist() == [2, 2, 2, 2]


def test_portfolio_on_the_truth_scores_by_measuring() -> None:
    problem = fork_problem(1)
    true = slower(problem, 1, 4.0)
    one = trial(problem, true, 30)
    answer = ROWS["portfolio-measured"](one)
    assert len(one.meter.kept) <= 30
    assert answer.evaluations == 0
    assert true_s(true, answer.plan) == min(outcome.step_time_s for _, outcome in one.meter.kept)


def test_calibrating_helps_where_the_figures_that_are_fitted_are_wrong() -> None:
    """Copies take 20 times as long as known: half of the measurements tell, the rest are of what then looks best."""
    problem = fork_problem(2)
    links = tuple(
        dataclasses.replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / 20) for link in problem.host.links
    )
    true = dataclasses.replace(problem, host=dataclasses.replace(problem.host, links=links))
    one = trial(problem, true, 16)
    answer = ROWS["calibrated"](one)
    assert len(one.meter.kept) == 16
    assert len({plan.fingerprint for plan, _ in one.meter.kept}) == 16
    every = (np.arange(64)[:, None] >> np.arange(6) & 1).astype(np.int32)
    assert true_s(true, answer.plan) <= 1.05 * Simulator(true, threads=1).step_times(every).min()
    assert 0 < answer.evaluations <= 400


@pytest.mark.parametrize("measured", [1, 2, 5])
def test_with_few_measurements_nothing_is_calibrated_and_all_are_used(measured: int) -> None:
    one = trial(fork_problem(2), fork_problem(2), measured)
    assert ROWS["calibrated"](one).plan is not None
    assert len(one.meter.kept) == measured


def test_single_measures_nothing() -> None:
    one = trial(slower(chain_problem(3, 2), 0, 2.0), chain_problem(3, 2), 4)
    answer = ROWS["single"](one)
    assert answer.plan is not None
    assert answer.plan.devices.tolist() == [1, 1, 1]
    assert one.meter.kept == []


@pytest.mark.parametrize(
    ("row", "config"),
    [
        ("learned", AgentConfig()),
        ("learned-no-prior", AgentConfig(is_prior=False)),
        ("learned-mean", AgentConfig(is_thompson=False)),
        ("learned-no-permutations", AgentConfig(is_permuted=False)),
    ],
)
def test_the_agent_gets_the_whole_budget_and_its_answer_counts(
    row: str, config: AgentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it names another plan than the best that it measured."""
    agent, calls = fake_agent([[0, 0, 0], [1, 1, 1]], [0, 1, 1])
    monkeypatch.setitem(sys.modules, "rlplace.training.agent", agent)
    one = trial(chain_problem(3, 2), chain_problem(3, 2), 4)
    answer = ROWS[row](one)
    assert answer.plan is not None
    assert (answer.plan.devices.tolist(), answer.evaluations) == ([0, 1, 1], 7)
    assert answer.why == "line 0; line 1; line 2"
    assert calls == [(config, one.budget, 3, [3.0, 3.0])]


def test_a_meter_gives_no_more_than_it_may_and_knows_the_best() -> None:
    problem = chain_problem(2, 2)
    meter, simulator = Meter(Exact(slower(problem, 0, 2.0)), 3), Simulator(problem, threads=1)
    assert meter.best is None
    plans = [simulator.plan(np.full(2, device, dtype=np.int32)) for device in (0, 1)]
    meter.measure_plans(plans)
    assert meter.best is plans[1]
    assert [(best.measurements, best.best_s) for best in meter.history] == [(1, 4.0), (2, 2.0)]
    with pytest.raises(RunnerError, match="4 measurements"):
        meter.measure_plans(plans)
    assert len(meter.kept) == 2
