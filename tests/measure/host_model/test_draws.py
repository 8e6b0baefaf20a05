"""Draws of hosts that explain what was measured: as wide as they should be, and none that it rules out."""

from __future__ import annotations

import numpy as np
import pytest
from host_models import learnable_problem, paired_host, step_times, varied_plans
from random_problems import plain_host

from rlplace.measure.host_model import FitConfig, HostModel, Posterior, Prior, Scales
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.simulate.simulator import Simulator

SURE = FitConfig(noise=0.01, misfit=0.0, far=0.0)


def measured(seed: int, *, count: int = 16) -> tuple[HostModel, Posterior, list[Plan], np.ndarray]:
    """A model that learned from plans of a hidden host, its fit, the plans and their true step times."""
    scales, generator = (
        Scales(learnable_problem(paired_host(3), 24), Prior(overhead_s=0.1)),
        np.random.default_rng(seed),
    )
    plans = varied_plans(scales.problem, generator, count)
    true_s = step_times(scales.apply(generator.standard_normal(len(scales)) * scales.deviation), plans)
    model = HostModel(scales, SURE)
    model.add(plans, true_s * generator.lognormal(0.0, 0.01, count))
    return model, model.fit(), plans, true_s


def missed(problems: list[Problem], plans: list[Plan], true_s: np.ndarray) -> np.ndarray:
    """(D, B) log ratios of simulated and true step times."""
    return np.array([np.log(step_times(problem, plans) / true_s) for problem in problems])


@pytest.mark.slow
def test_where_a_step_is_a_sum_they_are_draws_of_the_normal_posterior() -> None:
    """One device and one factor: the logarithm of the step time is linear in that of the factor."""
    prior = Prior(op_type=0.0, device=0.5, bandwidth=0.0, latency=0.0, overhead=0.0)
    scales = Scales(learnable_problem(plain_host(1), 6), prior)
    assert [item.kind for item in scales.items] == ["device"]
    plans = varied_plans(scales.problem, np.random.default_rng(0), 1) * 4
    model = HostModel(scales, FitConfig(noise=0.4, misfit=0.0, far=0.0))
    model.add(plans, 1.7 * step_times(scales.problem, plans))
    posterior, generator = model.fit(), np.random.default_rng(1)
    logs = np.log([step_times(model.draw(generator), plans[:1])[0] for _ in range(600)])
    logs -= np.log(step_times(scales.problem, plans[:1])[0])
    precision = 1 / 0.5**2 + 4 / 0.4**2
    mean, deviation = 4 / 0.4**2 * np.log(1.7) / precision, precision**-0.5
    np.testing.assert_allclose([posterior.mean[0], posterior.deviation[0]], [mean, deviation], rtol=1e-6)
    assert abs(logs.mean() - mean) < 4 * deviation / 600**0.5
    assert abs(logs.std() / deviation - 1) < 0.12


@pytest.mark.slow
def test_no_draw_is_ruled_out_by_what_was_measured_though_normal_ones_are() -> None:
    """Normal draws make some path longer whatever they do: they are slower on average, fitted ones are not."""
    fitted, normal = [], []
    for seed in range(6):
        model, posterior, plans, true_s = measured(seed)
        generator = np.random.default_rng(seed)
        fitted.append(missed([model.draw(generator) for _ in range(16)], plans, true_s))
        normal.append(missed([posterior.draw(generator) for _ in range(16)], plans, true_s))
    assert np.abs(np.mean(fitted)) < 0.005
    assert np.mean(normal) > 0.01
    assert np.sqrt(np.mean(np.square(fitted))) < 0.02
    assert np.sqrt(np.mean(np.square(normal))) > 0.03


def test_before_anything_is_measured_they_are_draws_of_the_prior() -> None:
    scales = measured(0)[0].scales
    model, generator = HostModel(scales, SURE), np.random.default_rng(0)
    logs = [np.log(model.draw(generator).costs.op_time_s[-1, 0]) for _ in range(400)]
    places = [scales.type_at[-1, 0], scales.device_at[0]]
    assert 0.85 < np.std(logs) / np.linalg.norm(scales.deviation[places]) < 1.15


@pytest.mark.slow
def test_what_no_plan_tells_is_as_uncertain_as_before() -> None:
    """All plans on one device: no copy is ever made."""
    scales = Scales(learnable_problem(paired_host(3), 24), Prior(overhead_s=0.1))
    plans = varied_plans(scales.problem, np.random.default_rng(0), 1)
    alone = Simulator(scales.problem, threads=1).plan(np.zeros_like(plans[0].devices))
    model = HostModel(scales, SURE)
    model.add([alone] * 4, 1.3 * step_times(scales.problem, [alone] * 4))
    model.fit()
    drawn, generator = [], np.random.default_rng(1)
    for _ in range(300):
        problem = model.draw(generator)
        drawn.append([np.log(link.bandwidth_bytes_per_s) for link in problem.host.links])
    np.testing.assert_allclose(np.std(drawn, axis=0), scales.prior.bandwidth, rtol=0.2)


def test_drawing_changes_no_fit_and_repeats() -> None:
    model, posterior, _, _ = measured(3)
    one, other = (model.draw(np.random.default_rng(5)) for _ in range(2))
    assert np.array_equal(one.costs.op_time_s, other.costs.op_time_s)
    assert one.host == other.host
    assert np.array_equal(model.fit().mean, measured(3)[0].fit().mean)
    assert np.array_equal(posterior.mean, measured(3)[1].mean)


def test_nothing_that_ran_is_the_prior() -> None:
    model = HostModel(Scales(learnable_problem(paired_host(2), 8)), SURE)
    plans = varied_plans(model.scales.problem, np.random.default_rng(0), 2)
    model.add(plans, [np.inf, np.inf])
    model.fit()
    assert model.draw(np.random.default_rng(0)).host.num_devices == model.scales.problem.host.num_devices
