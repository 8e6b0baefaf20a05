"""What other workloads taught about a host is where the next one starts: by hand, and on a host that is known."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from host_models import learnable_problem, paired_host, step_times, varied_plans

from rlplace.measure.host_model import (
    HostModel,
    LearnedHost,
    Posterior,
    Prior,
    Scales,
    TracedPrior,
    knowledge_of,
    load_learned_host,
    save_posterior,
)
from rlplace.measure.host_model.learned_host import Equation, LearnedFactor
from rlplace.measure.host_model.scales import CARRIED, Kind, Scale
from rlplace.measure.simulate.simulator import Simulator

X = Scale("bandwidth", "x", 1.0)
PRIOR = Prior(op_type=0.5, device=0.2, bandwidth=1.0, latency=0.0, overhead_s=0.1)
OWN = CARRIED["bandwidth"]
OF_HOST = 1.0 - OWN**2
"""What is the host's of the variance of a factor with deviation 1; the rest is each workload's own."""


def learned(*factors: LearnedFactor, equations: tuple[Equation, ...] = ()) -> LearnedHost:
    return LearnedHost("two", "0", "estimated", PRIOR, factors, (), equations=equations)


def seen(
    log: float, noise: float, *, kind: Kind = "bandwidth", mean: float = 0.0, median: float = 0.0, name: str = "x"
) -> LearnedFactor:
    """The posterior of a factor with deviation 1 around `mean` beforehand, seen once as `log` with `noise`."""
    variance = 1.0 / (1.0 + 1.0 / noise**2)
    return LearnedFactor(kind, name, variance * (mean + log / noise**2), math.sqrt(variance), 1.0, median, mean)


def expected(*hosts: LearnedHost, factor: Scale = X) -> tuple[float, float]:
    """Mean and variance that what runs learned gives a factor."""
    knowledge = knowledge_of(hosts, "given")
    assert knowledge is not None
    assert knowledge.num_runs == len(hosts)
    mean, root = knowledge.prior([factor])
    return float(mean[0]), float((root @ root.T)[0, 0])


def test_one_run_is_carried_with_what_differs_between_workloads() -> None:
    seen_once = 1.0 / (0.1**2 + OWN**2)
    precision = 1.0 / OF_HOST + seen_once
    assert expected(learned(seen(2.0, 0.1))) == pytest.approx((2.0 * seen_once / precision, 1 / precision + OWN**2))
    assert expected(learned(seen(2.0, 0.1)), factor=Scale("bandwidth", "y", 1.0)) == pytest.approx((0.0, 1.0))


def test_what_a_run_was_told_beforehand_does_not_count_again() -> None:
    assert expected(learned(seen(2.0, 0.1, mean=1.5))) == pytest.approx(expected(learned(seen(2.0, 0.1))))


def test_runs_are_weighed_by_how_sure_they_are() -> None:
    one, other = 1.0 / OWN**2, 0.5 / OWN**2
    mean, _ = expected(learned(seen(1.0, 1e-4)), learned(seen(3.0, OWN)))
    assert mean == pytest.approx((one + 3.0 * other) / (1.0 / OF_HOST + one + other), rel=1e-4)


def test_a_factor_on_a_figure_of_the_prior_is_carried_as_that_figure() -> None:
    run = learned(seen(math.log(2.0), 1e-3, kind="overhead", median=5e-6))
    mean, variance = expected(run, factor=Scale("overhead", "x", 1.0, 1e-5))
    assert mean == pytest.approx(0.0, abs=1e-9), "ten microseconds, as was found"
    assert variance < 0.1
    assert expected(run, factor=Scale("overhead", "x", 1.0)) == pytest.approx((0.0, 1.0))


def test_what_hardly_anything_was_learned_of_and_costs_of_another_kind_tell_nothing() -> None:
    assert knowledge_of([learned(seen(2.0, 4.0))], "estimated") is None
    assert knowledge_of([learned(seen(2.0, 0.1))], "profiled") is None
    assert knowledge_of([], "estimated") is None


def test_an_equation_in_two_factors_is_shared_with_what_the_next_workload_lacks() -> None:
    """Their sum is 2, surely: of one alone that says as much as it does of the other, which may be anything."""
    both = tuple(seen(0.0, 1.0, name=name) for name in "xy")
    run = learned(*both, equations=(Equation(2e3, (1e3, 1e3)),))
    share = OF_HOST / (2 * OF_HOST + 2 * OWN**2)
    assert expected(run) == pytest.approx((2 * share, OF_HOST * (1 - share) + OWN**2), rel=1e-5)
    knowledge = knowledge_of([run], "estimated")
    assert knowledge is not None
    assert knowledge.factors == {("bandwidth", "x"), ("bandwidth", "y")}
    mean, root = knowledge.prior([Scale("bandwidth", name, 1.0) for name in "yx"])
    total = 2 * OF_HOST / (2 * OF_HOST + 2 * OWN**2)
    assert mean == pytest.approx([total, total], rel=1e-5)
    covariance = root @ root.T
    of_sum = 2 * OF_HOST * (1 - total) + 2 * OWN**2
    assert covariance.sum() == pytest.approx(of_sum, rel=1e-4), "the sum is known better than either"
    assert covariance[0, 1] < 0


def test_two_equations_tell_a_difference_whatever_they_have_in_common() -> None:
    """x + u = 3 and y + u = 2, with any u: x is about 1 more than y."""
    every = tuple(seen(0.0, 1.0, name=name) for name in "xyu")
    run = learned(*every, equations=(Equation(3e3, (1e3, 0.0, 1e3)), Equation(2e3, (0.0, 1e3, 1e3))))
    knowledge = knowledge_of([run], "estimated")
    assert knowledge is not None
    mean, root = knowledge.prior([Scale("bandwidth", name, 1.0) for name in "xy"])
    assert mean[0] - mean[1] == pytest.approx(1.0 * OF_HOST / (OF_HOST + OWN**2), rel=1e-4)
    covariance = root @ root.T
    assert covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1] < 0.25 * np.trace(covariance)


def test_equations_and_the_prior_make_the_posterior() -> None:
    """So nothing of what a run measured is lost, and nothing of its prior is told."""
    scales = Scales(learnable_problem(paired_host(3), 24), PRIOR)
    generator = np.random.default_rng(3)
    x = 0.5 * scales.deviation * generator.standard_normal(len(scales))
    for count in (8, 60):  # fewer and more than factors
        plans = varied_plans(scales.problem, generator, count)
        model = HostModel(scales)
        model.add(plans, step_times(scales.apply(x), plans))
        posterior = model.fit()
        slopes, targets = posterior.equations()
        assert len(slopes) == min(count, len(scales))
        precision = np.diag(1.0 / scales.deviation**2) + slopes.T @ slopes
        np.testing.assert_allclose(precision @ posterior.root @ posterior.root.T, np.eye(len(scales)), atol=1e-6)
        np.testing.assert_allclose(np.linalg.solve(precision, slopes.T @ targets), posterior.mean, atol=0.02)
        told = LearnedHost.of(posterior).equations
        np.testing.assert_allclose([one.slopes for one in told], slopes, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose([one.target for one in told], targets, rtol=1e-6, atol=1e-6)


def test_what_traced_steps_told_is_in_the_equations(tmp_path: Path) -> None:
    """As with step times: the prior and the equations make the posterior. The prior is that without any trace, but for
    how far signatures differ."""
    scales = Scales(learnable_problem(paired_host(3), 24), PRIOR, None, TracedPrior())
    generator = np.random.default_rng(4)
    plans, true = varied_plans(scales.problem, generator, 4), scales.apply(0.3 * generator.standard_normal(len(scales)))
    simulator, model = Simulator(true, threads=1), HostModel(scales)
    timed = [(simulator.retime(plan), simulator.timeline(plan)) for plan in plans]
    model.learn(plans, [replace(outcome, timeline=timeline) for outcome, timeline in timed])
    posterior = model.fit()
    slopes, targets = posterior.equations()
    before = posterior.scales.untraced
    assert before is not None
    is_signature = np.array([item.kind in ("signature", "moved signature") for item in scales.items])
    assert np.array_equal(before.deviation[~is_signature], scales.deviation[~is_signature])
    precision = np.diag(1.0 / before.deviation**2) + slopes.T @ slopes
    # combinations of which traces told less than a ten-thousandth are left out
    np.testing.assert_allclose(precision @ posterior.root @ posterior.root.T, np.eye(len(scales)), atol=1e-3)
    told_s = scales.apply(np.linalg.solve(precision, slopes.T @ targets)).costs.op_time_s
    np.testing.assert_allclose(told_s, posterior.problem.costs.op_time_s, rtol=0.01)
    learned = LearnedHost.of(posterior)
    assert [factor.prior_deviation for factor in learned.factors] == before.deviation.tolist()
    assert learned.tracing is not None
    assert learned.tracing.num_steps == 4
    assert learned.tracing.share == pytest.approx(0.0, abs=1e-9), "a simulated trace costs nothing"
    assert "4 traced steps" in learned.lines[-1]
    save_posterior(posterior, path := tmp_path / "host_model.json")
    assert load_learned_host(path) == learned


def test_equations_of_a_fit_that_explains_little_say_little() -> None:
    scales = Scales(learnable_problem(paired_host(2), 8), PRIOR)
    slopes = np.zeros((2, len(scales)))
    slopes[:, 0] = 4.0
    found, _ = Posterior.of(scales, scales.mean, slopes, 0.0, np.array([3.0, -3.0])).equations()
    exact, _ = Posterior.of(scales, scales.mean, slopes, 0.0, np.array([0.3, -0.3])).equations()
    np.testing.assert_allclose(found[:, 0], 4.0 / scales.deviation[0] / 3.0)
    np.testing.assert_allclose(exact[:, 0], 4.0 / scales.deviation[0])


def test_knowledge_is_the_prior_of_the_model_and_is_kept_with_what_it_learned() -> None:
    problem = learnable_problem(paired_host(2))
    factors = seen(1.0, 0.1, name="d0>d1"), seen(1.0, 0.1, kind="device", name="d9")
    scales = Scales(problem, PRIOR, knowledge_of([learned(*factors)], "estimated"))
    place = int(scales.bandwidth_at[0])
    prior = Posterior.prior(scales)
    assert prior.mean[place] == pytest.approx(expected(learned(factors[0]), factor=Scale("bandwidth", "d0>d1", 1.0))[0])
    assert np.count_nonzero(np.abs(prior.mean) > 1e-12) == 1
    assert prior.problem.host.links[0].bandwidth_bytes_per_s == pytest.approx(
        problem.host.links[0].bandwidth_bytes_per_s * math.exp(prior.mean[place])
    )
    plans = varied_plans(problem, np.random.default_rng(0), 3)
    model = HostModel(scales)
    assert model.fit().mean.tolist() == prior.mean.tolist()
    model.add(plans, step_times(prior.problem, plans))
    posterior = model.fit()
    assert posterior.loss == pytest.approx(0.0, abs=1e-6)
    (kept,) = (factor for factor in LearnedHost.of(posterior).factors if factor.name == "d0>d1")
    assert (kept.prior_mean, kept.prior_deviation) == (scales.mean[place], scales.deviation[place])


def test_slopes_in_deviations_and_back() -> None:
    problem = learnable_problem(paired_host(2), 8)
    both = tuple(seen(0.0, 1.0, name=name) for name in ("d0>d1", "d1>d0"))
    known = knowledge_of([learned(*both, equations=(Equation(2e3, (1e3, 1e3)),))], "estimated")
    for scales in (Scales(problem, PRIOR), Scales(problem, PRIOR, known)):
        slopes = np.random.default_rng(0).normal(size=(3, len(scales)))
        np.testing.assert_allclose(scales.unspread(scales.slopes_of(slopes)), slopes, rtol=1e-9)
        z = np.arange(len(scales)) / 10.0
        np.testing.assert_allclose(slopes @ (scales.at(z) - scales.mean), scales.slopes_of(slopes) @ z, rtol=1e-9)


def test_a_second_workload_predicts_better_with_what_the_first_one_taught() -> None:
    """From few measured steps, which tell little of any one factor, better still from how the factors depend."""
    errors = []
    for seed in range(12):
        generator = np.random.default_rng(seed)
        first, second = (learnable_problem(paired_host(3), num_ops, seed=9) for num_ops in (24, 30))
        hidden, other = Scales(first, PRIOR), Scales(second, PRIOR)
        assert [item.name for item in hidden.items] == [item.name for item in other.items]
        x = hidden.deviation * generator.standard_normal(len(hidden))
        plans = varied_plans(first, generator, 10)
        model = HostModel(hidden)
        model.add(plans, step_times(hidden.apply(x), plans))
        kept = LearnedHost.of(model.fit())
        unseen = varied_plans(second, generator, 20)
        true_s = step_times(other.apply(x), unseen)
        known = [knowledge_of([one], second.costs.source) for one in (kept, replace(kept, equations=()))]
        priors = [Posterior.prior(Scales(second, PRIOR, one)) for one in (*known, None)]
        drawn = [[prior.draw(np.random.default_rng(draw)) for draw in range(6)] for prior in priors]
        errors.append([np.mean([np.abs(np.log(step_times(one, unseen) / true_s)) for one in each]) for each in drawn])
    together, one_by_one, nothing = np.mean(errors, axis=0)
    assert together < one_by_one
    assert together < 0.6 * nothing
