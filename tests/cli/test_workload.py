"""`rlplace graph`: its figures, its files and its mistakes.

`rlplace advise`: from words to a verdict, on simulated hosts and on this machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from graph_files import rich_graph
from micrographs import op_graph

from rlplace.cli.main import main
from rlplace.cli.workload import parse_dims
from rlplace.errors import InvalidValue
from rlplace.graphs.formats import load_graph, save_graph
from rlplace.graphs.synthetic import synthetic

SMALL = "nmt@layers=1,units=16,batch=4,steps=3,vocab=50"


def facts(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["graph", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_named_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "nmt.json"
    found = facts(capsys, SMALL, "--save", str(path), "--dot", str(tmp_path / "nmt.dot"), "--dot-ops", "20")
    graph = load_graph(path)
    assert found["schema"] == 1
    assert found["num_ops"] == graph.num_ops == sum(found["phases"].values())
    assert found["num_edges"] == graph.num_edges
    assert found["flops"] == pytest.approx(graph.flops.sum())
    assert found["parameter_bytes"] == found["gradient_bytes"] == graph.parameter_bytes.sum() > 0
    assert found["state_bytes"] == pytest.approx(2 * found["parameter_bytes"], rel=0.01)
    assert 1 <= found["num_groups"] <= 256
    assert 0 < found["critical_path_s"] <= found["single_device_s"]
    assert found["critical_path_ops"] <= graph.num_ops
    assert found["capture_s"] > 0
    assert found["costs_host"] == "4xV100-pcie"
    assert "and" in (tmp_path / "nmt.dot").read_text().splitlines()[-2]
    again = facts(capsys, str(path))
    assert again["is_file"]
    assert {**again, "workload": 0, "capture_s": 0, "is_file": 0} == {
        **found,
        "workload": 0,
        "capture_s": 0,
        "is_file": 0,
    }


def test_people_see_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_graph(rich_graph(), tmp_path / "g.graphml")
    assert main(["graph", str(tmp_path / "g.graphml"), "--host", "8xV100-dgx1"]) == 0
    said = capsys.readouterr()
    for word in (
        "6 (3 forward, 2 backward, 1 update; 2 of them sources)",
        "aten.mm.default",
        "by roofline, on 8xV100-dgx1",
        "48 B",
    ):
        assert word in said.out


def test_costs_of_a_host_without_figures_are_those_of_a_preset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_graph(op_graph([[], [0]], 4), tmp_path / "g.json")
    assert facts(capsys, str(tmp_path / "g.json"), "--host", "cores")["costs_host"] == "4xV100-pcie"
    assert facts(capsys, str(tmp_path / "g.json"), "--host", "4xK80")["costs_host"] == "4xK80"


def test_a_function_may_read_the_values_of_what_it_builds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (
        "import torch",
        "def f():",
        "    m = torch.nn.Linear(3, 2)",
        "    assert m.weight.detach().numpy().any()",
        "    return m, torch.ones(1, 3)",
    )
    (tmp_path / "reads_values.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    assert facts(capsys, "reads_values:f")["parameter_bytes"] == 4 * (3 * 2 + 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inception_v4"], ["unknown workload", "inception_v3"]),
        (["g.json"], ["g.json", "no such"]),
        (["bad.json"], ["bad.json", "flops is 'missing'"]),
        (["nmt", "--host", "4xV100"], ["unknown host", "4xV100-pcie"]),
        (["nmt", "--groups", "0"], ["groups", "at least 1"]),
        (["nmt", "--dims", "batch"], ["dims", "batch=8"]),
        (["nmt", "--dims", "batch=2"], ["dims", "ONNX"]),
        (["good.json", "--dims", "batch=2"], ["dims", "ONNX"]),
        (["good.json", "--save", "x.onnx"], [".onnx", ".graphml"]),
    ],
)
def test_a_mistake_is_one_clear_message(
    arguments: list[str],
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    save_graph(rich_graph(), "good.json")
    data = json.loads(Path("good.json").read_text())
    del data["flops"]
    Path("bad.json").write_text(json.dumps(data))
    assert main(["graph", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    for word in words:
        assert word in said.err
    assert "Traceback" not in said.err


def test_dims() -> None:
    assert parse_dims("") == {}
    assert parse_dims("a=1, b.1 = 20") == {"a": 1, "b.1": 20}
    for text in ("a", "a=", "a=x", "=3", "a=-1"):
        with pytest.raises(InvalidValue, match="dims"):
            parse_dims(text)


def test_a_dnn_partitioning_file_brings_its_own_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = {"supportedOnFpga": 1, "isBackwardNode": 0, "size": 1.0}
    document = {
        "maxSizePerFPGA": 10.0,
        "maxFPGAs": 2,
        "maxCPUs": 1,
        "nodes": [node | {"id": i, "cpuLatency": 20.0, "fpgaLatency": 3.0 + i} for i in (1, 2)],
        "edges": [{"sourceId": 1, "destId": 2, "cost": 1.0}],
    }
    (tmp_path / "d.json").write_text(json.dumps(document))
    found = facts(capsys, str(tmp_path / "d.json"), "--save", str(tmp_path / "ours.json"))
    assert facts(capsys, str(tmp_path / "ours.json"))["costs_host"] == "4xV100-pcie"
    assert (found["costs_host"], found["num_ops"], found["num_edges"]) == ("dnn-partitioning", 2, 1)
    assert found["critical_path_s"] == found["single_device_s"] == pytest.approx(9e-3)
    (tmp_path / "split.json").write_text(json.dumps({"cpus": [], "fpgas": []}))
    assert main(["graph", str(tmp_path / "split.json")]) == 2
    assert "a split" in capsys.readouterr().err


def test_what_a_file_leaves_open_is_said_once_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = nx.DiGraph()
    graph.add_nodes_from([("a", {"flops": 1e9, "time": 2.0}), ("b", {})])
    graph.add_edge("a", "b")
    nx.write_graphml(graph, tmp_path / "theirs.graphml")
    assert main(["graph", str(tmp_path / "theirs.graphml"), "--json"]) == 0
    said = capsys.readouterr()
    unknown, unread = json.loads(said.out)["notes"]
    assert unknown.startswith("1 node of unknown cost: b;")
    assert "time" in unread
    assert said.err.count("unknown cost") == said.err.count("nothing reads") == 1
    assert main(["graph", str(tmp_path / "theirs.graphml")]) == 0
    assert "unknown cost" in capsys.readouterr().out


WORKLOAD = "nmt@layers=1,units=16,batch=4,steps=3,vocab=50"


def test_a_graph_file_is_advised_on_by_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "graph.json"
    save_graph(synthetic("fork_join", seed=1, stages=3, width=3, flops=1e10), path)
    assert main(["advise", str(path), "--host", "4xV100-pcie", "--seconds", "4", "--json", "--quiet"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["schema"], told["figures"]["kind"], told["workload"]) == (1, "simulated", str(path))
    assert (told["verdict"], told["next"]) == ("place", f"rlplace train {path} --host 4xV100-pcie")
    assert told["figures"]["bound_s"] <= told["figures"]["placed_s"]
    assert told["figures"]["single_s"] is None  # no device holds its 36 GiB
    assert told["figures"]["single_bytes"] > told["figures"]["single_capacity_bytes"]
    assert told["capture_s"] >= 0
    assert told["seconds"] > 0


@pytest.mark.slow
def test_micro_batches_are_tried_and_people_read_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["advise", WORKLOAD, "--host", "4xV100-pcie", "--micro-batches", "2", "--seconds", "2"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "2 micro-batches:" in said.err
    assert "expected step" in said.out


@pytest.mark.slow
def test_this_machine_is_profiled_and_raced(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", WORKLOAD, "--host", "cores", "--seconds", "5", "--json"]) == 0
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert (told["figures"]["kind"], told["figures"]["costs"], told["over"]) == ("measured", "profiled", "eager")
    assert told["figures"]["eager_s"] > 0
    assert "rougher" in said.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seconds", "0s"], "seconds is 0.0, expected at least 1s"),
        (["--host", "4xV100-pci"], "unknown host"),
        (["--micro-batches", "many"], "micro_batches is 'many'"),
        (["--pin", "encoder=cuda:9"], "unknown device 'cuda:9'"),
    ],
)
def test_mistakes_are_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    host = [] if "--host" in flags else ["--host", "4xV100-pcie"]
    assert main(["advise", WORKLOAD, *host, *flags]) == 2
    assert message in capsys.readouterr().err
