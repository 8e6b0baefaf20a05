"""What people see of the package's objects in a notebook: one short line each, and tables that print."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from random_problems import plain_host
from search_problems import chain_problem, fork_problem
from torch import nn

from rlplace.compare import Comparison, Row
from rlplace.graphs import Grouping, capture
from rlplace.measure import Costs, Measurement, Placement, Simulator
from rlplace.policy import POLICIES, LearnConfig
from rlplace.report.console import as_html, as_text, results_table
from rlplace.search.methods import find
from rlplace.search.task import Budget
from rlplace.training.forecast import Durations
from rlplace.training.outputs import Table, TrainResult
from rlplace.workloads import parse_workload

PROBLEM = chain_problem(5, 2)
SIMULATOR = Simulator(PROBLEM, threads=3)
DEVICES = np.array([0, 0, 1, 1, 1], dtype=np.int32)
PLAN = SIMULATOR.plan(DEVICES)
ROWS = (
    {"method": "single", "placement": True, "placements": 1, "step_time_s": 0.2, "spread_s": 0.01, "status": "ok"},
    {"method": "heft", "placement": True, "placements": 2, "step_time_s": 0.1, "spread_s": 0.0, "status": "ok"},
    {"method": "eager", "placement": False, "placements": 0, "step_time_s": None, "status": "skipped", "why": "<b>"},
)
TABLE = Table(ROWS, "heft", {})


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (PROBLEM.graph, "OpGraph(5 ops, 4 edges)"),
        (dataclasses.replace(PROBLEM.graph, name="nmt@small"), "OpGraph(5 ops, 4 edges, nmt@small)"),
        (PROBLEM.grouping, "Grouping(5 ops in 5 groups)"),
        (Grouping(np.zeros(1200), "module:2"), "Grouping(1,200 ops in 1 group, module:2)"),
        (PROBLEM.costs, "Costs(estimated, 5 ops on 2 devices, 5000 to 5000 ms in all)"),
        (Costs(np.array([[1e-3, 2e-3]]), "profiled"), "Costs(profiled, 1 op on 2 devices, 1 to 2 ms in all)"),
        (plain_host(2), f"Host({plain_host(2).name}: 2 × {plain_host(2).devices[0].kind}; 4 links, simulated)"),
        (PROBLEM, f"Problem({PROBLEM.graph!r}, 5 groups on {PROBLEM.host.name} (2 devices), estimated costs)"),
        (SIMULATOR, f"Simulator({PROBLEM!r}, latency, 3 threads)"),
        (PLAN, "Plan(5 ops on 2 devices, 1 transfer)"),
        (Placement.of(PROBLEM, PLAN, "heft"), "Placement(2 ops on d0, 3 ops on d1; 1 transfer, by heft)"),
        (Measurement("ok", 0.0125), "Measurement(12.5 ms)"),
        (
            Measurement("ok", 2.0, (1.0, 2.0, 3.0), peak_bytes=(1 << 20, 3 << 20)),
            "Measurement(2000 ms ± 500 ms, median of 3 steps, at most 3.0 MiB on a device)",
        ),
        (Measurement("oom", float("inf"), why="d0 lacks 3 bytes"), "Measurement(oom: d0 lacks 3 bytes)"),
        (TABLE, "Table(3 rows, best 'heft')"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_it_prints_as_one_short_line(shown: object, expected: str) -> None:
    assert repr(shown) == expected


def test_a_timeline_says_how_long_its_step_is() -> None:
    timeline = SIMULATOR.timeline(PLAN)
    assert timeline.step_s == SIMULATOR.retime(PLAN).step_time_s
    assert repr(timeline) == f"Timeline(simulated, {timeline.step_s * 1e3:.4g} ms, 5 ops, 1 transfer)"


def test_what_a_run_and_a_search_found() -> None:
    placement = Placement.of(PROBLEM, PLAN, "heft")
    result = TrainResult(placement, TABLE, SIMULATOR.timeline(PLAN), False, Durations())
    assert repr(result) == "TrainResult(best 'heft', 100 ms a step, simulated)"
    found = find(PROBLEM, "eft", SIMULATOR, Budget(8))
    count = f"{found.evaluations} placements"
    assert repr(found).startswith(f"SearchResult({found.step_time_s * 1e3:.4g} ms a step, {count} in ")


@pytest.mark.slow
@pytest.mark.parametrize("name", list(POLICIES))
def test_a_policy_prints_no_layers(name: str) -> None:
    policy = POLICIES[name](fork_problem(0), LearnConfig(), 0)
    count = sum(parameter.numel() for parameter in policy.parameters())  # type: ignore[attr-defined]
    assert repr(policy) == f"{type(policy).__name__}(6 groups on 2 devices, {count:,} parameters)"


def test_a_captured_graph_is_called_after_its_model() -> None:
    import torch

    graph = capture(nn.Linear(2, 3), torch.ones(1, 2))
    assert graph.label == "Linear"
    assert repr(graph).endswith(" edges, Linear)")


@pytest.mark.slow
@pytest.mark.parametrize(("word", "name"), [("rnnlm", "rnnlm@small"), ("rnnlm@small", "rnnlm@small")])
def test_the_graph_of_a_workload_has_its_name_and_size(word: str, name: str) -> None:
    from rlplace.measure import Host
    from rlplace.session.prepare import Steps

    assert Steps(parse_workload(word), Host.detect("cores"), 0).graph(1).label == name


def test_the_graph_of_a_file_has_its_path(tmp_path: Path) -> None:
    from rlplace.graphs import save_graph
    from rlplace.session.prepare import Steps

    path = tmp_path / "mine.json"
    save_graph(PROBLEM.graph, path)
    assert Steps(parse_workload(str(path)), PROBLEM.host, 0).graph(1).name == str(path)


def test_a_table_prints_without_colours_fastest_first() -> None:
    lines = str(TABLE).splitlines()
    assert [line.split()[0] for line in lines if line.strip() and line.split()[0] in ("heft", "single", "eager")] == [
        *("heft", "single", "eager")
    ]
    assert "heft ★" in str(TABLE)
    assert "0.50×" in str(TABLE)
    assert "\x1b" not in str(TABLE)


def test_a_table_in_a_notebook_is_escaped() -> None:
    shown = TABLE._repr_html_()
    assert "<td>heft ★</td>" in shown
    assert "&lt;b&gt;" in shown
    assert "<b>" not in shown
    assert shown.count("<tr>") == 4
    assert as_html(results_table(list(ROWS), best="heft")) == shown
    assert as_text(results_table(list(ROWS), best="heft")) == str(TABLE)


def test_a_comparison_prints_as_on_the_command_line() -> None:
    rows = (Row("single", 0, "ok", 0.2), Row("heft", 0, "ok", 0.1), Row("eager", 0, "skipped", is_placement=False))
    compared = Comparison("nmt", "two", "latency", rows, 0.05, "work", {})
    assert repr(compared) == "Comparison(3 rows of nmt on two, best 'heft')"
    assert "heft ★" in str(compared)
    assert "lower bound" in str(compared)
    assert "<td>+100.0%</td>" in compared._repr_html_()
