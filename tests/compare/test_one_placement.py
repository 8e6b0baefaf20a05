"""One placement timed under constraints: by hand, on two equal devices of a simulated host."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

from rlplace.cli.main import main

HOST = ("--host", "4xV100-pcie")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two ops of 1 s and of 2 s that share nothing, and two of 4 s, one after the other."""
    graph = nx.DiGraph()
    for name, seconds in (("a", 1.0), ("b", 2.0), ("c", 4.0), ("d", 4.0)):
        graph.add_node(name, time_s=seconds, bytes=4)
    graph.add_edge("c", "d")
    nx.write_graphml(graph, tmp_path / "g.graphml")
    return tmp_path / "g.graphml"


def simulated(file: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["simulate", str(file), *HOST, *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_pins_move_what_they_name_and_the_bound_counts_on_them(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    free = simulated(file, capsys)
    assert free["placement"] == "everything on cuda:0"
    assert free["step_time_s"] == pytest.approx(11.0, rel=1e-3)
    assert free["lower_bound_s"] == pytest.approx(8.0, rel=1e-3)
    pinned = simulated(file, capsys, "--pin", "a=cuda:1", "--pin", "b=cuda:2")
    assert pinned["placement"].startswith("everything that may be on cuda:")
    assert pinned["step_time_s"] == pytest.approx(8.0, rel=1e-3)
    crowded = simulated(file, capsys, *(word for name in "abcd" for word in ("--pin", f"{name}=cuda:2")))
    assert crowded["placement"] == "everything on cuda:2"
    assert crowded["lower_bound_s"] == pytest.approx(crowded["step_time_s"], rel=1e-3)
    assert crowded["step_time_s"] == pytest.approx(11.0, rel=1e-3)


def test_a_placement_that_breaks_a_constraint_is_refused(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(file), *HOST, "--methods", "single", "--save", str(tmp_path), "--quiet"]) == 0
    kept = ["simulate", str(file), *HOST, "--placement", str(tmp_path / "single-0.placement.json")]
    assert main([*kept, "--exclude", "a=cuda:3"]) == 0
    capsys.readouterr()
    for words in (("--pin", "a=cuda:3"), ("--exclude", "a=cuda:0")):
        assert main([*kept, *words]) == 2
        assert "op 'a' on 'cuda:0'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["simulate", "measure", "fidelity"])
def test_a_device_that_is_not_there_is_said_before_anything_is_read(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "nmt", *HOST, "--pin", "encoder.*=cuda:9"]) == 2
    said = capsys.readouterr().err
    assert "cuda:9" in said
    assert "capturing" not in said
