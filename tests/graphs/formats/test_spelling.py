"""Attributes that nobody reads: misspelt ones are refused with their node, those of others are ignored."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import pytest

from rlplace.errors import InvalidValue
from rlplace.graphs.formats.graphml import load_graphml
from rlplace.graphs.formats.networkx_graph import EDGE_NAMES, NODE_NAMES, nearest_name
from rlplace.graphs.opgraph import OpGraph


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
    "name",
    ["id", "ops", "dtype", "time", "shape", "weight", "module_id", "color_id", "stage", "duration", "node_type"],
)
def test_attributes_of_others_are_ignored(name: str) -> None:
    graph = nx.DiGraph()
    graph.add_node("a", **{name: 3})
    graph.add_edge("a", "b", **{name: 3})
    assert OpGraph.from_networkx(graph).names == ("a", "b")


def test_names_that_are_read_and_no_texts_are_never_misspelt() -> None:
    for name in (*NODE_NAMES, *EDGE_NAMES, 3, None):
        assert nearest_name(name, NODE_NAMES) == nearest_name(name, EDGE_NAMES) == ""
