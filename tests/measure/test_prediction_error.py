"""Figures of fidelity worked out by hand, and calibration that recovers figures which were put in."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from micrographs import fork_join, op_graph
from random_problems import plain_host, problem_of

from rlplace.errors import InvalidValue
from rlplace.measure import Device, Host, Link, Problem, Route, Simulator
from rlplace.measure.prediction_error import (
    PLACEMENT_KINDS,
    Calibration,
    Figures,
    apply,
    as_profiled,
    calibrate,
    draw_mix,
    judge_fidelity,
)


def test_perfect_predictions() -> None:
    times = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    peaks = np.ones((8, 2))
    figures = judge_fidelity(times, times, times, peaks, peaks)
    assert figures.spearman == figures.spearman_ceiling == figures.spearman_best_quartile == pytest.approx(1.0)
    assert figures.median_abs_rel_error == figures.p90_abs_rel_error == figures.pick_regret == 0.0


def test_errors_regret_and_ranks_by_hand() -> None:
    first = [1.0, 2.0, 4.0, 8.0]
    simulated = [2.2, 2.0, 4.0, 8.8]  # picks the second, which measures twice the best
    figures = judge_fidelity(simulated, first, [1.0, 2.0, 4.0, 8.0], np.array([[1.0, 0.0]]), np.array([[0.8, 0.0]]))
    assert figures.pick_regret == 1.0
    assert figures.median_abs_rel_error == pytest.approx(0.05)  # errors 1.2, 0, 0, 0.1
    assert figures.spearman == pytest.approx(0.8)  # one pair of neighbours swapped: 1 - 6 * 2 / (4 * 15)
    assert figures.peak_bytes_max_rel_error == pytest.approx(0.25)


def test_equal_times_have_no_rank_correlation() -> None:
    peaks = np.ones((8, 1))
    simulated = [1.0, 1.0, 1.0, 4.0, 5.0, 6.0, 7.0, 8.0]  # the three that measured best are all one to the simulator
    times = [1.0, 1.1, 1.2, 4.0, 5.0, 6.0, 7.0, 8.0]
    figures = judge_fidelity(simulated, times, times, peaks, peaks)
    assert figures.spearman_best_quartile is None
    assert figures.spearman is not None
    assert 0.9 < figures.spearman < 1.0
    assert figures.spearman_ceiling_best_quartile == pytest.approx(1.0)


def test_the_mix_is_a_quarter_each_and_avoids_what_was_seen() -> None:
    problem = problem_of(op_graph([[] for _ in range(12)]), plain_host(2))
    best = np.arange(12, dtype=np.int32) % 2
    test, kinds = draw_mix(problem, best, 20, np.random.default_rng(0))
    assert [kinds.count(kind) for kind in PLACEMENT_KINDS] == [5, 5, 5, 5]
    assert test.shape == (20, 12)
    assert set(np.unique(test)) <= {0, 1}
    fit, _ = draw_mix(problem, best, 16, np.random.default_rng(1), unlike=test)
    assert not {row.tobytes() for row in fit} & {row.tobytes() for row in test}
    again, _ = draw_mix(problem, best, 20, np.random.default_rng(0))
    assert np.array_equal(test, again)


def test_constraints_that_leave_nothing_to_draw_are_said() -> None:
    pinned = problem_of(op_graph([[] for _ in range(3)]), plain_host(2), allowed=np.array([[True, False]] * 3))
    only = np.zeros((1, 3), dtype=np.int32)
    with pytest.raises(InvalidValue, match="0 of 4 that were not drawn before"):
        draw_mix(pinned, only[0], 4, np.random.default_rng(1), unlike=only)


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
    return problem_of(graph, host, costs, source="profiled")


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


def fitted(profiled: Problem, truth: Problem, count: int = 12, *, seed: int = 1, factor: float = 1.0) -> Calibration:
    """To plans that are drawn, and what they take in truth."""
    simulator, real = Simulator(profiled, threads=1), Simulator(truth, threads=1)
    placements = np.random.default_rng(seed).integers(0, 2, (count, profiled.graph.num_ops), dtype=np.int32)
    plans = [simulator.plan(row) for row in placements]
    return calibrate(profiled, plans, [factor * real.retime(plan).step_time_s for plan in plans])


def test_it_halves_the_error_at_least_and_is_judged_on_what_it_did_not_fit() -> None:
    profiled = problem()
    truth = apply(profiled, Figures(op_scale=1.15, corun=0.2, transfer_latency_s=0.002))
    result = fitted(profiled, truth)
    assert result.error_before > 0.1
    assert result.error_after < result.error_before / 2
    assert result.is_kept
    assert result.problem.host.corun_slowdown
    assert fitted(profiled, truth).figures == result.figures


def test_how_much_parts_of_a_gpu_slow_each_other_down_is_a_prior_that_the_fit_replaces() -> None:
    whole = problem()
    devices = tuple(dataclasses.replace(device, memory_pool="") for device in whole.host.devices)
    host = dataclasses.replace(whole.host, devices=devices, corun_slowdown=((0.0, 1.0), (1.0, 0.0)))
    profiled = dataclasses.replace(whole, host=host)
    assert as_profiled(profiled) == Figures(corun=1.0)
    assert apply(profiled, as_profiled(profiled)).host == host
    truth = apply(profiled, Figures(corun=0.25))
    assert truth.host.corun_slowdown == ((0.0, 0.25), (0.25, 0.0))
    result = fitted(profiled, truth)
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
    result = fitted(profiled, apply(profiled, Figures(transfer_scale=0.06)), 9, seed=2, factor=0.97)
    assert 0.05 <= result.figures.transfer_scale <= 20.0
    assert 0.05 <= result.figures.op_scale <= 20.0


def test_too_few_or_failed_measurements_are_refused() -> None:
    profiled = problem()
    plans = [Simulator(profiled).plan(np.zeros(profiled.graph.num_ops, dtype=np.int32))] * 4
    with pytest.raises(InvalidValue, match="at least 4"):
        calibrate(profiled, plans[:2], [1.0, 1.0])
    with pytest.raises(InvalidValue, match="finite"):
        calibrate(profiled, plans, [1.0, float("inf"), 1.0, 1.0])
