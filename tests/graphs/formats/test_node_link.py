"""Node-link JSON as networkx writes it: all of a graph of ours comes back, and a mistake is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from graph_files import assert_same, rich_graph

from rlplace.errors import InvalidValue
from rlplace.graphs.formats import load_graph
from rlplace.graphs.opgraph import OpGraph


def written(tmp_path: Path, data: dict[str, Any]) -> Path:
    (tmp_path / "g.json").write_text(json.dumps(data))
    return tmp_path / "g.json"


@pytest.mark.parametrize("edges", ["edges", "links"])
def test_a_graph_of_ours_comes_back_as_it_was(edges: str, tmp_path: Path) -> None:
    data = nx.node_link_data(rich_graph().to_networkx(), edges=edges)
    assert_same(load_graph(written(tmp_path, data)), rich_graph())


def test_a_graph_of_others_is_read_as_from_networkx(tmp_path: Path) -> None:
    graph = nx.MultiDiGraph(name="theirs")
    graph.add_node("a", op="matmul", flops=7)
    graph.add_node(3, bytes=10)
    graph.add_edge("a", 3, bytes=5)
    graph.add_edge("a", 3, bytes=7)
    found = load_graph(written(tmp_path, nx.node_link_data(graph, edges="edges")))
    assert_same(found, OpGraph.from_networkx(graph))
    assert found.names == ("a", "3")
    assert found.tensor_bytes.tolist() == [5, 7, 10]
    assert found.num_edges == 2


NODES = [{"id": "a"}, {"id": "b"}]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"directed": False}, "directed is False, expected true"),
        ({"nodes": 3}, "nodes is 3, expected a list of objects"),
        ({"nodes": [3]}, r"nodes\[0\] is 3, expected an object"),
        ({"nodes": [{}]}, r"nodes\[0\].id is 'missing'"),
        ({"nodes": [{"id": []}]}, r"nodes\[0\].id is a list of 0 values, expected text or a number"),
        ({"nodes": [{"id": "a"}, {"id": "a"}]}, r"nodes\[1\].id is 'a'"),
        ({"edges": [{"source": "a", "target": "z"}]}, r"edges\[0\].target is 'z', expected the id of a node"),
        ({"edges": [{"source": "a"}]}, r"edges\[0\].target is 'missing'"),
        ({"edges": [{"source": "a", "target": "b"}, {"source": "b", "target": "a"}]}, "a cycle"),
        ({"edges": [{"source": "a", "target": "b", "bytes": -1}]}, "a -> b: bytes is -1"),
        ({"graph": 1}, "graph is 1, expected an object"),
    ],
)
def test_a_mistake_is_named(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    data = {"directed": True, "multigraph": False, "graph": {}, "nodes": NODES, "edges": []} | change
    with pytest.raises(InvalidValue, match=words):
        load_graph(written(tmp_path, data))


def test_missing_edges_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="edges is 'missing'"):
        load_graph(written(tmp_path, {"directed": True, "nodes": NODES}))
