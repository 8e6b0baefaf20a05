"""What a run keeps of what it learned about its host, and where the next one starts: by hand, and on known hosts."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from host_models import learnable_problem, paired_host, step_times, varied_plans
from micrographs import fork_join
from random_problems import problem_of

from rlplace.errors import FileProblem, InvalidValue, UnknownName
from rlplace.measure import Device, Host, Link, Route
from rlplace.measure.host_model import (
    HostModel,
    LearnedHost,
    Posterior,
    Prior,
    Scales,
    TracedPrior,
    describe,
    knowledge_of,
    load_learned_host,
    save_posterior,
)
from rlplace.measure.host_model.learned_host import Equation, LearnedFactor
from rlplace.measure.host_model.scales import CARRIED, Kind, Scale
from rlplace.measure.simulate.simulator import Simulator

PRIOR = Prior(op_type=0.2, dispatch_s=4e-6, dispatch=1.0, corun=0.1, corun_deviation=0.5)


def posterior(dispatch_s: float = 0.0, corun_slowdown: tuple[tuple[float, ...], ...] = ()) -> Posterior:
    """Links have half the bandwidth given, surely; everything else is as before, half as uncertain."""
    graph = fork_join(2, 2, 100)
    devices = tuple(Device(f"d{k}", "k", "simulated", 1 << 30, memory_pool="ram", dispatcher="lock") for k in range(2))
    routes = (Route("d0", "d1", ("wire",)), Route("d1", "d0", ("wire",)))
    host = Host(
        "two", devices, (Link("wire", 1e9, 1e-5),), routes, dispatch_s=dispatch_s, corun_slowdown=corun_slowdown
    )
    scales = Scales(problem_of(graph, host, np.full((graph.num_ops, 2), 1e-3), source="profiled"), PRIOR)
    mean, deviation = np.zeros(len(scales)), scales.deviation / 2
    mean[scales.bandwidth_at[0]], deviation[scales.bandwidth_at[0]] = np.log(0.5), 0.05
    return Posterior(scales, mean, np.diag(deviation))


def test_what_is_saved_loads_as_equal_from_a_run_folder_or_the_file(tmp_path: Path) -> None:
    known = posterior()
    save_posterior(known, tmp_path)
    learned = load_learned_host(tmp_path)
    assert learned == load_learned_host(tmp_path / "host_model.json") == LearnedHost.of(known)
    assert (learned.host, learned.host_fingerprint) == ("two", known.scales.problem.host.fingerprint)
    assert (learned.cost_source, learned.prior) == ("profiled", PRIOR)
    assert learned.lines == ("wire has 0.5 of the bandwidth given (0.45 to 0.55)",)
    (wire,) = (factor for factor in learned.factors if factor.kind == "bandwidth")
    assert (wire.name, wire.log_mean, wire.prior_deviation) == ("wire", np.log(0.5), 0.6)
    assert wire.log_deviation == pytest.approx(0.05, rel=1e-15)
    assert [factor.kind for factor in learned.factors] == [item.kind for item in known.scales.items]


def test_it_says_which_figure_of_the_prior_a_factor_is_on() -> None:
    medians = {factor.kind: factor.median for factor in LearnedHost.of(posterior()).factors}
    assert medians.pop("overhead") == 5e-6
    assert medians.pop("dispatch") == 4e-6
    assert medians.pop("co-run") == 0.1
    assert set(medians.values()) == {0.0}


def test_a_factor_on_a_figure_of_the_host_is_on_none_of_the_priors() -> None:
    learned = LearnedHost.of(posterior(1e-6, ((0.0, 0.2), (0.2, 0.0))))
    medians = {factor.kind: factor.median for factor in learned.factors}
    assert (medians["overhead"], medians["dispatch"], medians["co-run"]) == (5e-6, 0.0, 0.0)


def test_the_prior_is_saved_with_nothing_to_say(tmp_path: Path) -> None:
    save_posterior(Posterior.prior(posterior().scales), tmp_path / "host.json")
    learned = load_learned_host(tmp_path / "host.json")
    assert learned.lines == ()
    assert all((factor.log_mean, factor.log_deviation) == (0.0, factor.prior_deviation) for factor in learned.factors)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"schema": 2}, InvalidValue, "schema is 2, expected 1"),
        ({"cost_source": "guessed"}, UnknownName, "unknown cost_source .* 'guessed'"),
        ({"prior": {"device": -0.1}}, InvalidValue, r"prior\.device is -0\.1"),
        ({"factors": {}}, InvalidValue, "factors is a mapping of 0 fields, expected a list"),
        ({"kind": "op types"}, UnknownName, r"unknown factors\[0\]\.kind .* did you mean 'op type'"),
        ({"log_mean": None}, InvalidValue, r"factors\[0\]\.log_mean is empty, expected a number"),
        ({"log_deviation": 0.0}, InvalidValue, r"factors\[0\]\.log_deviation is 0\.0, expected at least"),
        ({"median": -1.0}, InvalidValue, r"factors\[0\]\.median is -1\.0"),
    ],
)
def test_a_file_with_a_mistake_is_refused_with_what_it_is(
    change: dict[str, object], error: type[Exception], words: str, tmp_path: Path
) -> None:
    facts = json.loads(json.dumps({**dataclasses.asdict(LearnedHost.of(posterior()))}))
    into = facts if set(change) <= set(facts) else facts["factors"][0]
    into.update(change)
    (tmp_path / "host_model.json").write_text(json.dumps(facts))
    with pytest.raises(error, match=words):
        load_learned_host(tmp_path)


def test_what_is_no_file_of_a_host_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match=r"host_model\.json: no such file\. Name run folders"):
        load_learned_host(tmp_path)
    (tmp_path / "host_model.json").write_text('{"devices": []}')
    with pytest.raises(InvalidValue, match=r"a mapping with `factors`\. Name run folders"):
        load_learned_host(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"schema": 1, "workload": "nmt"}))
    with pytest.raises(InvalidValue, match=r"config\.json: host model .* Name run folders"):
        load_learned_host(tmp_path / "config.json")


def test_equations_are_kept_and_a_mistake_in_them_is_named(tmp_path: Path) -> None:
    scales = posterior().scales
    slopes = np.random.default_rng(0).normal(size=(2, len(scales)))
    save_posterior(Posterior.of(scales, scales.mean, slopes, 0.0, np.array([0.1, 0.2])), tmp_path)
    learned = load_learned_host(tmp_path)
    np.testing.assert_allclose([one.slopes for one in learned.equations], slopes / scales.deviation, rtol=1e-7)
    np.testing.assert_allclose([one.target for one in learned.equations], [-0.1, -0.2], rtol=1e-7)
    facts = dataclasses.asdict(learned)
    for change, words in (
        ({"slopes": [1.0]}, rf"equations\[0\]\.slopes is 1, expected {len(scales)} numbers"),
        ({"slopes": [1e300] * len(scales)}, r"equations\[0\]\.slopes\[0\] is 1e\+300, expected at most"),
        ({"target": "2"}, r"equations\[0\]\.target is '2'"),
    ):
        wrong = json.loads(json.dumps(facts))
        wrong["equations"][0].update(change)
        (tmp_path / "host_model.json").write_text(json.dumps(wrong))
        with pytest.raises(InvalidValue, match=words):
            load_learned_host(tmp_path)
    facts.pop("equations")  # as files were before
    (tmp_path / "host_model.json").write_text(json.dumps(facts))
    assert load_learned_host(tmp_path).equations == ()


PLAIN_SCALES = Scales(learnable_problem(paired_host(2), 8), Prior(op_type=0.5, device=0.1, overhead_s=0.1, latency=0.0))


def test_the_prior_is_what_the_scales_say() -> None:
    prior = Posterior.prior(PLAIN_SCALES)
    np.testing.assert_array_equal(prior.root @ prior.root.T, np.diag(PLAIN_SCALES.deviation**2))
    np.testing.assert_array_equal(prior.deviation, PLAIN_SCALES.deviation)
    assert not prior.mean.any()
    assert prior.loss == 0.0


def test_measurements_add_to_the_precision() -> None:
    """A residual that changes by 3 for a deviation of one factor, and by 4 for one of another: 1 + 5^2 along (3, 4)."""
    slopes = np.zeros((1, len(PLAIN_SCALES)))
    slopes[0, [0, 4]] = 3.0, 4.0
    mean = np.arange(len(PLAIN_SCALES)) / 10
    posterior = Posterior.of(PLAIN_SCALES, mean, slopes, 2.5)
    expected = np.eye(len(PLAIN_SCALES))
    expected[np.ix_([0, 4], [0, 4])] -= np.array([[9.0, 12.0], [12.0, 16.0]]) / 26  # Sherman-Morrison
    expected *= np.outer(PLAIN_SCALES.deviation, PLAIN_SCALES.deviation)
    np.testing.assert_allclose(posterior.root @ posterior.root.T, expected, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(posterior.deviation**2, np.diag(expected), rtol=1e-12)
    assert posterior.mean is mean
    assert posterior.loss == 2.5


def test_draws_have_the_mean_and_the_covariance() -> None:
    generator = np.random.default_rng(0)
    slopes = generator.normal(size=(3, len(PLAIN_SCALES)))
    mean = 0.1 * generator.normal(size=len(PLAIN_SCALES))
    posterior = Posterior.of(PLAIN_SCALES, mean, slopes)
    bandwidths = [place for place, item in enumerate(PLAIN_SCALES.items) if item.kind == "bandwidth"]
    given = np.array([link.bandwidth_bytes_per_s for link in PLAIN_SCALES.problem.host.links])
    logs = []
    for _ in range(4000):
        drawn = posterior.draw(generator)
        logs.append(np.log([link.bandwidth_bytes_per_s for link in drawn.host.links] / given))
    covariance = (posterior.root @ posterior.root.T)[np.ix_(bandwidths, bandwidths)]
    close = 4 * PLAIN_SCALES.prior.bandwidth / 4000**0.5
    np.testing.assert_allclose(np.mean(logs, axis=0), mean[bandwidths], atol=close)
    np.testing.assert_allclose(np.cov(np.array(logs).T), covariance, atol=0.1 * PLAIN_SCALES.prior.bandwidth**2)


def test_the_problem_is_that_of_the_mean_and_draws_repeat() -> None:
    posterior = Posterior.of(PLAIN_SCALES, np.full(len(PLAIN_SCALES), 0.2), np.zeros((0, len(PLAIN_SCALES))))
    expected = PLAIN_SCALES.apply(np.full(len(PLAIN_SCALES), 0.2))
    np.testing.assert_array_equal(posterior.problem.costs.op_time_s, expected.costs.op_time_s)
    assert posterior.problem.host == expected.host
    one, other = (posterior.draw(np.random.default_rng(7)) for _ in range(2))
    np.testing.assert_array_equal(one.costs.op_time_s, other.costs.op_time_s)
    assert one.host == other.host != expected.host


POOLED_PRIOR = Prior(dispatch_s=4e-6, dispatch=0.5, corun_deviation=0.5, corun=0.05)


def pooled_scales() -> Scales:
    """Two devices that share a memory, and a dispatcher: every kind of factor."""
    problem = learnable_problem(paired_host(2), 8)
    devices = tuple(replace(device, memory_pool="ram") for device in problem.host.devices)
    return Scales(replace(problem, host=replace(problem.host, devices=devices)), POOLED_PRIOR)


POOLED_SCALES = pooled_scales()


def learned(factors: dict[tuple[str, str], float], deviation: float = 0.01) -> Posterior:
    """A posterior with these means, that sure of them; the others are as in the prior."""
    mean, deviations = np.zeros(len(POOLED_SCALES)), np.array(POOLED_SCALES.deviation)
    for place, item in enumerate(POOLED_SCALES.items):
        if (item.kind, item.name) in factors:
            mean[place], deviations[place] = math.log(factors[item.kind, item.name]), deviation
    assert np.count_nonzero(mean) == len(factors)
    return Posterior(POOLED_SCALES, mean, np.diag(deviations))


@pytest.mark.parametrize(
    ("kind", "name", "factor", "line"),
    [
        ("device", "d1", 1.04, "d1 is 4 % slower than given (2 to 6 %)"),
        ("device", "d1", 0.9, "d1 is 10 % faster than given (8 to 12 %)"),
        ("op type", "aten.mm on any", 1.6, "aten.mm on any takes 1.6 times as long as given (1.6 to 1.6)"),
        ("op type", "aten.mm on any", 20.4, "aten.mm on any takes 20 times as long as given (20 to 21)"),
        ("bandwidth", "d0>d1", 0.7, "d0>d1 has 0.7 of the bandwidth given (0.69 to 0.71)"),
        ("latency", "d1>d0", 2.0, "d1>d0 has 2 times the latency given (2 to 2)"),
        ("overhead", "every op", 2.0, "an op takes 10.0 us longer than given (9.8 to 10.2 us)"),
        ("dispatch", "every launch", 0.5, "a launch takes 2.0 us (2.0 to 2.0 us)"),
        (
            "co-run",
            "devices that share memory",
            2.0,
            "a busy device slows another that shares its memory by 10 % (10 to 10 %)",
        ),
    ],
)
def test_a_line_of_each_kind(kind: str, name: str, factor: float, line: str) -> None:
    assert describe(learned({(kind, name): factor})) == [line]


def test_nothing_learned_is_not_worth_a_line() -> None:
    assert describe(Posterior.prior(POOLED_SCALES)) == []
    assert describe(learned({("device", "d1"): 1.04}, 0.03)) == []


def test_ops_that_were_profiled_take_longer_in_the_step_than_alone() -> None:
    posterior = learned({("op type", "aten.mm on any"): 1.6})
    problem = replace(POOLED_SCALES.problem, costs=replace(POOLED_SCALES.problem.costs, source="profiled"))
    profiled = replace(posterior, scales=Scales(problem, POOLED_PRIOR))
    assert describe(profiled) == ["aten.mm on any takes 1.6 times as long as alone (1.6 to 1.6)"]


def test_co_running_has_a_line_beside_many_surer_ones() -> None:
    corun = ("co-run", "devices that share memory")
    posterior = learned({("device", "d0"): 1.05, ("device", "d1"): 0.8, ("bandwidth", "d0>d1"): 2.0, corun: 1.04})
    three, two, one = ([line.split()[0] for line in describe(posterior, most=most)] for most in (3, 2, 1))
    assert (three, two, one) == (["d0>d1", "d1", "a"], ["d0>d1", "a"], ["a"])
    assert describe(posterior, most=0) == []


def test_the_surest_comes_first_and_not_too_many_come() -> None:
    posterior = learned({("device", "d0"): 1.05, ("device", "d1"): 0.8, ("bandwidth", "d0>d1"): 2.0})
    names = [line.split()[0] for line in describe(posterior)]
    assert names == ["d0>d1", "d1", "d0"]
    assert describe(posterior, most=1) == describe(posterior)[:1]
    assert describe(posterior, most=0) == []


X = Scale("bandwidth", "x", 1.0)
WIDE = Prior(op_type=0.5, device=0.2, bandwidth=1.0, latency=0.0, overhead_s=0.1)
OWN = CARRIED["bandwidth"]
OF_HOST = 1.0 - OWN**2
"""What is the host's of the variance of a factor with deviation 1; the rest is each workload's own."""


def run_of(*factors: LearnedFactor, equations: tuple[Equation, ...] = ()) -> LearnedHost:
    return LearnedHost("two", "0", "estimated", WIDE, factors, (), equations=equations)


def seen(
    log: float, noise: float, *, kind: Kind = "bandwidth", mean: float = 0.0, median: float = 0.0, name: str = "x"
) -> LearnedFactor:
    """The posterior of a factor with deviation 1 around `mean` beforehand, seen once as `log` with `noise`."""
    variance = 1.0 / (1.0 + 1.0 / noise**2)
    return LearnedFactor(kind, name, variance * (mean + log / noise**2), math.sqrt(variance), 1.0, median, mean)


def expected(*hosts: LearnedHost, factor: Scale = X) -> tuple[float, float]:
    """Mean and variance that what runs learned gives a factor."""
    knowledge = knowledge_of(hosts, "given")
    assert knowledge.num_runs == len(hosts)
    mean, root = knowledge.prior([factor])
    return float(mean[0]), float((root @ root.T)[0, 0])


def test_one_run_is_carried_with_what_differs_between_workloads() -> None:
    seen_once = 1.0 / (0.1**2 + OWN**2)
    precision = 1.0 / OF_HOST + seen_once
    assert expected(run_of(seen(2.0, 0.1))) == pytest.approx((2.0 * seen_once / precision, 1 / precision + OWN**2))
    assert expected(run_of(seen(2.0, 0.1)), factor=Scale("bandwidth", "y", 1.0)) == pytest.approx((0.0, 1.0))


def test_what_a_run_was_told_beforehand_does_not_count_again() -> None:
    assert expected(run_of(seen(2.0, 0.1, mean=1.5))) == pytest.approx(expected(run_of(seen(2.0, 0.1))))


def test_runs_are_weighed_by_how_sure_they_are() -> None:
    one, other = 1.0 / OWN**2, 0.5 / OWN**2
    mean, _ = expected(run_of(seen(1.0, 1e-4)), run_of(seen(3.0, OWN)))
    assert mean == pytest.approx((one + 3.0 * other) / (1.0 / OF_HOST + one + other), rel=1e-4)


def test_a_factor_on_a_figure_of_the_prior_is_carried_as_that_figure() -> None:
    run = run_of(seen(math.log(2.0), 1e-3, kind="overhead", median=5e-6))
    mean, variance = expected(run, factor=Scale("overhead", "x", 1.0, 1e-5))
    assert mean == pytest.approx(0.0, abs=1e-9), "ten microseconds, as was found"
    assert variance < 0.1
    assert expected(run, factor=Scale("overhead", "x", 1.0)) == pytest.approx((0.0, 1.0))


def test_what_hardly_anything_was_learned_of_and_costs_of_another_kind_tell_nothing() -> None:
    assert knowledge_of([run_of(seen(2.0, 4.0))], "estimated") is None
    assert knowledge_of([run_of(seen(2.0, 0.1))], "profiled") is None
    assert knowledge_of([], "estimated") is None


def test_an_equation_in_two_factors_is_shared_with_what_the_next_workload_lacks() -> None:
    """Their sum is 2, surely: of one alone that says as much as it does of the other, which may be anything."""
    both = tuple(seen(0.0, 1.0, name=name) for name in "xy")
    run = run_of(*both, equations=(Equation(2e3, (1e3, 1e3)),))
    share = OF_HOST / (2 * OF_HOST + 2 * OWN**2)
    assert expected(run) == pytest.approx((2 * share, OF_HOST * (1 - share) + OWN**2), rel=1e-5)
    knowledge = knowledge_of([run], "estimated")
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
    run = run_of(*every, equations=(Equation(3e3, (1e3, 0.0, 1e3)), Equation(2e3, (0.0, 1e3, 1e3))))
    knowledge = knowledge_of([run], "estimated")
    mean, root = knowledge.prior([Scale("bandwidth", name, 1.0) for name in "xy"])
    assert mean[0] - mean[1] == pytest.approx(1.0 * OF_HOST / (OF_HOST + OWN**2), rel=1e-4)
    covariance = root @ root.T
    assert covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1] < 0.25 * np.trace(covariance)


def test_equations_and_the_prior_make_the_posterior() -> None:
    """So nothing of what a run measured is lost, and nothing of its prior is told."""
    scales = Scales(learnable_problem(paired_host(3), 24), WIDE)
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
    scales = Scales(learnable_problem(paired_host(3), 24), WIDE, None, TracedPrior())
    generator = np.random.default_rng(4)
    plans, true = varied_plans(scales.problem, generator, 4), scales.apply(0.3 * generator.standard_normal(len(scales)))
    simulator, model = Simulator(true, threads=1), HostModel(scales)
    timed = [(simulator.retime(plan), simulator.timeline(plan)) for plan in plans]
    model.learn(plans, [replace(outcome, timeline=timeline) for outcome, timeline in timed])
    posterior = model.fit()
    slopes, targets = posterior.equations()
    before = posterior.scales.untraced
    is_signature = np.array([item.kind in ("signature", "moved signature") for item in scales.items])
    assert np.array_equal(before.deviation[~is_signature], scales.deviation[~is_signature])
    precision = np.diag(1.0 / before.deviation**2) + slopes.T @ slopes
    # combinations of which traces told less than a ten-thousandth are left out
    np.testing.assert_allclose(precision @ posterior.root @ posterior.root.T, np.eye(len(scales)), atol=1e-3)
    told_s = scales.apply(np.linalg.solve(precision, slopes.T @ targets)).costs.op_time_s
    np.testing.assert_allclose(told_s, posterior.problem.costs.op_time_s, rtol=0.01)
    run_of = LearnedHost.of(posterior)
    assert [factor.prior_deviation for factor in run_of.factors] == before.deviation.tolist()
    assert run_of.tracing.num_steps == 4
    assert run_of.tracing.share == pytest.approx(0.0, abs=1e-9), "a simulated trace costs nothing"
    assert "4 traced steps" in run_of.lines[-1]
    save_posterior(posterior, path := tmp_path / "host_model.json")
    assert load_learned_host(path) == run_of


def test_equations_of_a_fit_that_explains_little_say_little() -> None:
    scales = Scales(learnable_problem(paired_host(2), 8), WIDE)
    slopes = np.zeros((2, len(scales)))
    slopes[:, 0] = 4.0
    found, _ = Posterior.of(scales, scales.mean, slopes, 0.0, np.array([3.0, -3.0])).equations()
    exact, _ = Posterior.of(scales, scales.mean, slopes, 0.0, np.array([0.3, -0.3])).equations()
    np.testing.assert_allclose(found[:, 0], 4.0 / scales.deviation[0] / 3.0)
    np.testing.assert_allclose(exact[:, 0], 4.0 / scales.deviation[0])


def test_knowledge_is_the_prior_of_the_model_and_is_kept_with_what_it_learned() -> None:
    problem = learnable_problem(paired_host(2))
    factors = seen(1.0, 0.1, name="d0>d1"), seen(1.0, 0.1, kind="device", name="d9")
    scales = Scales(problem, WIDE, knowledge_of([run_of(*factors)], "estimated"))
    place = int(scales.bandwidth_at[0])
    prior = Posterior.prior(scales)
    assert prior.mean[place] == pytest.approx(expected(run_of(factors[0]), factor=Scale("bandwidth", "d0>d1", 1.0))[0])
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
    known = knowledge_of([run_of(*both, equations=(Equation(2e3, (1e3, 1e3)),))], "estimated")
    for scales in (Scales(problem, WIDE), Scales(problem, WIDE, known)):
        slopes = np.random.default_rng(0).normal(size=(3, len(scales)))
        np.testing.assert_allclose(scales.unspread(scales.slopes_of(slopes)), slopes, rtol=1e-9)
        z = np.arange(len(scales)) / 10.0
        np.testing.assert_allclose(slopes @ (scales.at(z) - scales.mean), scales.slopes_of(slopes) @ z, rtol=1e-9)


@pytest.mark.slow
def test_a_second_workload_predicts_better_with_what_the_first_one_taught() -> None:
    """From few measured steps, which tell little of any one factor, better still from how the factors depend."""
    errors = []
    for seed in range(12):
        generator = np.random.default_rng(seed)
        first, second = (learnable_problem(paired_host(3), num_ops, seed=9) for num_ops in (24, 30))
        hidden, other = Scales(first, WIDE), Scales(second, WIDE)
        assert [item.name for item in hidden.items] == [item.name for item in other.items]
        x = hidden.deviation * generator.standard_normal(len(hidden))
        plans = varied_plans(first, generator, 10)
        model = HostModel(hidden)
        model.add(plans, step_times(hidden.apply(x), plans))
        kept = LearnedHost.of(model.fit())
        unseen = varied_plans(second, generator, 20)
        true_s = step_times(other.apply(x), unseen)
        known = [knowledge_of([one], second.costs.source) for one in (kept, replace(kept, equations=()))]
        priors = [Posterior.prior(Scales(second, WIDE, one)) for one in (*known, None)]
        drawn = [[prior.draw(np.random.default_rng(draw)) for draw in range(6)] for prior in priors]
        errors.append([np.mean([np.abs(np.log(step_times(one, unseen) / true_s)) for one in each]) for each in drawn])
    together, one_by_one, nothing = np.mean(errors, axis=0)
    assert together < one_by_one
    assert together < 0.6 * nothing
