"""`rlplace place`: words to files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlplace.cli.main import main
from rlplace.graphs.formats import save_graph
from rlplace.graphs.synthetic import synthetic
from rlplace.measure.placement import load_placement


@pytest.fixture
def graph(tmp_path: Path) -> str:
    path = tmp_path / "graph.json"
    save_graph(synthetic("fork_join", seed=1, stages=3, width=3, flops=1e10), path)
    return str(path)


def test_a_graph_is_placed_with_one_simulated_step(
    graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    words = ["place", graph, "--host", "4xV100-pcie", "--placement", str(out)]
    assert main([*words, "--evaluations", "1", "--json", "--quiet"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["evaluations"] == 1
    assert first["step_time_s"] >= first["lower_bound_s"]
    assert load_placement(out).method == "schedule"
    assert main(["simulate", graph, "--host", "4xV100-pcie", "--placement", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"] == pytest.approx(first["step_time_s"])
    assert main(words) == 2  # what is there is not overwritten
    assert "--overwrite" in capsys.readouterr().err
    assert main([*words, "--overwrite", "--evaluations", "16", "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"] <= first["step_time_s"]


def test_a_guess_that_is_slower_than_one_device_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_graph(synthetic("layered", seed=1, layers=6, width=1, fan_in=1, flops=1e8), tmp_path / "chain.json")
    words = ["place", str(tmp_path / "chain.json"), "--host", "4xV100-pcie", "--quiet"]
    for method, evaluations, is_slower in (("round-robin", 16, True), ("single", 16, False)):
        budget = ["--method", method, "--evaluations", str(evaluations)]
        assert main([*words, *budget, "--placement", str(tmp_path / f"{method}.json")]) == 0
        assert ("slower than the best single device" in capsys.readouterr().out) is is_slower


def test_what_no_single_device_holds_is_said(graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["place", graph, "--host", "4xV100-pcie", "--quiet", "--method", "round-robin"]
    assert main([*words, "--placement", str(tmp_path / "found.json")]) == 0
    said = capsys.readouterr().out
    assert "no single device holds it" in said
    assert "inf" not in said


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--evaluations", "0"], "at least 1"),
        (["--method", "schedul"], "schedule"),
        (["--host", "4xV"], "unknown host"),
    ],
)
def test_a_mistake_leaves_no_file(
    arguments: list[str], word: str, graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    host = [] if "--host" in arguments else ["--host", "4xV100-pcie"]
    assert main(["place", graph, *host, "--placement", str(out), *arguments]) == 2
    assert word in capsys.readouterr().err
    assert not out.exists()
