"""Which candidates are measured together, by hand, and step times under many factors at once."""

from __future__ import annotations

import math

import numpy as np
import pytest
from host_models import learnable_problem
from random_problems import plain_host

from rlplace.measure.host_model import Posterior, Prior, Scales
from rlplace.measure.simulate.simulator import Simulator
from rlplace.training.agent.proposals import AverageTimer, choose_batch, expected_gain, log_step_times

PROBLEM = learnable_problem(plain_host(3, 100.0, 0.05), 20)


def simulators(count: int) -> list[Simulator]:
    posterior, generator = Posterior.prior(Scales(PROBLEM, Prior(overhead_s=0.1))), np.random.default_rng(0)
    return [Simulator(posterior.draw(generator), threads=1) for _ in range(count)]


def test_the_batch_is_expected_to_gain_most_together() -> None:
    """The second is nearly as good as the first, where the first is good; the third is good elsewhere."""
    log_s = np.array([[-1.0, -0.9, 0.5], [0.5, 0.5, -0.3]])
    assert choose_batch(log_s, 0.0, 2) == [0, 2]
    assert choose_batch(log_s, 0.0, 5) == [0, 2, 1]


def test_what_gains_nothing_goes_by_its_mean() -> None:
    assert choose_batch(np.array([[3.0, 1.0, 2.0], [3.0, 2.0, 2.5]]), 0.0, 3) == [1, 2, 0]


def test_what_does_not_fit_comes_last() -> None:
    assert choose_batch(np.array([[math.inf, 1.0], [-5.0, 1.5]]), 0.0, 2) == [0, 1]  # it may fit, and be fast
    assert choose_batch(np.array([[math.inf, 1.0], [math.inf, 1.5]]), 0.0, 2) == [1, 0]


def test_without_a_measured_plan_the_fastest_is_taken() -> None:
    assert choose_batch(np.array([[2.0, 1.0], [2.0, 1.5]]), math.inf, 1) == [1]


def test_the_expected_gain_counts_draws_that_fit_and_never_a_loss() -> None:
    log_s = np.array([[-0.4, math.inf], [math.inf, math.inf], [0.5, 0.3], [-9.0, -9.0]])
    best = np.array([0.2, 0.0, 0.1, math.inf])
    assert expected_gain(log_s, best) == pytest.approx((0.6 + 0.0 + 0.0) / 3)
    assert expected_gain(log_s[:1], best[3:]) == math.inf


def test_step_times_of_plans_under_draws() -> None:
    under, plain = simulators(3), Simulator(PROBLEM, threads=1)
    plans = [plain.plan(devices) for devices in PROBLEM.draw_groups(np.random.default_rng(1), 5)]
    log_s = log_step_times(plans, under, math.inf)
    expected = [[math.log(simulator.retime(plan).step_time_s) for plan in plans] for simulator in under]
    np.testing.assert_allclose(log_s, expected, rtol=1e-12)
    assert log_step_times(plans, under, -1.0).shape == (1, 5)  # no time: one simulator all the same


def test_an_average_is_the_geometric_mean_and_costs_as_many() -> None:
    under = simulators(3)
    timer = AverageTimer(PROBLEM, under)
    placements = PROBLEM.draw_groups(np.random.default_rng(1), 5)
    product = np.prod([simulator.step_times(placements) for simulator in under], axis=0)
    np.testing.assert_allclose(timer.step_times(placements), product ** (1 / 3), rtol=1e-12)
    assert timer.cost == 3


@pytest.mark.parametrize("count", [1, 4])
def test_an_average_over_one_simulator_is_that_simulator(count: int) -> None:
    simulator = simulators(1)[0]
    placements = PROBLEM.draw_groups(np.random.default_rng(1), count)
    times_s = AverageTimer(PROBLEM, [simulator] * count).step_times(placements)
    np.testing.assert_allclose(times_s, simulator.step_times(placements), rtol=1e-12)
