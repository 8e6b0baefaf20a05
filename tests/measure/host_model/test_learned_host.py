"""What a run keeps of what it learned about its host.

The normal distribution of factors: its precision by hand, and what is drawn from it.

What was learned, in words: a line of each kind, and none where nothing was.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from host_models import learnable_problem, paired_host
from micrographs import fork_join

from rlplace.errors import FileProblem, InvalidValue, UnknownName
from rlplace.graphs import Grouping
from rlplace.measure import Costs, Device, Host, Link, Problem, Route
from rlplace.measure.host_model import (
    LearnedHost,
    Posterior,
    Prior,
    Scales,
    describe,
    load_learned_host,
    save_posterior,
)

PRIOR = Prior(op_type=0.2, dispatch_s=4e-6, dispatch=1.0, corun=0.1, corun_deviation=0.5)


def posterior(dispatch_s: float = 0.0, corun_slowdown: tuple[tuple[float, ...], ...] = ()) -> Posterior:
    """Links have half the bandwidth given, surely; everything else is as before, half as uncertain."""
    graph = fork_join(2, 2, 100)
    devices = tuple(Device(f"d{k}", "k", "simulated", 1 << 30, memory_pool="ram", dispatcher="lock") for k in range(2))
    routes = (Route("d0", "d1", ("wire",)), Route("d1", "d0", ("wire",)))
    host = Host(
        "two", devices, (Link("wire", 1e9, 1e-5),), routes, dispatch_s=dispatch_s, corun_slowdown=corun_slowdown
    )
    costs = Costs(np.full((graph.num_ops, 2), 1e-3), "profiled")
    scales = Scales(Problem(graph, host, costs, Grouping(np.arange(graph.num_ops))), PRIOR)
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


def test_another_file_of_a_run_is_refused_in_words(tmp_path: Path) -> None:
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
