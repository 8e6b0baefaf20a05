"""Calibration recovers figures that were put in by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from micrographs import fork_join

from rlplace.errors import InvalidValue
from rlplace.graphs import Grouping
from rlplace.measure import Costs, Device, Host, Link, Problem, Route, Simulator
from rlplace.measure.prediction_error import Figures, apply, as_profiled, calibrate


def problem() -> Problem:
    graph = fork_join(4, 4, 1000)
    devices = tuple(Device(f"d{k}", "k", "simulated", 1 << 30, memory_pool="ram", dispatcher="lock") for k in range(2))
    host = Host(
        "two",
        devices,
        (Link("a", 1e6, 1e-4), Link("b", 1e6, 1e-4)),
        (Route("d0", "d1", ("a",), blocks_destination=True), Route("d1", "d0", ("b",), blocks_destination=True)),
        dispatch_order="request",
        run_ahead=1,
    )
    costs = np.repeat(np.random.default_rng(0).uniform(0.005, 0.02, (graph.num_ops, 1)), 2, axis=1)
    return Problem(graph, host, Costs(costs, "profiled"), Grouping(np.arange(graph.num_ops)))


def test_nothing_to_fit_changes_nothing() -> None:
    before = problem()
    after = apply(before, Figures())
    runs = ~before.graph.is_source
    np.testing.assert_array_equal(after.costs.op_time_s[runs], before.costs.op_time_s[runs])
    assert after.host == before.host


def test_figures_enter_costs_links_and_host_as_named() -> None:
    before = problem()
    after = apply(
        before,
        Figures(
            op_scale=2.0, op_overhead_s=0.5, corun=0.25, dispatch_s=0.125, transfer_latency_s=1.0, transfer_scale=4.0
        ),
    )
    runs = ~before.graph.is_source
    # launching is part of a profiled op: what the dispatcher takes is taken from the op
    expected = before.costs.op_time_s[runs] * 2.0 + 0.5 - 0.125
    np.testing.assert_allclose(after.costs.op_time_s[runs], expected, rtol=1e-15)
    assert after.host.corun_slowdown == ((0.0, 0.25), (0.25, 0.0))
    assert after.host.dispatch_s == after.host.copy_dispatch_s == 0.125
    assert after.host.links[0] == Link("a", 0.25e6, 1.0001)
    assert after.host.fingerprint == before.host.fingerprint


def test_it_halves_the_error_at_least_and_is_judged_on_what_it_did_not_fit() -> None:
    profiled = problem()
    truth = apply(profiled, Figures(op_scale=1.15, corun=0.2, transfer_latency_s=0.002))
    simulator, real = Simulator(profiled, threads=1), Simulator(truth, threads=1)
    placements = np.random.default_rng(1).integers(0, 2, (12, profiled.graph.num_ops), dtype=np.int32)
    plans = [simulator.plan(row) for row in placements]
    result = calibrate(profiled, plans, [real.retime(plan).step_time_s for plan in plans])
    assert result.error_before > 0.1
    assert result.error_after < result.error_before / 2
    assert result.is_kept
    assert result.problem.host.corun_slowdown
    again = calibrate(profiled, plans, [real.retime(plan).step_time_s for plan in plans])
    assert again.figures == result.figures


def test_how_much_parts_of_a_gpu_slow_each_other_down_is_a_prior_that_the_fit_replaces() -> None:
    whole = problem()
    devices = tuple(dataclasses.replace(device, memory_pool="") for device in whole.host.devices)
    host = dataclasses.replace(whole.host, devices=devices, corun_slowdown=((0.0, 1.0), (1.0, 0.0)))
    profiled = dataclasses.replace(whole, host=host)
    assert as_profiled(profiled) == Figures(corun=1.0)
    assert apply(profiled, as_profiled(profiled)).host == host
    truth = apply(profiled, Figures(corun=0.25))
    assert truth.host.corun_slowdown == ((0.0, 0.25), (0.25, 0.0))
    simulator, real = Simulator(profiled, threads=1), Simulator(truth, threads=1)
    placements = np.random.default_rng(1).integers(0, 2, (12, profiled.graph.num_ops), dtype=np.int32)
    plans = [simulator.plan(row) for row in placements]
    result = calibrate(profiled, plans, [real.retime(plan).step_time_s for plan in plans])
    assert result.is_kept
    assert result.error_before > 0.1
    assert result.error_after < result.error_before / 2
    assert result.figures.corun < 0.6


def test_a_fit_that_is_worse_on_unseen_plans_is_not_used() -> None:
    profiled = problem()
    simulator = Simulator(profiled, threads=1)
    placements = np.random.default_rng(3).integers(0, 2, (12, profiled.graph.num_ops), dtype=np.int32)
    plans = [simulator.plan(row) for row in placements]
    measured_s = np.array([simulator.retime(plan).step_time_s for plan in plans])
    judged = np.random.default_rng(0).permutation(12)[:4]  # as `calibrate` draws them
    disturbed_s = np.where(np.isin(np.arange(12), judged), measured_s, 1.5 * measured_s)
    result = calibrate(profiled, plans, disturbed_s.tolist())
    assert not result.is_kept
    assert result.problem is profiled
    assert result.error_before == pytest.approx(0.0, abs=1e-9)
    assert result.error_after > 0.3
    assert result.figures != Figures()


def test_free_transfers_are_fitted_by_a_small_factor_not_by_zero() -> None:
    profiled = problem()
    truth = apply(profiled, Figures(transfer_scale=0.06))
    simulator, real = Simulator(profiled, threads=1), Simulator(truth, threads=1)
    placements = np.random.default_rng(2).integers(0, 2, (9, profiled.graph.num_ops), dtype=np.int32)
    plans = [simulator.plan(row) for row in placements]
    result = calibrate(profiled, plans, [0.97 * real.retime(plan).step_time_s for plan in plans])
    assert 0.05 <= result.figures.transfer_scale <= 20.0
    assert 0.05 <= result.figures.op_scale <= 20.0


def test_too_few_or_failed_measurements_are_refused() -> None:
    profiled = problem()
    plans = [Simulator(profiled).plan(np.zeros(profiled.graph.num_ops, dtype=np.int32))] * 4
    with pytest.raises(InvalidValue, match="at least 4"):
        calibrate(profiled, plans[:2], [1.0, 1.0])
    with pytest.raises(InvalidValue, match="finite"):
        calibrate(profiled, plans, [1.0, float("inf"), 1.0, 1.0])
