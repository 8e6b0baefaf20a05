"""What a run folder says, and what a malformed one is refused for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from elastic_hosts import simulated_host
from run_folders import WORKED_S, placed_run

from rlplace.errors import FingerprintMismatch, RlplaceError
from rlplace.graphs.formats import save_graph
from rlplace.graphs.synthetic import synthetic
from rlplace.session.folder import RunFolder
from rlplace.training.elastic.placed_again import KnownRun, read_known, sized
from rlplace.workloads import parse_workload

GRAPH = synthetic("fork_join", seed=1, stages=3, width=3)
HOST = simulated_host("fast", "fast", "slow")
DEVICES = np.zeros(GRAPH.num_ops, dtype=np.int32)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    save_graph(GRAPH, tmp_path / "graph.json")
    return placed_run(tmp_path / "run", str(tmp_path / "graph.json"), GRAPH, HOST, DEVICES, seed=3)


def known_of(run: RunFolder) -> KnownRun:
    return read_known(run, str(run.root.parent / "graph.json"))


def test_a_run_says_what_it_was(run: RunFolder) -> None:
    known = known_of(run)
    assert known.host == HOST
    assert known.graph_fingerprint == GRAPH.fingerprint
    assert (known.costs.op_time_s == WORKED_S).all()
    assert (known.choices.built_with, known.choices.num_groups, known.count) == (3, 256, 1)
    assert known.placement is not None
    assert (known.placement.devices == DEVICES).all()
    assert known.learned is None


def test_the_seed_of_the_workload_is_its_own(run: RunFolder) -> None:
    change(run, "config.json", lambda config: config.update(workload_seed=4))
    assert known_of(run).choices.built_with == 4


def test_a_run_that_was_stopped_early_has_no_placement(run: RunFolder) -> None:
    run.path("placement.json").unlink()
    assert known_of(run).placement is None


def test_a_name_gets_the_size_that_it_had() -> None:
    assert str(sized(parse_workload("nmt"), "paper")) == "nmt@paper"
    assert str(sized(parse_workload("nmt@layers=4"), "paper")) == "nmt@paper,layers=4"
    assert str(sized(parse_workload("nmt@small"), "paper")) == "nmt@small"
    assert str(sized(parse_workload("multi:bert*2,gpt2@paper"), "small")) == "multi:bert@small*2,gpt2@paper"
    assert str(sized(parse_workload("mine.models:work"), "paper")) == "mine.models:work"


def test_a_users_function_or_file_is_opened_only_if_it_is_named_again(run: RunFolder) -> None:
    with pytest.raises(RlplaceError, match=r"--workload .*graph\.json"):
        read_known(run)
    change(run, "config.json", lambda config: config.update(workload="mine:work"))
    with pytest.raises(RlplaceError, match="--workload mine:work"):
        read_known(run)
    assert read_known(run, "mine:work").spec.is_function


def change(run: RunFolder, name: str, edit: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(run.path(name).read_text())
    edit(data)
    run.path(name).write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("name", "edit", "word"),
    [
        ("config.json", lambda it: it.update(workload=7), "workload"),
        ("config.json", lambda it: it.update(default_size="huge"), "default_size"),
        ("config.json", lambda it: it.update(train=[]), "train"),
        ("config.json", lambda it: it["train"].update(seed="x"), "train.seed"),
        ("config.json", lambda it: it.update(workload_seed="x"), "workload_seed"),
        ("config.json", lambda it: it["train"].update(constraints={"pins": [["a"]]}), "train.constraints"),
        ("config.json", lambda it: it.update(micro_batches=3), "micro_batches"),
        ("problem.json", lambda it: it.pop("graph"), "graph.fingerprint"),
        ("problem.json", lambda it: it.update(op_order="up"), "op_order"),
        ("problem.json", lambda it: it["host"].update(devices=5), "devices"),
        ("problem.json", lambda it: it["costs"].update(source="dreamt"), "costs.source"),
        ("problem.json", lambda it: it["costs"].update(op_time_s="fast"), "costs.op_time_s"),
        ("problem.json", lambda it: it["costs"]["op_time_s"][0].pop(), "costs.op_time_s"),
        ("problem.json", lambda it: it["costs"]["op_time_s"][1].__setitem__(0, -1), "costs.op_time_s"),
        ("problem.json", lambda it: it["costs"]["op_time_s"][1].__setitem__(0, 10**400), "costs.op_time_s"),
        ("problem.json", lambda it: it["costs"]["op_time_s"].pop(), "op_device"),
        ("placement.json", lambda it: it.update(op_device=[9]), "op_device"),
    ],
)
def test_a_malformed_run_is_refused(
    run: RunFolder, name: str, edit: Callable[[dict[str, Any]], object], word: str
) -> None:
    change(run, name, edit)
    with pytest.raises(RlplaceError) as refused:
        read_known(run) if word == "workload" else known_of(run)
    assert word in str(refused.value)


def test_a_placement_of_another_step_or_host_is_refused(run: RunFolder) -> None:
    for kind in ("graph", "host"):
        before = run.path("placement.json").read_text()
        field = f"{kind}_fingerprint"
        change(run, "placement.json", lambda it, field=field: it.update({field: "0" * 16}))
        with pytest.raises(FingerprintMismatch) as refused:
            known_of(run)
        assert refused.value.kind == kind
        run.path("placement.json").write_text(before)


def test_another_step_than_the_runs_is_refused(run: RunFolder) -> None:
    known = known_of(run)
    known.require_graph(GRAPH)
    with pytest.raises(FingerprintMismatch):
        known.require_graph(synthetic("fork_join", seed=2, stages=3, width=3))
