"""`Steps`: a step captured from a model, or read from a graph file, which can be simulated but never run."""

from __future__ import annotations

import json
from pathlib import Path

import networkx as nx
import pytest

from rlplace.cli.main import main
from rlplace.errors import InvalidValue
from rlplace.graphs.formats import save_graph
from rlplace.measure.hosts.resolve import resolve_host
from rlplace.session.prepare import Steps, capture_workload
from rlplace.workloads import build_for, parse_workload

NMT = "nmt@layers=1,units=8,steps=3,batch=2,vocab=11"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "step.json"
    save_graph(Steps(parse_workload(NMT), resolve_host("4xV100-pcie"), seed=0).graph(1), path)
    return path


def test_a_file_is_the_graph_that_was_saved(file: Path) -> None:
    host = resolve_host("4xV100-pcie")
    captured = capture_workload(build_for(parse_workload(NMT), host, seed=0))
    assert Steps(parse_workload(str(file)), host, seed=0).graph(1).fingerprint == captured.fingerprint


def test_a_file_cannot_run_on_a_host_of_this_machine(file: Path) -> None:
    with pytest.raises(InvalidValue, match="simulated, not measured"):
        Steps(parse_workload(str(file)), resolve_host("cores"), seed=0).graph(1)


def test_a_file_is_simulated_like_its_model(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = []
    for workload in (NMT, str(file)):
        assert main(["simulate", workload, "--host", "4xV100-pcie", "--json"]) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0] == results[1]
    assert results[0]["kind"] == "simulated"


@pytest.mark.parametrize("ending", ["graphml", "json"])
def test_times_in_a_file_are_its_costs(ending: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = nx.DiGraph()
    for i, seconds in enumerate((0.5, 1.25, 2.0)):
        graph.add_node(str(i), time_s=seconds)
    graph.add_edges_from([("0", "1"), ("1", "2")])
    path = tmp_path / f"timed.{ending}"
    if ending == "json":
        path.write_text(json.dumps(nx.node_link_data(graph, edges="edges")))
    else:
        nx.write_graphml(graph, path)
    assert main(["simulate", str(path), "--host", "4xV100-pcie", "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert "the file gives" in said.err
    assert found["costs"] == "given"
    assert found["lower_bound_s"] == pytest.approx(3.75, rel=1e-3)
    assert main(["compare", str(path), "--host", "4xV100-pcie", "--methods", "single", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["step_time_s"] == found["step_time_s"] >= 3.75
    assert main(["graph", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["single_device_s"] == 3.75


@pytest.mark.parametrize("command", ["train", "measure", "simulate", "fidelity"])
def test_commands_that_run_a_model_refuse_a_file(
    command: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--run", str(tmp_path / "run")] if command == "train" else []
    assert main([command, str(file), "--host", "cores", *run]) == 2
    assert "a graph file alone can be simulated, not measured" in capsys.readouterr().err.lower()


@pytest.mark.slow
def test_a_run_of_a_file_is_kept_but_not_exported(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    arguments = ["train", str(file), "--host", "4xV100-pcie", "--budget", "1s", "--run", str(folder)]
    assert main([*arguments, "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == 1
    assert (folder / "placement.json").exists()
    assert not (folder / "step.py").exists()
    assert main(["export", str(folder)]) == 2
    assert f"--workload {file}" in capsys.readouterr().err
    assert main(["export", str(folder), "--workload", str(file)]) == 2
    assert "simulated, not measured" in capsys.readouterr().err
