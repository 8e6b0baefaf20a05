"""Factors on a problem's figures, applied by hand; the priors that ship, and files of others."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from micrographs import fork_join, op_graph
from random_problems import BIG, problem_of, random_problem

from rlplace.errors import FileProblem, InvalidValue, UnknownName
from rlplace.measure.costs.costs import CostSource
from rlplace.measure.host_model import Prior, Scales, load_priors, prior_of, save_priors
from rlplace.measure.host_model.path_terms import PathTerms
from rlplace.measure.host_model.scales import FIGURES, SHIPPED
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator

PLAIN = Prior(overhead_s=0.0)
"""Nothing that is not a factor on a figure of the problem's."""


def small_problem(*, pooled: bool = False, dispatcher: str = "", **figures: float) -> Problem:
    """A parameter, then mm -> add -> mm, on two devices of one kind and one of another."""
    pool = "ram" if pooled else ""
    devices = tuple(
        Device(f"d{k}", kind, "simulated", BIG, memory_pool=pool if kind == "a" else "", dispatcher=dispatcher)
        for k, kind in enumerate("aab")
    )
    links = (Link("l", 100.0, 0.5), Link("m", 200.0))
    routes = tuple(Route(f"d{i}", f"d{j}", ("lm"[i == 0],)) for i in range(3) for j in range(3) if i != j)
    costs = np.array([[7.0] * 3, [1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [10.0, 20.0, 30.0]])
    graph = op_graph([[], [0], [1], [2]], 10, targets=["parameter", "aten.mm", "aten.add", "aten.mm"])
    host = Host("three", devices, links, routes, **figures)
    return problem_of(graph, host, costs)


def names(scales: Scales) -> list[tuple[str, str]]:
    return [(item.kind, item.name) for item in scales.items]


def with_factor(scales: Scales, factors: dict[tuple[str, str], float]) -> Problem:
    x = np.zeros(len(scales))
    for name, factor in factors.items():
        x[names(scales).index(name)] = math.log(factor)
    return scales.apply(x)


def test_there_is_a_factor_for_all_that_something_depends_on() -> None:
    scales = Scales(small_problem())
    assert names(scales) == [
        ("op type", "aten.add on a"),
        ("op type", "aten.mm on a"),
        ("op type", "aten.add on b"),
        ("op type", "aten.mm on b"),
        ("device", "d0"),
        ("device", "d1"),
        ("device", "d2"),
        ("bandwidth", "l"),
        ("bandwidth", "m"),
        ("latency", "l"),
        ("overhead", "every op"),
    ]
    prior = scales.prior
    of_kind = {"op type": prior.op_type, "device": prior.device, "bandwidth": prior.bandwidth}
    of_kind |= {"latency": prior.latency, "overhead": prior.overhead}
    assert scales.deviation.tolist() == [of_kind[kind] for kind, _ in names(scales)]


@pytest.mark.parametrize(
    ("known", "kind"),
    [
        ("op_type", "op type"),
        ("device", "device"),
        ("bandwidth", "bandwidth"),
        ("latency", "latency"),
        ("overhead", "overhead"),
        ("overhead_s", "overhead"),
    ],
)
def test_what_the_prior_knows_is_left_out(known: str, kind: str) -> None:
    every, fewer = (names(Scales(small_problem(), prior)) for prior in (Prior(), replace(Prior(), **{known: 0.0})))
    assert fewer == [name for name in every if name[0] != kind]
    x = np.random.default_rng(0).normal(size=len(fewer))
    assert np.isfinite(Scales(small_problem(), replace(Prior(), **{known: 0.0})).apply(x).costs.op_time_s).all()


def test_launches_and_co_running_are_left_out_unless_there_are_some() -> None:
    prior = Prior(dispatch=0.5, corun_deviation=0.5)
    assert not {"dispatch", "co-run"} & {kind for kind, _ in names(Scales(small_problem(), prior))}
    both = Scales(small_problem(pooled=True, dispatcher="one"), prior)
    assert names(both)[-2:] == [("dispatch", "every launch"), ("co-run", "devices that share memory")]
    known = Scales(small_problem(pooled=True, dispatcher="one"))
    assert not {"dispatch", "co-run"} & {kind for kind, _ in names(known)}


def test_factors_of_ops_devices_and_links_are_applied() -> None:
    scales = Scales(small_problem(), PLAIN)
    problem = with_factor(scales, {("op type", "aten.mm on a"): 2.0, ("device", "d1"): 3.0, ("device", "d2"): 0.5})
    np.testing.assert_allclose(problem.costs.op_time_s[1:], [[2, 12, 1.5], [4, 15, 3], [20, 120, 15]], rtol=1e-12)
    assert problem.host.links == scales.problem.host.links
    problem = with_factor(scales, {("bandwidth", "l"): 2.0, ("latency", "l"): 3.0, ("bandwidth", "m"): 0.25})
    figures = [(link.bandwidth_bytes_per_s, link.latency_s) for link in problem.host.links]
    np.testing.assert_allclose(figures, [(200.0, 1.5), (50.0, 0.0)], rtol=1e-12)
    assert problem.costs.op_time_s.tolist() == scales.problem.costs.op_time_s.tolist()


def test_overhead_is_added_to_every_op_but_sources() -> None:
    scales = Scales(small_problem(), Prior(overhead_s=0.25))
    problem = with_factor(scales, {("overhead", "every op"): 2.0, ("device", "d0"): 2.0})
    np.testing.assert_allclose(problem.costs.op_time_s[1], [2.5, 2.5, 3.5], rtol=1e-12)
    assert problem.costs.op_time_s[0].tolist() == [14.0, 7.0, 7.0]  # a source takes no time whatever it costs


def test_what_launching_takes_is_taken_from_op_times_that_hold_it() -> None:
    prior = Prior(overhead_s=0.0, dispatch_s=0.5, dispatch=1.0)
    factor = {("dispatch", "every launch"): 3.0}
    found = with_factor(Scales(small_problem(dispatcher="one"), prior), factor)
    assert (found.host.dispatch_s, found.host.copy_dispatch_s) == pytest.approx((1.5, 1.5))
    np.testing.assert_allclose(found.costs.op_time_s[1:3], [[1e-7, 0.5, 1.5], [2.5, 3.5, 4.5]], rtol=1e-12)
    given = small_problem(dispatcher="one", dispatch_s=0.1, copy_dispatch_s=0.2)
    found = with_factor(Scales(given, prior), factor)
    assert (found.host.dispatch_s, found.host.copy_dispatch_s) == pytest.approx((0.3, 0.6))
    assert found.costs.op_time_s.tolist() == given.costs.op_time_s.tolist()


def test_co_running_slows_down_what_shares_a_memory() -> None:
    prior = Prior(overhead_s=0.0, corun=0.05, corun_deviation=1.0)
    found = with_factor(Scales(small_problem(pooled=True), prior), {("co-run", "devices that share memory"): 2.0})
    np.testing.assert_allclose(found.host.corun_slowdown, [[0, 0.1, 0], [0.1, 0, 0], [0, 0, 0]])
    given = small_problem()
    table = ((0.0, 0.0, 0.2), (0.0, 0.0, 0.0), (0.4, 0.0, 0.0))
    given = replace(given, host=replace(given.host, corun_slowdown=table))
    found = with_factor(Scales(given, prior), {("co-run", "devices that share memory"): 2.0})
    np.testing.assert_allclose(found.host.corun_slowdown, 2 * np.array(table))


@given(seed=st.integers(0, 2**32 - 1), num_ops=st.integers(1, 30))
@settings(max_examples=50, deadline=None)
def test_factors_of_one_give_the_problem_back(seed: int, num_ops: int) -> None:
    problem = random_problem(np.random.default_rng(seed), num_ops)
    scales = Scales(problem, PLAIN)
    same = scales.apply(np.zeros(len(scales)))
    assert same.host == problem.host
    assert same.costs.op_time_s.tolist() == problem.costs.op_time_s.tolist()
    assert same.graph is problem.graph
    assert same.grouping is problem.grouping


def test_no_factor_overflows() -> None:
    scales = Scales(small_problem())
    for x in (1e6, -1e6):
        problem = scales.apply(np.full(len(scales), x))
        assert np.isfinite(problem.costs.op_time_s).all()
        assert (problem.costs.op_time_s >= 0).all()
        assert all(0 < link.bandwidth_bytes_per_s < math.inf for link in problem.host.links)


@pytest.mark.parametrize("name", ["op_type", "device", "overhead_s", "corun"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_a_prior_is_made_of_numbers(name: str, value: float) -> None:
    with pytest.raises(InvalidValue, match=name):
        Prior(**{name: value})


def test_a_level_makes_all_of_a_step_longer() -> None:
    """Also launches, copies and ops that slow each other: every plan takes exactly as many times as long."""
    problem = small_problem(pooled=True, dispatcher="one", dispatch_s=0.1, copy_dispatch_s=0.2)
    scales = Scales(problem, Prior(overhead_s=0.25, corun=0.3, corun_deviation=1.0))
    x = np.random.default_rng(0).normal(size=len(scales)) * 0.3
    alone, longer = (Simulator(one.apply(x), threads=1) for one in (scales, scales.at_level(4.0)))
    for devices in np.random.default_rng(1).integers(0, 3, (8, 4)).astype(np.int32):
        plan = alone.plan(devices)
        assert longer.retime(plan).step_time_s == pytest.approx(4.0 * alone.retime(plan).step_time_s, rel=1e-12)
        terms = PathTerms(scales.at_level(4.0))
        step_s, rows = terms.of(x, longer.check_plans([plan]))
        assert rows @ terms.seconds(x) == pytest.approx(step_s, rel=1e-9)


def problem(source: CostSource) -> Problem:
    graph = fork_join(2, 2, 100)
    host = Host("one", (Device("d0", "k", "simulated", 1 << 30),))
    return problem_of(graph, host, np.full((graph.num_ops, 1), 1e-3), source=source)


def shipped() -> dict[str, Any]:
    return json.loads(SHIPPED.read_text(encoding="utf-8"))


def test_costs_decide_which_figures_hold() -> None:
    estimated, profiled = (prior_of(problem(source)) for source in ("estimated", "profiled"))  # type: ignore[arg-type]
    assert estimated == Prior(0.5, 0.12, 0.6, 0.3, 5e-6, 1.0, 5e-6, 0.0, 0.05, 0.0)
    assert profiled == Prior(0.15, 0.1, 0.4, 0.7, 3e-6, 1.0, 5e-6, 1.0, 0.15, 1.0)
    assert prior_of(problem("given")) == estimated
    deviations = {item.kind: item.deviation for item in Scales(problem("profiled"), profiled).items}
    assert deviations == {"op type": 0.15, "device": 0.1, "overhead": 1.0}


def test_the_file_that_ships_says_where_every_figure_comes_from() -> None:
    priors = load_priors()
    for figures in (priors.estimated, priors.profiled):
        assert list(figures) == list(FIGURES)
        assert all(len(figure.source) > 15 for figure in figures.values())


def test_what_is_saved_loads_as_equal(tmp_path: Path) -> None:
    priors = load_priors()
    wider = {**priors.profiled, "device": dataclasses.replace(priors.profiled["device"], value=0.25)}
    changed = dataclasses.replace(priors, profiled=wider)
    save_priors(changed, tmp_path / "priors.json")
    assert load_priors(tmp_path / "priors.json") == changed
    assert prior_of(problem("profiled"), tmp_path / "priors.json").device == 0.25
    save_priors(priors, tmp_path / "same.json")
    assert (tmp_path / "same.json").read_text(encoding="utf-8") == SHIPPED.read_text(encoding="utf-8")


def without(section: str, name: str) -> dict[str, Any]:
    facts = shipped()
    del facts[section][name]
    return facts


def changed(section: str, name: str, figure: object) -> dict[str, Any]:
    facts = shipped()
    facts[section][name] = figure
    return facts


@pytest.mark.parametrize(
    ("facts", "error", "words"),
    [
        ([], InvalidValue, "priors is a list of 0 values, expected a mapping"),
        ({"estimated": {}}, InvalidValue, "profiled is missing"),
        ({**shipped(), "schema": 2}, InvalidValue, "schema is 2, expected 1"),
        ({**shipped(), "measured": {}}, UnknownName, "unknown field .* 'measured'"),
        (without("profiled", "corun"), InvalidValue, r"profiled\.corun is missing, expected a value and its source"),
        (changed("profiled", "op_types", {"value": 1, "source": "a"}), UnknownName, "did you mean 'op_type'"),
        (changed("estimated", "device", {"value": -1, "source": "a"}), InvalidValue, r"device\.value is -1, expected"),
        (changed("estimated", "device", {"value": "1", "source": "a"}), InvalidValue, r"device\.value is '1'"),
        (changed("estimated", "device", {"value": 1.0}), InvalidValue, r"device\.source is missing"),
        (changed("estimated", "device", {"value": 1.0, "source": " "}), InvalidValue, "one line that says where"),
    ],
)
def test_a_file_with_a_mistake_is_refused_with_what_it_is(
    facts: object, error: type[Exception], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(facts))
    with pytest.raises(error, match=words):
        load_priors(path)


def test_a_file_that_is_not_there_or_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match=r"no such file\. Name a file that `benchmarks/fit_priors.py` wrote"):
        load_priors(tmp_path / "mine.json")
    (tmp_path / "mine.json").write_text("value: 1")
    with pytest.raises(FileProblem, match="not valid JSON"):
        load_priors(tmp_path / "mine.json")
