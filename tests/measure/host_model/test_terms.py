"""Critical paths as sums of terms, held against the simulator under other factors."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from host_models import learnable_problem, paired_host, step_times, varied_plans
from hypothesis import given, settings
from hypothesis import strategies as st
from micrographs import op_graph
from random_problems import plain_host, random_problem

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.host_model import Prior, Scales
from rlplace.measure.host_model.fit import PathTerms
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator

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
    costs = Costs(np.array([[1.0, 3.0], [4.0, 2.0]]), "estimated")
    problem = Problem(graph, replace(host, links=slow), costs, Grouping(np.arange(2)))
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
    problem = Problem(graph, plain_host(1), Costs(np.full((4, 1), 0.1), "estimated"), Grouping(np.arange(4)))
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
