"""`rlplace advise`: from words to a verdict, on simulated hosts and on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlplace.cli.main import main
from rlplace.graphs.formats import save_graph
from rlplace.graphs.synthetic import synthetic

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
    assert said.out == ""
    assert "2 micro-batches:" in said.err
    assert "expected step" in said.err


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
