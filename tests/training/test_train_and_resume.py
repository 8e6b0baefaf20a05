"""`run_training`: what people and the tracker are told of a run, from words to a run folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from random_problems import plain_host
from search_problems import chain_problem

from rlplace.graphs import save_graph
from rlplace.measure import Host
from rlplace.session.setup import Setup
from rlplace.training import SearchConfig, TrainConfig, train_and_resume
from rlplace.training.tracking import NoTracker
from rlplace.training.train_and_resume import run_training
from rlplace.workloads import parse_workload


class Notes(NoTracker):
    """Keeps what it is shown at the end of a run."""

    def __init__(self) -> None:
        self.methods: list[str] = []
        self.files: dict[str, list[str]] = {}

    def log_table(self, rows: Sequence[Mapping[str, object]]) -> None:
        self.methods = [str(row["method"]) for row in rows]

    def log_files(self, name: str, paths: Sequence[Path]) -> None:
        assert all(path.is_file() for path in paths)
        self.files[name] = [path.name for path in paths]

    how_to_sync = "how to send it"


def test_the_tracker_gets_the_table_the_configuration_and_what_was_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = Notes()
    monkeypatch.setattr(train_and_resume, "make_tracker", lambda *_: notes)
    save_graph(chain_problem(5, 2).graph, tmp_path / "chain.json")
    spec, folder = parse_workload(str(tmp_path / "chain.json")), tmp_path / "run"
    told = run_training(Setup(spec=spec, host=plain_host(2), host_word="plain"), TrainConfig(budget_s=0.4), folder)
    assert notes.methods == [row["method"] for row in told["rows"]]
    assert notes.files == {
        "config": ["config.json", "result.json"],
        "policy": ["policy.safetensors", "policy.json"],
    }
    said = capsys.readouterr().err
    assert "how to send it" in said
    kept = json.loads((folder / "result.json").read_text())
    assert kept["durations"] == told["durations"]
    assert kept["durations"]["expected"]["search_s"] == 0.4
    assert kept["durations"]["taken"]["profiling_s"] > 0


WORK = """
import torch

def work():
    torch.manual_seed(0)
    return torch.nn.Linear(8, 8), torch.ones(4, 8), lambda y: y.square().mean(), "sgd"
"""


@pytest.mark.slow
def test_on_this_machine_all_of_it_is_told_before_anything_is_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "timed_work.py").write_text(WORK, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    config = TrainConfig(budget_s=1.0, search=SearchConfig(num_calibrated=0, table_rounds=2))
    setup = Setup(spec=parse_workload("timed_work:work"), host=Host.detect("cores"), host_word="cores")
    told = run_training(setup, config, tmp_path / "run")
    sys.modules.pop("timed_work", None)
    lines = capsys.readouterr().err.splitlines()
    (ahead,) = (number for number, line in enumerate(lines) if line.startswith("about ") and " in all" in line)
    assert not any(line.startswith("profiling ") for line in lines[:ahead])
    assert any(line.startswith("took ") for line in lines)
    expected, taken = told["durations"]["expected"], told["durations"]["taken"]
    assert set(expected) == set(taken)
    assert 0 < expected["profiling_s"] < expected["total_s"]
    assert taken["profiling_s"] > 0
    assert taken["calibration_s"] < taken["total_s"]
