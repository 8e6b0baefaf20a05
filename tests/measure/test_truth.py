"""True problems, by the definition written out once more, and measurements on them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from micrographs import op_graph
from random_problems import problem_of

from rlplace.errors import InvalidValue, UnknownName
from rlplace.measure import Device, Host, Link, Plan, Problem, Route, Simulator
from rlplace.measure.truth import KINDS, TrueTimer, Truth, true_problem, true_problems

TARGETS = ["parameter", "aten.mm", "aten.add", "aten.mm"]


def small_problem(memory_bytes: int = 1000) -> Problem:
    """A parameter, then mm -> add -> mm, on three devices of two kinds; links not in order of their names."""
    graph = op_graph([[], [0], [1], [2]], 10, targets=TARGETS)
    devices = tuple(Device(f"d{k}", kind, "simulated", memory_bytes) for k, kind in enumerate(("b", "a", "b")))
    links = (Link("z", 1e3, 0.5), Link("a", 2e3, 0.25), Link("m", 4e3))
    routes = tuple(Route(f"d{i}", f"d{j}", ("zam"[(i + j) % 3],)) for i in range(3) for j in range(3) if i != j)
    costs = np.array([[0.0] * 3, [1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
    return problem_of(graph, Host("three", devices, links, routes), costs)


@pytest.mark.parametrize(
    ("kind", "s", "r", "v", "high"),
    [
        ("moderate", 0.3, 2, 0.0, 8e-6),
        ("hard", 0.6, 3, 0.15, 20e-6),
        ("misfit", 0.6, 3, 0.15, 20e-6),
        ("in-place", 0.6, 3, 0.15, 20e-6),
    ],
)
def test_the_draws_are_those_of_the_definition(kind: str, s: float, r: float, v: float, high: float) -> None:
    nominal = small_problem()
    true = true_problem(nominal, Truth(kind, 5))
    g = np.random.Generator(np.random.PCG64(5))
    f1 = g.lognormal(0.0, s, 4)  # (add, a), (add, b), (mm, a), (mm, b)
    f2 = np.exp(g.uniform(-np.log(r), np.log(r), 3))  # a, m, z
    f3 = g.lognormal(0.0, v, 3)  # d0, d1, d2
    o = g.uniform(1e-6, high)
    f5, f6 = np.ones(6), np.ones(3)
    if kind == "misfit":
        f5 = g.lognormal(0.0, 0.25, 6)  # (add:2, a), (add:2, b), (mm:1, a), (mm:1, b), (mm:3, a), (mm:3, b)
        f6 = np.exp(g.uniform(-np.log(3), np.log(3), 3))
    if kind == "in-place":
        assert true.costs.moved_factor is not None
        f7 = g.uniform(1.0, 1.3, 3)  # add:2, mm:1, mm:3
        np.testing.assert_allclose(true.costs.moved_factor, [1.0, f7[1], f7[0], f7[2]], rtol=1e-13)
    else:
        assert true.costs.moved_factor is None
    expected = [
        [0.0, 0.0, 0.0],
        [1.0 * f1[3] * f5[3] * f3[0] + o, 2.0 * f1[2] * f5[2] * f3[1] + o, 3.0 * f1[3] * f5[3] * f3[2] + o],
        [4.0 * f1[1] * f5[1] * f3[0] + o, 5.0 * f1[0] * f5[0] * f3[1] + o, 6.0 * f1[1] * f5[1] * f3[2] + o],
        [7.0 * f1[3] * f5[5] * f3[0] + o, 8.0 * f1[2] * f5[4] * f3[1] + o, 9.0 * f1[3] * f5[5] * f3[2] + o],
    ]
    np.testing.assert_allclose(true.costs.op_time_s, expected, rtol=1e-13)
    assert [link.name for link in true.host.links] == ["z", "a", "m"]
    bandwidths = [link.bandwidth_bytes_per_s for link in true.host.links]
    np.testing.assert_allclose(bandwidths, [1e3 * f2[2], 2e3 * f2[0], 4e3 * f2[1]], rtol=1e-13)
    latencies = [link.latency_s for link in true.host.links]
    np.testing.assert_allclose(latencies, [0.5 * f6[2], 0.25 * f6[0], 0.0], rtol=1e-13)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_all_else_is_the_same(kind: str) -> None:
    nominal = small_problem()
    true = true_problem(nominal, Truth(kind, 0))
    assert true.host.fingerprint == nominal.host.fingerprint
    assert (true.graph, true.grouping, true.costs.source) == (nominal.graph, nominal.grouping, nominal.costs.source)
    assert true.host.devices == nominal.host.devices
    assert true.host.routes == nominal.host.routes
    assert dataclasses.replace(true.host, links=nominal.host.links) == nominal.host


def test_one_seed_is_one_truth() -> None:
    nominal = small_problem()
    once, again, other = (true_problem(nominal, Truth("hard", seed)) for seed in (1, 1, 2))
    assert np.array_equal(once.costs.op_time_s, again.costs.op_time_s)
    assert once.host == again.host
    assert not np.any(once.costs.op_time_s[1:] == other.costs.op_time_s[1:])


def test_a_plan_is_timed_exactly_as_it_is() -> None:
    """One device: the sum of its ops. The nominal plan, though the true ranks would order it otherwise."""
    nominal = small_problem()
    true = true_problem(nominal, Truth("moderate", 3))
    timer = TrueTimer(true, 3)
    alone = Simulator(nominal).plan(np.zeros(4, dtype=np.int32))
    assert timer.truth(alone).step_time_s == pytest.approx(true.costs.op_time_s[:, 0].sum(), rel=1e-12)
    spread = Simulator(nominal).plan(np.array([0, 0, 1, 2], dtype=np.int32))
    assert timer.truth(spread).step_time_s == Simulator(true).retime(spread).step_time_s
    assert timer.num_measured == 0


def test_the_kth_measurement_has_the_kth_draw_also_where_it_repeats_or_does_not_fit() -> None:
    nominal = small_problem(memory_bytes=35)
    tight = small_problem(memory_bytes=15)
    true = true_problem(nominal, Truth("hard", 7))
    timer = TrueTimer(true, 7)
    plan = Simulator(nominal).plan(np.array([0, 0, 1, 2], dtype=np.int32))
    measured = [*timer.measure_plans([plan, plan]), *timer.measure_plans([plan])]
    assert timer.num_measured == 3
    for k, outcome in enumerate(measured):
        noise = np.random.Generator(np.random.PCG64([7, k])).lognormal(0.0, 0.01)
        assert outcome.step_time_s == timer.truth(plan).step_time_s * noise
        assert outcome.samples_s == (outcome.step_time_s,)
    assert len({outcome.step_time_s for outcome in measured}) == 3

    timer = TrueTimer(true_problem(tight, Truth("hard", 7)), 7)
    outcomes = timer.measure_plans([plan, plan])
    assert [outcome.status for outcome in outcomes] == ["oom", "oom"]
    assert timer.num_measured == 2
    assert timer.truth(plan).step_time_s == np.inf


def test_a_failed_measurement_takes_its_draw() -> None:
    """Of two plans the first does not fit: the second gets the second draw."""
    nominal = small_problem(memory_bytes=25)
    timer = TrueTimer(true_problem(nominal, Truth("moderate", 4)), 4)
    simulator = Simulator(nominal)
    plans = [simulator.plan(np.array(row, dtype=np.int32)) for row in ([0, 0, 0, 0], [0, 1, 2, 1])]
    fits = [np.isfinite(timer.truth(plan).step_time_s) for plan in plans]
    assert fits == [False, True]
    _, second = timer.measure_plans(plans)
    noise = np.random.Generator(np.random.PCG64([4, 1])).lognormal(0.0, 0.01)
    assert second.step_time_s == timer.truth(plans[1]).step_time_s * noise


@pytest.mark.parametrize("kind", KINDS)
def test_workloads_on_one_host_are_off_by_the_same_factors(kind: str) -> None:
    first = small_problem()
    graph = op_graph([[], [0], [1]], 10, targets=["aten.norm", "aten.add", "aten.norm"])
    second = problem_of(graph, first.host, np.full((3, 3), 2.0))
    one, other = true_problems([first, second], Truth(kind, 5))
    assert one.host == other.host
    assert one.host.links != first.host.links
    if kind != "misfit":  # there, the ops' signatures differ, and with them their factors
        add = one.costs.op_time_s[2] / np.array([4.0, 5.0, 6.0])
        assert other.costs.op_time_s[1] / 2.0 == pytest.approx(add, rel=2e-5)  # but for the overhead
    elsewhere = dataclasses.replace(second, host=dataclasses.replace(first.host, name="other"))
    with pytest.raises(InvalidValue, match="host is 'other', expected three, as of the first problem"):
        true_problems([first, elsewhere], Truth(kind, 5))


def test_words_and_back() -> None:
    assert Truth.parse("hard:3") == Truth("hard", 3)
    assert str(Truth.parse("misfit:100")) == "misfit:100"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hrad:3", "did you mean 'hard'"),
        ("hard", "hard:0"),
        ("hard:", "whole number"),
        ("hard:x", "whole number"),
        ("hard:-1", "seed is -1, expected at least 0"),
        ("hard:1.5", "whole number"),
        ("hard:9999999999", "seed"),
    ],
)
def test_mistakes_are_refused(text: str, words: str) -> None:
    with pytest.raises((UnknownName, InvalidValue), match=words):
        Truth.parse(text)


def test_gangs_and_plans_of_another_graph_are_refused() -> None:
    timer = TrueTimer(true_problem(small_problem(), Truth("hard", 0)), 0)
    empty = np.zeros(0, dtype=np.int32)
    with pytest.raises(InvalidValue):
        timer.truth(Plan(np.zeros(3, dtype=np.int32), empty, empty, np.arange(3)))
    free = small_problem()
    devices = (*free.host.devices[:2], dataclasses.replace(free.host.devices[2], members=("d0", "d1")))
    ganged = dataclasses.replace(free, host=dataclasses.replace(free.host, devices=devices))
    with pytest.raises(InvalidValue, match="gangs"):
        true_problem(ganged, Truth("hard", 0))


def test_in_place_devices_of_one_memory_slow_each_other() -> None:
    nominal = small_problem()
    devices = tuple(dataclasses.replace(d, memory_pool="ram" if d.name != "d1" else "") for d in nominal.host.devices)
    pooled = dataclasses.replace(nominal, host=dataclasses.replace(nominal.host, devices=devices))
    slowdown = np.array(true_problem(pooled, Truth("in-place", 2)).host.corun_slowdown)
    assert np.argwhere(slowdown > 0).tolist() == [[0, 2], [2, 0]]
    assert 0.0 < slowdown[0, 2] == slowdown[2, 0] < 0.3
    assert true_problem(nominal, Truth("in-place", 2)).host.corun_slowdown == ()


def test_traces_leave_step_times_as_they_are() -> None:
    true = true_problem(small_problem(), Truth("hard", 7))
    plan = Simulator(small_problem()).plan(np.array([0, 0, 1, 2], dtype=np.int32))
    plain, traced = (TrueTimer(true, 7, is_traced=is_traced).measure_plans([plan] * 3) for is_traced in (False, True))
    assert plain == traced
    assert [outcome.timeline for outcome in plain] == [None] * 3
    assert all(outcome.timeline is not None for outcome in traced)


@pytest.mark.parametrize("kind", ["hard", "in-place"])
def test_a_trace_is_drawn_as_its_definition_says(kind: str) -> None:
    """The second measurement, written out once more."""
    nominal = small_problem()
    true = true_problem(nominal, Truth(kind, 11))
    devices = np.array([0, 1, 1, 2], dtype=np.int32)
    plan = Simulator(nominal).plan(devices)
    timeline = TrueTimer(true, 11, is_traced=True).measure_plans([plan, plan])[1].timeline
    assert timeline.source == "measured"
    fixed = np.random.Generator(np.random.PCG64([11, 0, 2]))
    bias = fixed.lognormal(0.0, 0.05, 9).reshape(3, 3)[[1, 0, 2]]  # add:2, mm:1, mm:3 by d0, d1, d2; then of ops 1 to 3
    added_s, offset_s = fixed.uniform(0.0, 3e-6), fixed.uniform(-50e-6, 50e-6, 3)
    own = np.random.Generator(np.random.PCG64([11, 1, 1]))
    factor = own.lognormal(0.0, 0.05, 4) * own.lognormal(0.0, 0.03)
    is_outlier, longer = own.random(4) < 0.01, own.uniform(3.0, 10.0, 4)
    factor = factor * np.where(is_outlier, longer, 1.0)
    sent = own.lognormal(0.0, 0.10, plan.num_transfers)
    moved = np.ones(4) if true.costs.moved_factor is None else true.costs.moved_factor
    moved = np.where([False, True, False, True], moved, 1.0)  # ops 1 and 3 read what another device made
    for op in (1, 2, 3):
        seconds = true.costs.op_time_s[op, devices[op]] * moved[op] * factor[op] * bias[op - 1, devices[op]] + added_s
        assert timeline.op_end_s[op] - timeline.op_start_s[op] == pytest.approx(seconds, rel=1e-9)
    links = {link.name: link for link in true.host.links}
    end_s = {0: 0.0}
    for k, (source, destination) in enumerate([(0, 1), (1, 2)]):
        link = links["zam"[(source + destination) % 3]]
        seconds = (link.latency_s + 10 / link.bandwidth_bytes_per_s) * sent[k]
        assert timeline.transfer_end_s[k] - timeline.transfer_start_s[k] == pytest.approx(seconds, rel=1e-9)
        end_s[destination] = seconds
    assert timeline.op_start_s[1] == pytest.approx(end_s[1] + offset_s[1], rel=1e-9)  # after the first transfer
    assert timeline.transfer_start_s[0] == pytest.approx(offset_s[1], rel=1e-9)
    assert timeline.memory_bytes.size == 0


def test_a_plan_that_does_not_fit_has_no_trace() -> None:
    true = true_problem(small_problem(memory_bytes=15), Truth("hard", 7))
    plan = Simulator(small_problem()).plan(np.array([0, 0, 1, 2], dtype=np.int32))
    (outcome,) = TrueTimer(true, 7, is_traced=True).measure_plans([plan])
    assert (outcome.status, outcome.timeline) == ("oom", None)
