"""Priors from what was learned: by hand where that is possible, and back from draws of a known prior."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from micrographs import op_graph

from rlplace.errors import FileProblem, InvalidValue
from rlplace.files import write_json_atomic
from rlplace.graphs import Grouping
from rlplace.measure import Costs, Device, Host, Link, Problem, Route, Simulator
from rlplace.measure.costs.costs import CostSource
from rlplace.measure.host_model import HostModel, LearnedHost, Prior, Scales, load_priors, prior_of
from rlplace.measure.host_model.learned_host import LearnedFactor, likelihood
from rlplace.measure.host_model.scales import Kind
from rlplace.store import MeasurementStore, MeasuringProcess

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
from fit_priors import WEIGHT, fit_figures, fit_priors, main

SURE = 1e-7
"""A deviation that is nothing beside any other."""


def host(factors: Sequence[LearnedFactor], source: CostSource = "profiled") -> LearnedHost:
    return LearnedHost("two", "0", source, Prior(), tuple(factors), ())


def seen(kind: Kind, log: float, noise: float = SURE, prior: float = 1.0, median: float = 0.0) -> LearnedFactor:
    """What is known of a factor after its logarithm was seen once, with this noise."""
    variance = 1.0 / (1.0 / prior**2 + 1.0 / noise**2)
    return LearnedFactor(kind, "x", log * variance / noise**2, math.sqrt(variance), prior, median)


def test_the_likelihood_of_a_factor_is_its_posterior_without_its_prior() -> None:
    # precisions 1 + 4 = 5; mean 4/5 of what was seen
    factor = LearnedFactor("device", "d0", 0.8, math.sqrt(0.2), 1.0)
    assert likelihood(factor) == pytest.approx((1.0, 0.25), rel=1e-12)
    assert likelihood(seen("device", 0.3, noise=0.07, prior=0.4)) == pytest.approx((0.3, 0.0049), rel=1e-9)


@pytest.mark.parametrize("deviation", [0.4, 0.3999, 0.4000001])
def test_a_factor_that_taught_nothing_has_none(deviation: float) -> None:
    assert likelihood(LearnedFactor("device", "d0", 0.0, deviation, 0.4)) is None


def test_deviations_of_factors_known_exactly_are_root_mean_squares_with_the_shipped_one() -> None:
    factors = [seen("device", log) for log in (0.3, -0.1, 0.2)]
    expected = math.sqrt((0.09 + 0.01 + 0.04 + WEIGHT * 0.1**2) / (3 + WEIGHT))
    assert fit_figures(factors, 0.0, 0.1) == (0.0, pytest.approx(expected, rel=1e-6))
    alone = math.sqrt(0.14 / 3)
    assert fit_figures(factors, 0.0, 0.1, weight=1e-9)[1] == pytest.approx(alone, rel=1e-6)


def test_equal_noise_is_taken_out_of_the_spread() -> None:
    # with one noise for all, tau^2 + noise^2 is the mean square
    factors = [seen("device", log, noise=0.2) for log in (0.6, -0.5, 0.4, -0.3)]
    mean_square = (0.36 + 0.25 + 0.16 + 0.09) / 4
    assert fit_figures(factors, 0.0, 0.1, weight=1e-9)[1] == pytest.approx(math.sqrt(mean_square - 0.04), rel=1e-5)


def test_a_median_is_a_mean_of_logarithms_with_the_shipped_one() -> None:
    # one run had 2 us as the median, the other 8 us: both found 16 us
    factors = [seen("overhead", math.log(16 / given), median=given * 1e-6) for given in (2, 8)]
    median, deviation = fit_figures(factors, 4e-6, 1.0)
    moved = 2 * math.log(4) / (2 + WEIGHT)  # 16 us is ln 4 above the shipped 4 us
    assert median == pytest.approx(4e-6 * math.exp(moved), rel=1e-6)
    spread = (2 * (math.log(4) - moved) ** 2 + WEIGHT * (1.0 + moved**2)) / (2 + WEIGHT)
    assert deviation == pytest.approx(math.sqrt(spread), rel=1e-6)


def test_factors_on_a_figure_of_the_host_leave_the_median() -> None:
    factors = [seen("dispatch", log) for log in (1.0, 1.2)]
    median, deviation = fit_figures(factors, 5e-6, 1.0)
    assert median == 5e-6
    assert deviation == pytest.approx(math.sqrt((1.0 + 1.44 + WEIGHT) / (2 + WEIGHT)), rel=1e-6)


@pytest.mark.parametrize("tau", [0.05, 0.3, 1.5])
def test_the_deviation_of_many_hosts_is_found_again_whatever_prior_their_runs_had(tau: float) -> None:
    rng = np.random.default_rng(0)
    logs, noises = rng.normal(0, tau, 4000), rng.choice([0.02, 0.1, 0.4], 4000)
    priors = rng.choice([0.15, 0.6], 4000)
    factors = [
        seen("op type", log + rng.normal(0, noise), noise, prior)
        for log, noise, prior in zip(logs.tolist(), noises.tolist(), priors.tolist(), strict=True)
    ]
    assert fit_figures(factors, 0.0, 2 * tau)[1] == pytest.approx(tau, rel=0.05)


def test_a_median_is_found_again_from_noisy_factors() -> None:
    rng = np.random.default_rng(1)
    noises = rng.choice([0.1, 0.5], 3000)
    logs = rng.normal(math.log(9.0 / 5.0), 0.7, 3000) + rng.normal(0, noises)
    factors = [
        seen("overhead", log, noise, 1.0, 5e-6) for log, noise in zip(logs.tolist(), noises.tolist(), strict=True)
    ]
    median, deviation = fit_figures(factors, 3e-6, 1.0)
    assert median == pytest.approx(9e-6, rel=0.05)
    assert deviation == pytest.approx(0.7, rel=0.05)


def test_factors_that_say_little_hardly_move_the_shipped_figure() -> None:
    vague = [seen("device", 0.0, noise=3.0, prior=0.5) for _ in range(20)]
    assert fit_figures(vague, 0.0, 0.1)[1] == pytest.approx(0.1, rel=0.02)


def test_kinds_and_sources_of_costs_are_fitted_apart_and_say_what_they_came_from() -> None:
    shipped = load_priors()
    hosts = [
        host([seen("device", 0.3), seen("device", -0.1), LearnedFactor("bandwidth", "wire", 0.0, 0.4, 0.4)]),
        host([seen("device", 0.2), seen("overhead", 0.0, median=6e-6)]),
        host([seen("op type", 1.0)], "estimated"),
    ]
    priors, fitted = fit_priors(hosts, shipped)
    assert set(fitted) == {
        ("estimated", "op_type"),
        ("profiled", "device"),
        ("profiled", "overhead"),
        ("profiled", "overhead_s"),
    }
    device = priors.profiled["device"]
    assert device.value == pytest.approx(math.sqrt((0.14 + 0.04) / 7), rel=1e-3)  # four digits are kept
    source = "fitted to 3 factors of 2 runs; the shipped 0.1 counts as 4 more factors"
    assert device.source == source
    assert priors.estimated["op_type"].source.startswith("fitted to 1 factor of 1 run;")
    assert priors.prior("profiled").overhead_s == pytest.approx(3e-6 * 2 ** (1 / 5), rel=1e-3)
    assert priors.profiled["bandwidth"] == shipped.profiled["bandwidth"]
    assert priors.estimated["device"] == shipped.estimated["device"]


def test_what_a_prior_takes_as_known_stays_so() -> None:
    hosts = [host([seen("dispatch", 0.5, median=5e-6), seen("device", 0.1)], "estimated")]
    priors, fitted = fit_priors(hosts, load_priors())
    assert fitted == [("estimated", "device")]
    assert priors.estimated["dispatch"] == load_priors().estimated["dispatch"]


def test_nothing_learned_is_nothing_to_fit() -> None:
    with pytest.raises(InvalidValue, match="Name runs that measured more plans"):
        fit_priors([host([LearnedFactor("device", "d0", 0.0, 0.1, 0.1)])], load_priors())


def small_problem() -> Problem:
    """Forty ops of five types in a random order of dependence, on two devices and two links."""
    rng = np.random.default_rng(0)
    reads = [sorted(set(rng.integers(max(0, i - 8), i, 2).tolist())) if i else [] for i in range(40)]
    graph = op_graph(reads, rng.integers(1, 9, 40).tolist(), targets=[f"aten.op{k}" for k in rng.integers(0, 5, 40)])
    devices = tuple(Device(f"d{k}", "k", "simulated", 1 << 30) for k in range(2))
    routes = (Route("d0", "d1", ("there",)), Route("d1", "d0", ("back",)))
    host = Host("two", devices, (Link("there", 1e5, 1e-6), Link("back", 1e5, 1e-6)), routes)
    costs = np.repeat(rng.uniform(1e-5, 5e-5, (40, 1)), 2, axis=1)
    return Problem(graph, host, Costs(costs, "profiled"), Grouping(np.arange(40)))


def test_runs_on_hosts_of_another_kind_than_was_expected_move_the_figures_towards_theirs() -> None:
    problem, rng, shipped = small_problem(), np.random.default_rng(1), prior_of(small_problem())
    true = Prior(op_type=0.6, device=0.1, bandwidth=1.0, latency=0.7, overhead_s=12e-6, overhead=0.3)
    scales, simulator, hosts = Scales(problem, true), Simulator(problem), []
    for _ in range(12):
        truth = Simulator(scales.apply(rng.standard_normal(len(scales)) * scales.deviation))
        plans = [simulator.plan(devices) for devices in rng.integers(0, 2, (24, 40)).astype(np.int32)]
        model = HostModel(Scales(problem, shipped))
        noise = rng.lognormal(0, 0.005, len(plans))
        model.add(plans, np.array([truth.retime(plan).step_time_s for plan in plans]) * noise)
        hosts.append(LearnedHost.of(model.fit()))
    fitted = fit_priors(hosts, load_priors())[0].prior("profiled")
    for name in ("op_type", "bandwidth", "overhead_s"):
        before, after, goal = (math.log(getattr(prior, name)) for prior in (shipped, fitted, true))
        assert abs(after - goal) < 0.6 * abs(before - goal), name


def run_of(folder: Path, log: float) -> tuple[Path, LearnedHost]:
    """A run that learned one device's factor."""
    folder.mkdir()
    learned = host([LearnedFactor("device", "d0", log, 1e-6, 0.1)])
    write_json_atomic(folder / "host_model.json", dataclasses.asdict(learned))
    return folder, learned


def test_runs_and_a_store_become_a_file_of_priors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (one, known), (_, other) = run_of(tmp_path / "a", 0.3), run_of(tmp_path / "b", -0.1)
    with MeasurementStore.open(tmp_path / "measurements.db") as store:
        session = MeasuringProcess(1e9, "nmt", "0", "two", "v")
        for learned in (known, other):  # that of the run counts once
            store.add_learned(session, "0", learned)
    out = tmp_path / "mine.json"
    main([one, one / "host_model.json"], str(tmp_path), out)
    assert load_priors(out).prior("profiled").device == pytest.approx(math.sqrt((0.1 + 4 * 0.01) / 6), rel=1e-3)
    assert load_priors(out).estimated == load_priors().estimated
    said = capsys.readouterr().out
    assert "fitted to 2 factors of 2 runs; the shipped 0.1 counts as 4 more factors" in said
    assert f"{out}: 1 figure fitted" in said
    with pytest.raises(FileProblem, match="is there already"):
        main([one], "off", out)
    with pytest.raises(InvalidValue, match="Name runs"):
        main([], "off", tmp_path / "none.json")
