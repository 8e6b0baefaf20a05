"""`rlplace place DIR`: a run's step on another host: words to files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from elastic_hosts import simulated_host, without
from run_folders import placed_run

from rlplace.cli.main import main
from rlplace.errors import FileProblem
from rlplace.graphs.formats import save_graph
from rlplace.graphs.synthetic import synthetic
from rlplace.measure.hosts.host_file import save_host
from rlplace.measure.placement import load_placement

GRAPH = synthetic("fork_join", seed=1, stages=3, width=3, flops=1e9)
FOUR = simulated_host(*["fast"] * 4)

SEARCHED = ("--evaluations", "200")


def placed_on() -> np.ndarray:
    """(N,) int32: ops on all four devices, classes together."""
    devices = np.arange(GRAPH.num_ops, dtype=np.int32) % 4
    members = GRAPH.colocation >= 0
    devices[members] = GRAPH.colocation[members] % 4
    return devices


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run on four devices; `three.json` beside it is the same host without one of them."""
    save_graph(GRAPH, tmp_path / "graph.json")
    save_host(without(FOUR, "gpu:3"), tmp_path / "three.json")
    placed_run(tmp_path / "run", str(tmp_path / "graph.json"), GRAPH, FOUR, placed_on())
    return tmp_path / "run"


def again(run: Path) -> list[str]:
    return ["--workload", str(run.parent / "graph.json")]


def words(run: Path, *more: str) -> list[str]:
    return ["place", str(run), *again(run), "--host", str(run.parent / "three.json"), *SEARCHED, "--quiet", *more]


def test_a_run_is_placed_on_fewer_devices(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    out = run.parent / "found.json"
    assert main(words(run, "--out", str(out), "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == 1
    assert told["devices"] == {
        "kept": {f"gpu:{k}": f"gpu:{k}" for k in range(3)},
        "gone": ["gpu:3"],
        "added": [],
    }
    assert told["step_time_s"] <= told["carried_s"]
    assert told["before_s"] > 0
    assert told["moved"]["num_ops"] >= sum(
        pair["num_ops"] for pair in told["moved"]["pairs"] if pair["from"] == "gpu:3"
    )
    assert told["costs"] == {"known": ["fast"], "estimated": [], "profiled": []}
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before, "the run stays as it was"
    placement = load_placement(out)
    assert placement.device_names == ("gpu:0", "gpu:1", "gpu:2")
    assert (placement.graph_fingerprint, placement.method) == (GRAPH.fingerprint, "portfolio")


def test_it_is_said_what_changed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run.parent / "found.json"
    assert main(words(run, "--placement", str(out))) == 0
    said = capsys.readouterr().out
    assert "it was " in said
    assert "carried over " in said
    assert main(words(run, "--placement", str(out))) == 2
    assert "--overwrite" in capsys.readouterr().err


def test_the_placement_is_simulated_and_exported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, out, host = run.parent / "other", run.parent / "found.json", str(run.parent / "three.json")
    assert main(words(run, "--run", str(other), "--out", str(out), "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["new_run"] == str(other)
    assert load_placement(other / "placement.json").plan.fingerprint == load_placement(out).plan.fingerprint
    assert main(["simulate", str(run.parent / "graph.json"), "--host", host, "--placement", str(out), "--json"]) == 0
    capsys.readouterr()
    assert main(["export", str(other), "--format", "csv"]) == 0
    assert (other / "placement.csv").read_text().count("gpu:") >= GRAPH.num_ops
    assert json.loads((other / "config.json").read_text())["host"] == host
    capsys.readouterr()
    options = ["--host", host, "--evaluations", "50", "--json", "--quiet", "--run", str(run.parent / "x")]
    assert main(["place", str(other), *again(run), *options]) == 0
    assert json.loads(capsys.readouterr().out)["before_s"] > 0
    assert main(words(run, "--run", str(other))) == 2, "there is a run"


def test_a_full_disk_leaves_no_half_of_a_run(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise FileProblem("session.db", "the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr("rlplace.session.session.Session.keep_placement", full)
        assert main(words(run, "--run", str(run.parent / "other"))) == 2
    assert "the disk is full" in capsys.readouterr().err
    assert list((run.parent / "other").iterdir()) == []
    assert main(words(run, "--run", str(run.parent / "other"))) == 0


def test_the_same_seed_finds_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for name in ("one", "two"):
        assert main(words(run, "--out", str(run.parent / name), "--seed", "5", "--json")) == 0
        found.append(json.loads(capsys.readouterr().out)["step_time_s"])
    assert found[0] == found[1]
    assert (run.parent / "one").read_bytes() == (run.parent / "two").read_bytes()


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (["--groups", "9"], "those of the run"),
        (["--micro-batches", "2"], "those of the run"),
        (["--method", "portfoli"], "portfolio"),
        (["--evaluations", "0"], "at least 1"),
        (["--host", "nowhere"], "unknown host"),
        (["--pin", "x=gpu:3"], "gpu:3"),
    ],
)
def test_a_mistake_is_refused(run: Path, more: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    host = [] if "--host" in more else ["--host", str(run.parent / "three.json")]
    out = run.parent / "found.json"
    assert main(["place", str(run), *host, "--out", str(out), *more]) == 2
    assert word in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("option", ["--seconds", "--run", "--workload"])
def test_what_is_of_a_run_is_refused_beside_a_workload(
    run: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = str(run.parent / "graph.json")
    assert main(["place", graph, "--host", "4xV100-pcie", option, "3"]) == 2
    assert "run folder" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["place", str(tmp_path), "--host", "4xV100-pcie"]) == 2
    assert "session.db" in capsys.readouterr().err


@pytest.mark.slow
def test_training_goes_on_elsewhere(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph, three, old = str(run.parent / "graph.json"), str(run.parent / "three.json"), tmp_path / "old"
    save_host(FOUR, tmp_path / "four.json")
    started = ["train", graph, "--host", str(tmp_path / "four.json"), "--evaluations", "40", "--run", str(old)]
    assert main([*started, "--quiet", "--json"]) == 0
    capsys.readouterr()
    words = ["train", graph, "--resume", str(old), "--host", three]
    assert main([*words, "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == 1
    assert load_placement(tmp_path / "old-three" / "placement.json").device_names == ("gpu:0", "gpu:1", "gpu:2")
    assert main(words) == 2, "there is a run"
    assert main([*words, "--run", str(tmp_path / "x"), "--groups", "9"]) == 2
    assert "--groups" in capsys.readouterr().err
    assert main(["train", "--resume", str(old), "--run", str(tmp_path / "x")]) == 2
    assert "name that with `--host` too" in capsys.readouterr().err


@pytest.mark.slow
def test_training_goes_on_from_a_placement_that_was_kept(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, three, old, new = (
        str(run.parent / "graph.json"),
        str(run.parent / "three.json"),
        tmp_path / "old",
        tmp_path / "n",
    )
    save_host(FOUR, tmp_path / "four.json")
    started = ["train", graph, "--host", str(tmp_path / "four.json"), "--evaluations", "40", "--run", str(old)]
    assert main([*started, "--quiet", "--json"]) == 0
    placed = [
        "place",
        str(old),
        "--workload",
        graph,
        "--host",
        three,
        "--evaluations",
        "200",
        "--run",
        str(new),
        "--pin",
        "*0=gpu:1",
    ]
    assert main([*placed, "--quiet", "--json"]) == 0
    capsys.readouterr()
    assert main(["train", graph, "--resume", str(new), "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == 1
    assert load_placement(new / "placement.json").device_names == ("gpu:0", "gpu:1", "gpu:2")
    asked = json.loads((new / "config.json").read_text())["asked"]["train"]
    assert asked["constraints"]["pins"] == [["*0", "gpu:1"]], "as it was placed"


@pytest.mark.slow
def test_more_evaluations_are_not_offered_as_a_budget_that_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "train",
        str(run.parent / "graph.json"),
        "--host",
        "2xK80",
        "--evaluations",
        "20",
        "--run",
        str(tmp_path / "a"),
    ]
    assert main([*words, "--quiet", "--json"]) == 0
    capsys.readouterr()
    assert main(["train", "--resume", str(tmp_path / "a")]) == 0
    said = capsys.readouterr().err
    assert "has come to its end; its 20 evaluations are spent" in said
    assert "--budget" not in said
