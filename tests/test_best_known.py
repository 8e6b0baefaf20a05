"""The yardstick: what `benchmarks/best_known.json` says can be simulated again."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

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
