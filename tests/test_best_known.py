"""The yardstick: what `benchmarks/best_known.json` says can be simulated again."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlplace.files import read_json
from rlplace.measure import Simulator

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def entries() -> dict[str, dict[str, Any]]:
    problems: dict[str, dict[str, Any]] = read_json(BENCHMARKS / "best_known.json")["problems"]
    return problems


def test_every_problem_of_the_suite_has_an_entry(
    entries: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    suites = importlib.import_module("suites")
    assert len(suites.CORE) == len(set(suites.CORE)) == 40
    assert set(suites.CORE_DEV) < set(suites.CORE)
    assert set(entries) == {suites.key_of(*names) for names in suites.CORE}
    for key, entry in entries.items():
        assert entry["step_time_s"] >= entry["lower_bound_s"] * (1 - 1e-9), key
        assert entry["evaluations"] == sum(run["evaluations"] for run in entry["runs"]), key
        assert entry["step_time_s"] == min(run["step_time_s"] for run in entry["runs"] if run["step_time_s"]), key


@pytest.mark.parametrize("host", ["4xV100-pcie", "2x8xA100-ib"])
def test_a_placement_takes_what_is_said(
    host: str, entries: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    suites, best_known = (importlib.import_module(name) for name in ("suites", "best_known"))
    problem, entry = suites.problem_of("dlrm", host), entries[f"dlrm/{host}"]
    assert problem.graph.fingerprint == entry["graph_fingerprint"]
    assert problem.host.fingerprint == entry["host_fingerprint"]
    (outcome,) = Simulator(problem, threads=1).measure(best_known.decode(entry["devices"])[None])
    assert outcome.ok
    assert outcome.step_time_s == pytest.approx(entry["step_time_s"], rel=1e-12)


def test_what_is_known_of_micro_batches_is_no_worse_than_whole_ops(
    entries: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    micro, best_known = (importlib.import_module(name) for name in ("best_known_micro", "best_known"))
    cut = best_known.known(micro.STORE)
    assert set(cut) <= set(entries)
    for key, entry in cut.items():
        assert entry["step_time_s"] <= entries[key]["step_time_s"], key
        assert entry["evaluations"] == sum(run["evaluations"] for run in entry["runs"]), key
        assert entry["step_time_s"] <= min((run["step_time_s"] or np.inf for run in entry["runs"]), default=np.inf), key
        spent = entry["evaluations"] + (entry["whole_evaluations"] if entry["count"] == 1 else 0)
        assert spent >= 500_000, key
        if entry["count"] == 1:
            assert entry["devices"] == entries[key]["devices"] or entry["runs"], key


@pytest.mark.slow
def test_a_placement_of_micro_batches_takes_what_is_said_in_the_order_that_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    micro, best_known, core_micro = (
        importlib.import_module(n) for n in ("best_known_micro", "best_known", "core_micro")
    )
    entry = best_known.known(micro.STORE)["gpt2/2xK80"]
    problem = core_micro.problem_of("gpt2", "2xK80", entry["count"])
    assert problem.graph.fingerprint == entry["graph_fingerprint"]
    times = dict(micro.ordered(problem, best_known.decode(entry["devices"])))
    assert times[entry["op_order"]] == pytest.approx(entry["step_time_s"], rel=1e-12)
