"""What fits and draws find: known factors, as surely as they say, and nothing where nothing was measured."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from host_models import learnable_problem, paired_host, step_times, varied_plans
from hypothesis import given, settings
from hypothesis import strategies as st
from micrographs import op_graph
from random_problems import plain_host, problem_of, random_problem

from rlplace.errors import InvalidValue
from rlplace.measure.host_model import FitConfig, HostModel, Posterior, Prior, Scales
from rlplace.measure.host_model.fit import PathTerms
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Plan, Problem, single_device_plan
from rlplace.measure.simulate.simulator import Simulator

WIDE = Prior(op_type=1.0, device=0.5, bandwidth=1.0, latency=1.0, overhead_s=0.1, overhead=1.0)
EXACT = FitConfig(noise=1e-7, misfit=0.0, far=0.0, sharpness=1e9, max_rounds=50, max_iterations=30)
"""Times without noise: the soft maximum over paths, a thousandth of a step by default, must not be softer than that."""
ONE_PERCENT = FitConfig(noise=0.01, misfit=0.0, far=0.0)


def scales_of(host: Host, prior: Prior = WIDE, num_ops: int = 24) -> Scales:
    return Scales(learnable_problem(host, num_ops), prior)


def gauge(scales: Scales) -> np.ndarray:
    """(P,) of length 1, in deviations of the prior: all op types slower and all devices faster by one factor."""
    sign = np.array([{"op type": 1.0, "device": -1.0}.get(item.kind, 0.0) for item in scales.items])
    found: np.ndarray = sign / scales.deviation
    return found / np.linalg.norm(found)


def learned(scales: Scales, plans: list[Plan], times_s: np.ndarray, config: FitConfig = ONE_PERCENT) -> HostModel:
    model = HostModel(scales, config)
    model.add(plans, times_s)
    return model


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_recovers_known_factors_from_times_without_noise(seed: int) -> None:
    """But for what no step time depends on, which stays as the prior has it."""
    scales, generator = scales_of(paired_host(3)), np.random.default_rng(seed)
    plans = varied_plans(scales.problem, generator, 60)
    z, free = 0.5 * generator.standard_normal(len(scales)), gauge(scales)
    x = (z - free * (free @ z)) * scales.deviation
    posterior = learned(scales, plans, step_times(scales.apply(x), plans), EXACT).fit()
    np.testing.assert_allclose(posterior.mean, x, atol=1e-6)
    times_s = step_times(scales.apply(x), plans)
    np.testing.assert_allclose(step_times(posterior.problem, plans), times_s, rtol=1e-8)


def test_recovers_links_that_routes_share_where_each_is_the_slowest_of_some_route() -> None:
    scales, generator = scales_of(plain_host(4, 100.0), replace(WIDE, device=0.0)), np.random.default_rng(0)
    plans = varied_plans(scales.problem, generator, 80)
    x = np.array([0.3 * generator.standard_normal() for _ in scales.items])
    for place, item in enumerate(scales.items):  # every way up slower than all ways down but that of device 3
        if item.kind == "bandwidth":
            x[place] = {"up": -0.5, "down": 0.2}[item.name.split()[0]] + 0.1 * x[place]
    times_s = step_times(scales.apply(x), plans)
    posterior = learned(scales, plans, times_s, EXACT).fit()
    slow = [place for place, item in enumerate(scales.items) if not item.name.startswith("down")]
    np.testing.assert_allclose(posterior.mean[slow], x[slow], atol=1e-6)
    np.testing.assert_allclose(step_times(posterior.problem, plans), times_s, rtol=1e-8)


@pytest.mark.slow
def test_intervals_hold_what_they_should_and_predictions_beat_the_prior() -> None:
    """200 draws of all factors from the prior, 32 plans measured with 1 % of noise, 20 others predicted.

    The worst draw (164) is off by 2.4 % on average and by 5.7 % at most, and is no failed descent: other factors
    explain its 32 times better than a fit that begins at the true ones (loss 15.4 and 16.6). In the second worst (58,
    1.9 %) all descents ended in a poorer minimum (27.0 and 16.3). Relative to the prior the worst (98) is one that had
    little to learn: its factors change these plans by 3 %.
    """
    scales = scales_of(paired_host(3), Prior(overhead_s=0.1), 20)
    inside, errors = [], []
    nominal = scales.apply(np.zeros(len(scales)))
    for seed in range(200):
        generator = np.random.default_rng(seed)
        x = generator.standard_normal(len(scales)) * scales.deviation
        true, plans = scales.apply(x), varied_plans(scales.problem, generator, 32)
        posterior = learned(scales, plans, step_times(true, plans) * generator.lognormal(0.0, 0.01, 32)).fit()
        inside.append(np.abs(posterior.mean - x) <= 1.96 * posterior.deviation)
        held = varied_plans(scales.problem, generator, 20)
        target = np.log(step_times(true, held))
        errors.append(
            [np.abs(np.log(step_times(known, held)) - target).mean() for known in (nominal, posterior.problem)]
        )
    of_prior, of_fits = np.array(errors).T
    assert 0.88 <= np.mean(inside) <= 0.99
    assert of_fits.mean() < 0.05 * of_prior.mean()
    assert of_fits.max() < 0.03
    assert (of_fits < 0.5 * of_prior).all()


def test_a_link_that_no_plan_uses_stays_at_the_prior() -> None:
    scales, generator = scales_of(paired_host(3)), np.random.default_rng(1)
    plans = [plan for plan in varied_plans(scales.problem, generator, 400) if not uses(plan, scales, 2, 0)][:20]
    assert len(plans) > 5
    x = generator.standard_normal(len(scales)) * scales.deviation
    posterior = learned(scales, plans, step_times(scales.apply(x), plans)).fit()
    unused = [place for place, item in enumerate(scales.items) if item.name == "d2>d0"]
    assert len(unused) == 2
    np.testing.assert_allclose(posterior.mean[unused], 0.0, atol=1e-12)
    np.testing.assert_allclose(posterior.deviation[unused], scales.deviation[unused], rtol=1e-12)
    used = np.setdiff1d(np.arange(len(scales)), unused)
    assert (posterior.root @ posterior.root.T)[np.ix_(unused, used)] == pytest.approx(0.0, abs=1e-12)


def uses(plan: Plan, scales: Scales, source: int, destination: int) -> bool:
    producers = plan.devices[scales.problem.graph.tensor_op[plan.transfer_tensor]]
    return bool(np.any((producers == source) & (plan.transfer_destination == destination)))


def test_a_sum_may_be_known_and_the_difference_not() -> None:
    """One device with one op type: only the product of both factors shows."""
    problem = learnable_problem(plain_host(1))
    problem = replace(problem, graph=replace(problem.graph, targets=("aten.mm",) * 24))
    scales = Scales(problem, Prior(op_type=0.4, device=0.3, bandwidth=0.0, latency=0.0, overhead_s=0.0))
    plans = varied_plans(problem, np.random.default_rng(0), 1)
    posterior = learned(scales, plans, 1.5 * step_times(problem, plans), replace(ONE_PERCENT, noise=1e-4)).fit()
    assert posterior.mean.sum() == pytest.approx(np.log(1.5), abs=1e-6)
    # the prior shares it out by its variances, and knows the rest as well as before
    np.testing.assert_allclose(posterior.mean, np.log(1.5) * np.array([0.16, 0.09]) / 0.25, atol=1e-6)
    covariance = posterior.root @ posterior.root.T
    assert np.sqrt(covariance.sum()) == pytest.approx(1e-4, rel=1e-3)
    rest = np.array([1 / 0.4, -1 / 0.3])  # in deviations of the prior, across what was measured
    rest_z = gauge(scales)
    assert rest_z @ (covariance / np.outer(scales.deviation, scales.deviation)) @ rest_z == pytest.approx(1.0, rel=1e-6)
    np.testing.assert_allclose(rest / np.linalg.norm(rest), rest_z)


def test_the_order_of_batches_does_not_matter() -> None:
    scales, generator = scales_of(paired_host(3)), np.random.default_rng(2)
    plans = varied_plans(scales.problem, generator, 40)
    x = 0.5 * generator.standard_normal(len(scales)) * scales.deviation
    times_s = step_times(scales.apply(x), plans) * generator.lognormal(0.0, 0.01, 40)
    at_once = learned(scales, plans, times_s).fit()
    bit_by_bit = HostModel(scales, ONE_PERCENT)
    for batch in np.split(generator.permutation(40), 8):
        bit_by_bit.add([plans[k] for k in batch], times_s[batch])
        last = bit_by_bit.fit()
    assert bit_by_bit.num_measured == 40
    assert last.loss == pytest.approx(at_once.loss, abs=0.1)  # of half a chi-squared of 40: one is as good as the other
    assert (np.abs(last.mean - at_once.mean) < 0.5 * at_once.deviation).all()


def test_fitting_again_changes_nothing_and_measuring_again_is_more_sure() -> None:
    scales, generator = scales_of(paired_host(2)), np.random.default_rng(3)
    plans = varied_plans(scales.problem, generator, 30)
    times_s = step_times(scales.apply(0.3 * generator.standard_normal(len(scales))), plans)
    model = learned(scales, plans, times_s)
    once, again = model.fit(), model.fit()
    assert again.loss <= once.loss * (1 + 1e-9)
    assert (np.abs(again.mean - once.mean) < 0.05 * once.deviation).all()
    model.add(plans, times_s)
    twice = model.fit()
    halved = learned(scales, plans, times_s, replace(ONE_PERCENT, noise=0.01 / np.sqrt(2))).fit()
    np.testing.assert_allclose(twice.deviation, halved.deviation, rtol=0.02)
    assert (twice.deviation <= once.deviation * 1.02).all()


SCALES = Scales(learnable_problem(paired_host(2), 12), Prior(overhead_s=0.1))


def measured(count: int = 9, slower: float = 1.5) -> tuple[list[Plan], np.ndarray]:
    """Plans, and their times on a host that is slower by one factor."""
    plans = varied_plans(SCALES.problem, np.random.default_rng(0), count)
    return plans, slower * step_times(SCALES.problem, plans)


def is_prior(posterior: Posterior) -> bool:
    return not posterior.mean.any() and np.array_equal(posterior.deviation, SCALES.deviation)


def test_nothing_measured_is_the_prior() -> None:
    model = HostModel(SCALES)
    assert is_prior(model.fit())
    assert model.num_measured == 0
    assert model.held_out_errors() == (0.0, 0.0)


def test_what_failed_teaches_nothing() -> None:
    plans, times_s = measured()
    model, alone = HostModel(SCALES), HostModel(SCALES)
    model.add(plans[:3], [math.inf] * 3)
    assert model.num_measured == 0
    assert is_prior(model.fit())
    model.add([*plans, plans[0]], [*times_s, math.inf])
    alone.add(plans, times_s)
    assert model.num_measured == 9
    np.testing.assert_array_equal(model.fit().mean, alone.fit().mean)


def test_plans_that_are_simulated_beyond_memory_teach_nothing() -> None:
    """They ran: the model of memory is wrong, not the times of the others."""
    plans, times_s = measured(12)
    host = SCALES.problem.host
    devices = (host.devices[0], replace(host.devices[1], memory_bytes=1))
    tight = Scales(replace(SCALES.problem, host=replace(host, devices=devices)), SCALES.prior)
    fits = [plan for plan in plans if not plan.devices.any()]
    assert not fits
    plans = [*plans, single_device_plan(SCALES.problem.graph, 0)]
    model = HostModel(tight)
    model.add(plans[:12], times_s)
    assert not model.fit().mean.any()
    model.add(plans[12:], [1.5 * step_times(SCALES.problem, plans[12:])[0]])
    assert model.fit().mean.any()
    assert np.isfinite(model.held_out_errors()).all()


def test_a_fit_that_has_not_seen_a_plan_predicts_it_better_than_the_prior() -> None:
    plans, times_s = measured(30)
    model = HostModel(SCALES)
    model.add(plans, times_s)
    of_prior, of_fits = model.held_out_errors()
    nominal = SCALES.apply(np.zeros(len(SCALES)))
    assert of_prior == pytest.approx(np.abs(np.log(step_times(nominal, plans) / times_s)).mean())
    assert 0 < of_fits < 0.2 * of_prior


def test_fewer_plans_than_folds_are_not_held_out() -> None:
    model = HostModel(SCALES)
    model.add(*measured(2))
    assert model.held_out_errors(folds=3) == (0.0, 0.0)
    assert model.held_out_errors(folds=2) != (0.0, 0.0)


def test_noise_weighs_measurements() -> None:
    plans, times_s = measured(1)
    shares = []
    for noise in (0.001, 10.0):
        model = HostModel(SCALES, FitConfig(misfit=0.0, far=0.0))
        model.add(plans, times_s, [noise])
        shares.append(
            np.log(step_times(model.fit().problem, plans) / step_times(SCALES.apply(0 * SCALES.deviation), plans))
        )
    assert shares[0] == pytest.approx(np.log(times_s / step_times(SCALES.apply(0 * SCALES.deviation), plans)), abs=1e-3)
    assert abs(shares[1][0]) < 0.01


def test_far_plans_weigh_less_than_those_near_the_fastest() -> None:
    """One plan twice: it cannot take both, and is believed where it was fast."""
    plans, times_s = measured(1)
    model = HostModel(SCALES)
    model.add([plans[0], plans[0]], [times_s[0], 2 * times_s[0]])
    found = step_times(model.fit().problem, plans)[0]
    assert abs(math.log(found / times_s[0])) < 0.2 * math.log(2)


@pytest.mark.parametrize("noise", [0.0, 0.03, 1.0])
def test_a_plan_is_expected_to_take_what_a_fit_says_corrected_as_far_as_noise_allows(noise: float) -> None:
    """The fit is that of nothing: of what it misses, the mean square but for the noise is no noise."""
    plans, _ = measured(4)
    said_s, missed = step_times(SCALES.problem, plans), np.array([0.02, 0.04, 0.02, 0.04])
    times_s = said_s.min() * np.exp(missed)
    known = Posterior.prior(SCALES)
    fitted_s = step_times(known.problem, plans)
    model = HostModel(SCALES)
    model.add(plans, times_s, [noise] * 4)
    found = model.expected_s(known)
    away = np.log(times_s / fitted_s)
    share = {0.0: 1.0, 0.03: 1 - 0.03**2 / np.mean(away**2), 1.0: 0.0}[noise]
    assert [found[plan.fingerprint] for plan in plans] == pytest.approx((fitted_s * np.exp(share * away)).tolist())


def test_of_a_plan_that_was_measured_again_the_mean_is_expected() -> None:
    plans, times_s = measured(2)
    model = HostModel(SCALES)
    model.add([*plans, plans[0]], [*times_s, 1.21 * times_s[0]], [0.0] * 3)
    found = model.expected_s(Posterior.prior(SCALES))
    assert found[plans[0].fingerprint] == pytest.approx(1.1 * times_s[0])
    assert found[plans[1].fingerprint] == pytest.approx(times_s[1])
    assert HostModel(SCALES).expected_s(Posterior.prior(SCALES)) == {}


def test_what_is_said_to_be_exact_does_not_divide_by_nothing() -> None:
    plans, times_s = measured(3)
    model = HostModel(SCALES, FitConfig(noise=0.0, misfit=0.0, far=0.0, sharpness=1e9))
    model.add(plans, times_s)
    np.testing.assert_allclose(step_times(model.fit().problem, plans), times_s, rtol=1e-6)


@pytest.mark.parametrize("times_s", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, math.nan], [[1.0, 2.0]]])
def test_times_are_positive_and_one_for_each_plan(times_s: list[float]) -> None:
    model = HostModel(SCALES)
    with pytest.raises(InvalidValue, match="step_times_s"):
        model.add(measured(2)[0], times_s)
    assert model.num_measured == 0


@pytest.mark.parametrize("noise", [[0.1], [0.1, -0.1], [0.1, math.nan], [0.1, math.inf]])
def test_noise_is_one_number_for_each_plan(noise: list[float]) -> None:
    with pytest.raises(InvalidValue, match="noise"):
        HostModel(SCALES).add(*measured(2), noise)


def test_a_plan_of_another_problem_changes_nothing() -> None:
    plans, times_s = measured()
    model = HostModel(SCALES)
    model.add(plans, times_s)
    before = model.fit().mean
    other = varied_plans(learnable_problem(paired_host(2), 13), np.random.default_rng(0), 1)
    with pytest.raises(InvalidValue):
        model.add(other, [1.0])
    assert model.num_measured == 9
    np.testing.assert_allclose(model.fit().mean, before, atol=0.01)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("noise", -0.1),
        ("misfit", math.nan),
        ("far", math.inf),
        ("tolerance", -1.0),
        ("max_rounds", 0),
        ("max_iterations", 0),
        ("paths", 0),
        ("restarts", -1),
        ("sharpness", 0.0),
        ("sharpness", math.nan),
    ],
)
def test_a_configuration_is_checked(name: str, value: float) -> None:
    with pytest.raises(InvalidValue, match=name):
        FitConfig(**{name: value})  # type: ignore[arg-type]


SURE = FitConfig(noise=0.01, misfit=0.0, far=0.0)


def of_a_hidden_host(seed: int, *, count: int = 16) -> tuple[HostModel, Posterior, list[Plan], np.ndarray]:
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
        model, posterior, plans, true_s = of_a_hidden_host(seed)
        generator = np.random.default_rng(seed)
        fitted.append(missed([model.draw(generator) for _ in range(16)], plans, true_s))
        normal.append(missed([posterior.draw(generator) for _ in range(16)], plans, true_s))
    assert np.abs(np.mean(fitted)) < 0.005
    assert np.mean(normal) > 0.01
    assert np.sqrt(np.mean(np.square(fitted))) < 0.02
    assert np.sqrt(np.mean(np.square(normal))) > 0.03


def test_before_anything_is_measured_they_are_draws_of_the_prior() -> None:
    scales = of_a_hidden_host(0)[0].scales
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
    model, posterior, _, _ = of_a_hidden_host(3)
    one, other = (model.draw(np.random.default_rng(5)) for _ in range(2))
    assert np.array_equal(one.costs.op_time_s, other.costs.op_time_s)
    assert one.host == other.host
    assert np.array_equal(model.fit().mean, of_a_hidden_host(3)[0].fit().mean)
    assert np.array_equal(posterior.mean, of_a_hidden_host(3)[1].mean)


def test_nothing_that_ran_is_the_prior() -> None:
    model = HostModel(Scales(learnable_problem(paired_host(2), 8)), SURE)
    plans = varied_plans(model.scales.problem, np.random.default_rng(0), 2)
    model.add(plans, [np.inf, np.inf])
    model.fit()
    assert model.draw(np.random.default_rng(0)).host.num_devices == model.scales.problem.host.num_devices


PRIOR = Prior(overhead_s=0.1)
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=100, deadline=None)


def linear_problem(rng: np.random.Generator, num_ops: int) -> Problem:
    """Any problem without launches and co-running."""
    problem = random_problem(rng, num_ops)
    host = replace(problem.host, dispatch_s=0.0, copy_dispatch_s=0.0, corun_slowdown=())
    return replace(problem, host=host)


def random_placements(rng: np.random.Generator, problem: Problem, count: int) -> np.ndarray:
    return rng.integers(0, problem.host.num_devices, (count, problem.graph.num_ops)).astype(np.int32)


def test_the_terms_of_a_path_by_hand() -> None:
    """Two ops and a copy of 100 bytes over two links: 1 + (0.05 + 100 / 50) + 2 s, and an overhead for each op."""
    graph = op_graph([[], [0]], 100, targets=["aten.mm", "aten.add"])
    host = plain_host(2, 100.0, 0.05)
    slow = tuple(replace(link, bandwidth_bytes_per_s=50.0) if link.name == "down d1" else link for link in host.links)
    problem = problem_of(graph, replace(host, links=slow), np.array([[1.0, 3.0], [4.0, 2.0]]))
    terms = PathTerms(Scales(problem, PRIOR))
    simulator, x = Simulator(problem, threads=1), np.zeros(len(terms.scales))
    batch = simulator.check_plans([simulator.plan(np.array([0, 1], dtype=np.int32))])
    step_s, rows = terms.of(x, batch)
    seconds, exponents = terms.seconds_and_exponents(x)
    assert step_s == pytest.approx([5.25])
    assert sorted((rows[0] * seconds)[rows[0] > 1e-9].tolist()) == pytest.approx([0.05, 0.2, 1.0, 2.0, 2.0])
    slopes = dict(zip([(i.kind, i.name) for i in terms.scales.items], (rows * seconds @ exponents)[0], strict=True))
    expected = {
        ("op type", "aten.mm on any"): 1.0,
        ("op type", "aten.add on any"): 2.0,
        ("device", "d0"): 1.0,
        ("device", "d1"): 2.0,
        ("bandwidth", "down d1"): -2.0,  # the slower of the two
        ("latency", "up d0"): 0.025,  # both are equally late
        ("latency", "down d1"): 0.025,
        ("overhead", "every op"): 0.2,
    }
    assert {name: slope for name, slope in slopes.items() if slope} == pytest.approx(expected)


@given(seed=seeds, num_ops=st.integers(1, 40))
@few
def test_terms_are_the_step_time_and_bound_it_under_other_factors(seed: int, num_ops: int) -> None:
    rng = np.random.default_rng(seed)
    problem = linear_problem(rng, num_ops)
    terms = PathTerms(Scales(problem, PRIOR))
    simulator, scales = Simulator(problem, threads=1), terms.scales
    batch = simulator.check_plans([simulator.plan(devices) for devices in random_placements(rng, problem, 3)])
    x, other = rng.normal(size=(2, len(scales))) * scales.deviation
    step_s, rows = terms.of(x, batch)
    timed = [
        np.array([m.step_time_s for m in Simulator(scales.apply(at), threads=1).retime_batch(batch)])
        for at in (x, other)
    ]
    fits = np.isfinite(step_s)
    np.testing.assert_array_equal(step_s, timed[0])
    np.testing.assert_allclose((rows @ terms.seconds(x))[fits], step_s[fits], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(rows[fits, -1], 0.0, atol=1e-12 * step_s[fits].max(initial=1.0))  # no factor is missing
    assert (rows[~fits] == 0).all()
    assert ((rows @ terms.seconds(other))[fits] <= timed[1][fits] * (1 + 1e-12) + 1e-12).all()


@pytest.mark.parametrize("host", [paired_host(3), plain_host(3, 100.0, 0.05)], ids=["a link a pair", "shared links"])
def test_slopes_are_those_of_the_simulator(host: Host) -> None:
    problem, rng = learnable_problem(host), np.random.default_rng(3)
    terms, plans = PathTerms(Scales(problem, PRIOR)), varied_plans(problem, np.random.default_rng(4), 10)
    scales, x = terms.scales, rng.normal(size=len(terms.scales)) * 0.3
    _, rows = terms.of(x, Simulator(problem, threads=1).check_plans(plans))
    seconds, exponents = terms.seconds_and_exponents(x)
    for place in range(len(scales)):
        ends = [step_times(scales.apply(x + sign * 1e-6 * np.eye(len(scales))[place]), plans) for sign in (1, -1)]
        np.testing.assert_allclose((rows * seconds @ exponents)[:, place], (ends[0] - ends[1]) / 2e-6, atol=1e-5)


@given(seed=seeds, num_ops=st.integers(2, 30))
@few
def test_with_launches_and_co_running_they_are_exact_where_they_were_found(seed: int, num_ops: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, num_ops)
    terms = PathTerms(Scales(problem, replace(PRIOR, dispatch=0.5, dispatch_s=0.2, corun_deviation=0.5)))
    simulator, x = Simulator(problem, threads=1), rng.normal(size=len(terms.scales)) * terms.scales.deviation
    batch = simulator.check_plans([simulator.plan(devices) for devices in random_placements(rng, problem, 2)])
    step_s, rows = terms.of(x, batch)
    fits = np.isfinite(step_s)
    assert np.isfinite(rows).all()
    assert (rows[~fits] == 0).all()
    np.testing.assert_allclose((rows @ terms.seconds(x))[fits], step_s[fits], rtol=1e-9, atol=1e-9)


def test_a_launch_has_the_slope_that_the_simulator_says() -> None:
    """A chain of cheap ops is launched one after the other: its step takes as long as its launches."""
    graph = op_graph([[], [0], [1], [2]])
    problem = problem_of(graph, plain_host(1), np.full((4, 1), 0.1))
    scales = Scales(problem, Prior(overhead_s=0.0, dispatch_s=1.0, dispatch=0.5))
    terms, x = PathTerms(scales), np.zeros(len(scales))
    simulator = Simulator(problem, threads=1)
    _, rows = terms.of(x, simulator.check_plans([simulator.plan(np.zeros(4, dtype=np.int32))]))
    seconds, exponents = terms.seconds_and_exponents(x)
    assert (rows * seconds @ exponents)[0, scales.dispatch_at] == pytest.approx(4.0, rel=1e-3)


@pytest.mark.parametrize("sharpness", [1.0, 8.0, 1e3])
def test_a_soft_maximum_over_links_is_below_the_maximum_and_has_its_own_slopes(sharpness: float) -> None:
    scales = Scales(learnable_problem(plain_host(3, 100.0, 0.05)), PRIOR)
    terms, x = PathTerms(scales), np.random.default_rng(5).normal(size=len(scales)) * scales.deviation
    soft, exponents = terms.seconds_and_exponents(x, sharpness)
    hard = terms.seconds(x)
    assert (soft <= hard * (1 + 1e-12)).all()
    assert (soft < hard).any()
    assert (np.log(hard / soft) <= np.log(2) / sharpness + 1e-12).all()
    for place in range(len(scales)):
        ends = [terms.seconds(x + sign * 1e-6 * np.eye(len(scales))[place], sharpness) for sign in (1, -1)]
        found = (np.log(ends[0]) - np.log(ends[1])) / 2e-6
        np.testing.assert_allclose(exponents.toarray()[:, place], found, atol=1e-4)
