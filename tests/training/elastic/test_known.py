"""What the session of a run knows of its workload, host and placement, and what a malformed one is refused for."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elastic_hosts import simulated_host
from run_files import change, forget
from run_folders import WORKED_S, placed_run
from safetensors.numpy import load, save

from rlplace.errors import FingerprintMismatch, RlplaceError
from rlplace.graphs.formats import save_graph
from rlplace.graphs.synthetic import synthetic
from rlplace.training.elastic.placed_again import KnownRun, read_known, sized
from rlplace.workloads import parse_workload

GRAPH = synthetic("fork_join", seed=1, stages=3, width=3)
HOST = simulated_host("fast", "fast", "slow")
DEVICES = np.zeros(GRAPH.num_ops, dtype=np.int32)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save_graph(GRAPH, tmp_path / "graph.json")
    return placed_run(tmp_path / "run", str(tmp_path / "graph.json"), GRAPH, HOST, DEVICES, seed=3).root


def known_of(run: Path) -> KnownRun:
    return read_known(run, str(run.parent / "graph.json"))


def test_a_run_says_what_it_was(run: Path) -> None:
    known = known_of(run)
    assert known.host == HOST
    assert known.session.facts.graph_fingerprint == GRAPH.fingerprint
    assert (known.costs.op_time_s == WORKED_S).all()
    assert (known.session.request.workload_seed, known.config.num_groups, known.session.cut[0]) == (3, 256, 1)
    assert known.placement is not None
    assert (known.placement.devices == DEVICES).all()
    assert known.learned is None


def test_a_run_that_was_stopped_early_has_no_placement(run: Path) -> None:
    forget(run, "placement")
    assert known_of(run).placement is None
    forget(run, "problem")
    with pytest.raises(RlplaceError, match="no problem"):
        known_of(run)


def test_outputs_are_not_read(run: Path) -> None:
    for name in ("config.json", "problem.json", "placement.json"):
        (run / name).write_text("{")
    assert known_of(run).placement is not None


def test_a_name_gets_the_size_that_it_had() -> None:
    assert str(sized(parse_workload("nmt"), "paper")) == "nmt@paper"
    assert str(sized(parse_workload("nmt@layers=4"), "paper")) == "nmt@paper,layers=4"
    assert str(sized(parse_workload("nmt@small"), "paper")) == "nmt@small"
    assert str(sized(parse_workload("multi:bert*2,gpt2@paper"), "small")) == "multi:bert@small*2,gpt2@paper"
    assert str(sized(parse_workload("mine.models:work"), "paper")) == "mine.models:work"


def test_a_users_function_or_file_is_opened_only_if_it_is_named_again(run: Path) -> None:
    with pytest.raises(RlplaceError, match=r"--workload .*graph\.json"):
        read_known(run)
    change(run, "request", workload="mine:work")
    with pytest.raises(RlplaceError, match="--workload mine:work"):
        read_known(run)
    assert read_known(run, "mine:work").spec.is_function


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("request", {"workload": 7}, "workload"),
        ("request", {"default_size": "huge"}, "default_size"),
        ("request", {"workload_seed": "x"}, "workload_seed"),
        ("request", {"asked": 3}, "asked"),
        ("config", {"seed": "x"}, "seed"),
        ("config", {"constraints": {"pins": [["a"]]}}, "constraints"),
        ("problem", {"graph_fingerprint": None}, "graph_fingerprint"),
        ("problem", {"op_order": "up"}, "op_order"),
        ("problem", {"cost_source": "dreamt"}, "cost_source"),
        ("problem", {"names": []}, "modules"),
        ("host", {"devices": 5}, "devices"),
        ("placement", {"op_device": [9]}, "op_device"),
    ],
)
def test_a_malformed_run_is_refused(run: Path, name: str, changes: dict[str, Any], word: str) -> None:
    change(run, name, **changes)
    with pytest.raises(RlplaceError) as refused:
        read_known(run) if word == "workload" else known_of(run)
    assert word in str(refused.value)


@pytest.mark.parametrize("times_s", [np.full((GRAPH.num_ops, 3), -1.0), np.zeros((GRAPH.num_ops, 2)), np.zeros(3)])
def test_costs_of_strangers_are_looked_at(run: Path, times_s: np.ndarray) -> None:
    with sqlite3.connect(run / "session.db") as database:
        (data,) = database.execute("SELECT value FROM arrays WHERE name = 'problem'").fetchone()
        database.execute("UPDATE arrays SET value = ?", (save({**load(data), "op_time_s": times_s}),))
    database.close()
    with pytest.raises(RlplaceError, match="op_time_s"):
        known_of(run)


@pytest.mark.parametrize("kind", ["graph", "host"])
def test_a_placement_of_another_step_or_host_is_refused(run: Path, kind: str) -> None:
    change(run, "placement", **{f"{kind}_fingerprint": "0" * 16})
    with pytest.raises(FingerprintMismatch) as refused:
        known_of(run)
    assert refused.value.kind == kind


def test_another_step_than_the_runs_is_refused(run: Path) -> None:
    known = known_of(run)
    known.session.require_graph(GRAPH)
    with pytest.raises(FingerprintMismatch):
        known.session.require_graph(synthetic("fork_join", seed=2, stages=3, width=3))
