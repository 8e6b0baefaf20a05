"""Every format keeps which micro-batch an op belongs to, and files of steps that are not cut stay as they were."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from graph_files import assert_same, rich_graph

from rlplace.errors import InvalidValue
from rlplace.graphs.formats import load_graph, save_graph
from rlplace.graphs.formats.graph_files import to_dot
from rlplace.graphs.opgraph import OpGraph

COLUMN = [-1, 0, 0, 1, 1, -1]


def cut_graph() -> OpGraph:
    return dataclasses.replace(rich_graph(), micro_batch=np.array(COLUMN, dtype=np.int32))


@pytest.mark.parametrize("ending", ["json", "graphml"])
def test_files_keep_the_column(tmp_path: Path, ending: str) -> None:
    save_graph(cut_graph(), tmp_path / f"g.{ending}")
    assert_same(load_graph(tmp_path / f"g.{ending}"), cut_graph())


def test_networkx_and_node_link_keep_the_column(tmp_path: Path) -> None:
    graph = cut_graph().to_networkx()
    assert [row["micro_batch"] for _, row in graph.nodes(data=True)] == COLUMN
    assert_same(OpGraph.from_networkx(graph), cut_graph())
    (tmp_path / "g.json").write_text(json.dumps(nx.node_link_data(graph, edges="edges")))
    assert_same(load_graph(tmp_path / "g.json"), cut_graph())


@pytest.mark.parametrize("ending", ["json", "graphml", "dot"])
def test_the_file_of_a_step_that_is_not_cut_does_not_mention_micro_batches(tmp_path: Path, ending: str) -> None:
    save_graph(rich_graph(), tmp_path / f"g.{ending}")
    assert "micro" not in (tmp_path / f"g.{ending}").read_text()


def test_dot_names_the_micro_batch() -> None:
    lines = to_dot(cut_graph(), depth=1).splitlines()
    assert any('label="x & <y>\\ninput\\nmicro-batch 0"' in line for line in lines)
    assert any(line.startswith('n0 [label="w\\nparameter" ') for line in lines)


def test_graphs_of_others_may_say_it() -> None:
    graph = nx.DiGraph()
    graph.add_node("a", micro_batch=0)
    graph.add_node("b", micro_batch=1)
    graph.add_node("sum")
    graph.add_edges_from([("a", "sum"), ("b", "sum")])
    found = OpGraph.from_networkx(graph)
    assert found.micro_batch.tolist() == [0, 1, -1]
    assert found.num_micro_batches == 2


@pytest.mark.parametrize("value", [-2, 3, "1", True, 0.5])
def test_a_wrong_entry_is_named_with_its_node(value: Any) -> None:
    graph = nx.DiGraph([("a", "b"), ("b", "c")])
    graph.nodes["b"]["micro_batch"] = value
    with pytest.raises(InvalidValue, match=r"'?b'?: micro_batch is .*expected an integer in -1\.\.2"):
        OpGraph.from_networkx(graph)


@pytest.mark.parametrize("column", [[0] * 5, [-2] * 6, [6] * 6, "none", [0, 0, 0, 0, 0, 0.5]])
def test_a_wrong_column_is_named_with_its_file(tmp_path: Path, column: Any) -> None:
    save_graph(cut_graph(), tmp_path / "g.json")
    data = json.loads((tmp_path / "g.json").read_text()) | {"micro_batch": column}
    (tmp_path / "g.json").write_text(json.dumps(data))
    with pytest.raises(InvalidValue, match=r"g\.json: micro_batch"):
        load_graph(tmp_path / "g.json")
