"""networkx both ways, and GraphML: all of a graph of ours, and sense made of graphs of others.

Node-link JSON as networkx writes it: all of a graph of ours comes back, and a mistake is named.

Attributes that nobody reads: misspelt ones are refused with their node, those of others are ignored.
"""

from __future__ import annotations

import itertools
import json
import re
import warnings
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from graph_files import assert_same, rich_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from micrographs import op_graph
from random_problems import random_graph

from rlplace.errors import InvalidValue
from rlplace.graphs.formats import load_graph
from rlplace.graphs.formats.graphml import load_graphml, read_graphml, save_graphml
from rlplace.graphs.formats.networkx_graph import EDGE_NAMES, NODE_NAMES, given_times_s, nearest_name
from rlplace.graphs.opgraph import BACKWARD, FORWARD, OpGraph


def test_a_graph_comes_back_as_it_was(tmp_path: Path) -> None:
    assert_same(OpGraph.from_networkx(rich_graph().to_networkx()), rich_graph())
    save_graphml(rich_graph(), tmp_path / "g.graphml")
    assert_same(load_graphml(tmp_path / "g.graphml"), rich_graph())


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 25))
def test_any_graph_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, seed: int, num_ops: int) -> None:
    graph = random_graph(np.random.default_rng(seed), num_ops)
    assert_same(OpGraph.from_networkx(graph.to_networkx()), graph)
    path = tmp_path_factory.mktemp("graphml") / "g.graphml"
    save_graphml(graph, path)
    assert_same(load_graphml(path), graph)


def test_networkx_reads_our_graphml(tmp_path: Path) -> None:
    save_graphml(rich_graph(), tmp_path / "g.graphml")
    theirs, ours = nx.read_graphml(tmp_path / "g.graphml"), rich_graph().to_networkx()
    assert [row["flops"] for _, row in theirs.nodes(data=True)] == [row["flops"] for _, row in ours.nodes(data=True)]
    assert theirs.nodes["n2"]["name"] == rich_graph().names[2]
    assert sorted(theirs.edges) == sorted((f"n{i}", f"n{j}") for i, j in ours.edges)


def test_a_subgraph_keeps_what_is_left() -> None:
    whole = rich_graph().to_networkx()
    whole.graph.update(outputs=[2], mutations=[])
    part = OpGraph.from_networkx(whole.subgraph([0, 1, 2]).copy())
    assert part.names == rich_graph().names[:3]
    assert part.tensor_bytes.tolist() == [24, 16, 2**40]
    assert part.num_edges == 2


def test_a_graph_of_others_gets_sensible_defaults(tmp_path: Path) -> None:
    graph = nx.DiGraph()
    graph.add_node("c", op="matmul", flops=7, time_s=0.5, phase="backward", color="red")
    graph.add_node("a", bytes=10, color="red")
    graph.add_node("b", memory=3.2, parameter_bytes=5, bytes_moved=99)
    graph.add_edges_from([("a", "c"), ("b", "c", {"bytes": 8}), ("a", "b")])
    found = OpGraph.from_networkx(graph)
    assert found.names == ("a", "b", "c")  # the nodes' own order, as far as edges allow
    assert found.targets == ("op", "op", "matmul")
    assert found.tensor_bytes.tolist() == [10, 8, 0]
    assert found.flops.tolist() == [0, 0, 7]
    assert found.bytes_moved.tolist() == [10, 99, 18]
    assert found.parameter_bytes.tolist() == [0, 5, 0]
    assert found.phases.tolist() == [FORWARD, FORWARD, BACKWARD]
    assert found.colocation.tolist() == [0, -1, 0]
    assert found.input_tensors.tolist() == [0, 0, 1]
    times_s = given_times_s(graph)
    assert times_s.tolist() == [0, 0, 0.5]
    assert given_times_s(nx.DiGraph([("a", "b")])) is None
    nx.write_graphml(graph, tmp_path / "theirs.graphml")
    assert_same(load_graphml(tmp_path / "theirs.graphml"), found)


def test_edges_of_different_sizes_are_different_tensors() -> None:
    graph = nx.DiGraph()
    graph.add_edge("a", "b", bytes=4)
    graph.add_edge("a", "c", bytes=9)
    graph.add_edge("a", "d", bytes=4)
    found = OpGraph.from_networkx(graph)
    assert found.tensor_bytes.tolist() == [4, 9, 0, 0, 0]
    assert found.tensor_op.tolist() == [0, 0, 1, 2, 3]
    assert found.input_tensors.tolist() == [0, 1, 0]


def test_several_edges_between_two_nodes_bring_a_tensor_each(tmp_path: Path) -> None:
    graph = nx.MultiDiGraph()
    graph.add_node("a", label="source")
    graph.add_edge("a", "b", bytes=5)
    graph.add_edge("a", "b", bytes=7)
    found = OpGraph.from_networkx(graph)
    assert found.names == ("source", "b")
    assert found.tensor_bytes.tolist() == [5, 7, 0]
    assert found.num_edges == 2
    nx.write_graphml(graph, tmp_path / "theirs.graphml")
    assert_same(load_graphml(tmp_path / "theirs.graphml"), found)


def test_names_that_repeat_are_told_apart() -> None:
    graph = nx.DiGraph()
    graph.add_node(1, name="x")
    graph.add_node(2, name="x")
    assert OpGraph.from_networkx(graph).names == ("x#0", "x#1")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"flops": "many"}, r"b: flops is 'many', expected a number"),
        ({"flops": -1}, r"b: flops is -1"),
        ({"flops": float("nan")}, r"b: flops is nan"),
        ({"flops": True}, r"b: flops is True"),
        ({"size": 1e20}, r"b: size is 1e\+20"),
        ({"phase": "sideways"}, r"b: phase is 'sideways', expected one of forward"),
        ({"target": ["x"]}, r"b: target is a list of 1 values, expected text"),
        ({"state_bytes": "1"}, r"b: state_bytes"),
    ],
)
def test_a_wrong_attribute_is_named_with_its_node(change: dict[str, Any], words: str) -> None:
    graph = nx.DiGraph([("a", "b")])
    graph.nodes["b"].update(change)
    with pytest.raises(InvalidValue, match=words):
        OpGraph.from_networkx(graph)


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int32])
def test_numbers_of_numpy_are_numbers(kind: type) -> None:
    graph = nx.DiGraph()
    graph.add_node(0, flops=kind(3), output_bytes=kind(4))
    assert OpGraph.from_networkx(graph).flops.tolist() == [3.0]


def test_what_is_no_dag_is_refused() -> None:
    with pytest.raises(InvalidValue, match="a cycle"):
        OpGraph.from_networkx(nx.DiGraph([("a", "b"), ("b", "c"), ("c", "a")]))
    with pytest.raises(InvalidValue, match="undirected"):
        OpGraph.from_networkx(nx.Graph([("a", "b")]))  # type: ignore[arg-type]
    graph = nx.DiGraph([("a", "b")])
    graph["a"]["b"]["bytes"] = -4
    with pytest.raises(InvalidValue, match=r"a -> b: bytes is -4"):
        OpGraph.from_networkx(graph)
    with pytest.raises(InvalidValue, match="time_s is -1"):
        given_times_s(timed(-1))


def timed(seconds: float) -> nx.DiGraph[Any]:
    graph: nx.DiGraph[Any] = nx.DiGraph()
    graph.add_node("a", time_s=seconds)
    return graph


@pytest.mark.parametrize(
    ("xml", "words"),
    [
        ("<graph/>", "root element is 'graph'"),
        ("<graphml/>", "graph is '0 of them'"),
        ("<graphml><graph/><graph/></graphml>", "graph is 'another graph'"),
        ('<graphml><graph edgedefault="undirected"/></graphml>', "edgedefault is 'undirected'"),
        ("<graphml><graph><node/></graph></graphml>", "line 1: id is 'missing', expected an attribute of <node>"),
        ('<graphml><graph><node id="a"/><node id="a"/></graph></graphml>', "id is 'a'"),
        ('<graphml><graph><node id="a"/>\n<edge source="a" target="b"/></graph></graphml>', "line 2: target is 'b'"),
        ('<graphml><graph><node id="a"/><edge source="a"/></graph></graphml>', "target is 'missing'"),
        ('<graphml><graph><node id="a"><data key="k">1</data></node></graph></graphml>', "key is 'k'"),
        ('<graphml><key id="k" attr.name="flops" attr.type="int"/><graph><node id="a"><data key="k">one</data></node>'
         "</graph></graphml>", "flops is 'one', expected a value of type int"),
        ('<graphml><graph><hyperedge/></graph></graphml>', "hyperedge"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_xml_is_named(xml: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "g.graphml").write_text(xml)
    with pytest.raises(InvalidValue, match=words):
        read_graphml(tmp_path / "g.graphml")


def test_types_and_defaults_of_keys(tmp_path: Path) -> None:
    (tmp_path / "g.graphml").write_text(
        '<graphml><key id="f" for="node" attr.name="flops" attr.type="double"><default>2.5</default></key>'
        '<key id="b" for="edge" attr.name="bytes" attr.type="int"/><key id="o" for="node" attr.name="ok" '
        'attr.type="boolean"/><graph edgedefault="directed"><node id="x"><data key="f">1</data>'
        '<data key="o">TRUE</data></node><node id="y"/>'
        '<edge source="x" target="y"><data key="b">3</data></edge></graph></graphml>'
    )
    read = read_graphml(tmp_path / "g.graphml")
    assert dict(read.nodes["x"]) == {"flops": 1.0, "ok": True}
    assert dict(read.nodes["y"]) == {"flops": 2.5}
    assert dict(read["x"]["y"]) == {"bytes": 3}


def test_a_name_that_xml_cannot_hold_is_refused(tmp_path: Path) -> None:
    graph = op_graph([[]])
    object.__setattr__(graph, "names", ("a\x00b",))
    with pytest.raises(InvalidValue, match=r"name is .*Save it as \.json"):
        save_graphml(graph, tmp_path / "g.graphml")
    assert not (tmp_path / "g.graphml").exists()


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


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        *(("flps", "flops"), ("FLOPs", "flops"), ("Phase", "phase"), ("ouput_bytes", "output_bytes")),
        *(("parameters_bytes", "parameter_bytes"), ("colocaton", "colocation"), ("microbatch", "micro_batch")),
        *(("time_ms", "time_s"), ("modul", "module"), ("workspace_byte", "workspace_bytes")),
    ],
)
def test_a_misspelt_attribute_of_a_node_is_refused(name: str, meant: str) -> None:
    graph = nx.DiGraph([("a", "b"), ("b", "c")])
    graph.nodes["b"][name] = graph.nodes["c"][name] = 1
    with pytest.raises(InvalidValue, match=rf"networkx graph, b: attribute is '{name}', expected '{meant}'") as refused:
        OpGraph.from_networkx(graph)
    assert f"Name it '{meant}'" in str(refused.value)


def test_a_misspelt_attribute_of_an_edge_is_refused_also_in_a_file(tmp_path: Path) -> None:
    graph = nx.DiGraph()
    graph.add_edge("a", "b", bytes=4)
    graph.add_edge("b", "c", byts=4)
    with pytest.raises(InvalidValue, match=r"b -> c: attribute is 'byts', expected 'bytes'"):
        OpGraph.from_networkx(graph)
    nx.write_graphml(graph, tmp_path / "theirs.graphml")
    with pytest.raises(InvalidValue, match=r"theirs.graphml, b -> c: attribute is 'byts'"):
        load_graphml(tmp_path / "theirs.graphml")


@pytest.mark.parametrize(
    "name", ["id", "ops", "dtype", "time", "shape", "weight", "module_id", "color_id", "stage", "duration", "node_type"]
)
def test_attributes_of_others_are_ignored(name: str) -> None:
    graph = nx.DiGraph()
    graph.add_node("a", **{name: 3})
    graph.add_edge("a", "b", **{name: 3})
    read = OpGraph.from_networkx(graph)
    assert read.names == ("a", "b")
    assert [f"{part} that nothing reads: {name};" in " ".join(read.notes) for part in ("nodes", "edges")] == [True] * 2


def written_by_others(path: Path, nodes: dict[str, dict[str, Any]], edges: dict[str, Any]) -> Path:
    """A chain of nodes with edges that all say the same, as GraphML."""
    graph = nx.DiGraph()
    graph.add_nodes_from(nodes.items())
    graph.add_edges_from(itertools.pairwise(nodes), **edges)
    nx.write_graphml(graph, path)
    return path


@pytest.mark.parametrize(
    ("nodes", "edges", "words"),
    [
        (
            {"a": {"time": 3.0}, "b": {"time": 4.0}},
            {"weight": 8},
            ["2 ops without FLOPs", "nodes .* time", "edges .* weight"],
        ),
        ({"a": {"flops": 0.0}, "b": {"flops": 0.0}}, {"bytes": 0}, ["2 ops without FLOPs"]),
        ({"a": {"time_s": 0.0}, "b": {"time_s": 0.0}}, {"bytes": 8}, ["2 ops without FLOPs"]),
        ({"a": {"time_s": 0.1}, "b": {}, "c": {"time_s": 0.0}}, {}, ["1 node of unknown cost: b; without time_s"]),
        ({"a": {"flops": 5.0}, "b": {"flops": 0.0}, "c": {}, "d": {}}, {}, ["2 nodes of unknown cost: c, d;"]),
        ({"a": {"flops": 5.0}, "b": {}}, {"bytes": 8}, []),  # b is known to read 8 bytes
    ],
)
def test_what_a_file_does_not_say_of_costs_is_said(
    nodes: dict[str, dict[str, Any]], edges: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    path = written_by_others(tmp_path / "theirs.graphml", nodes, edges)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph = load_graph(path)
    said = [str(each.message) for each in caught]
    assert len(said) == len(graph.notes) == len(words)
    assert all(re.search(word, line) for word, line in zip(words, said, strict=True))


def test_names_that_are_read_and_no_texts_are_never_misspelt() -> None:
    for name in (*NODE_NAMES, *EDGE_NAMES, 3, None):
        assert nearest_name(name, NODE_NAMES) == nearest_name(name, EDGE_NAMES) == ""
