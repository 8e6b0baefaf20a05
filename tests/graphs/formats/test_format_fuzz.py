"""A thousand damaged graph files: each is a graph all the same, or one clear error of ours that names what is wrong."""

from __future__ import annotations

import copy
import json
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from damaged import damaged, damaged_tree, mutation, share
from graph_files import rich_graph
from hypothesis import given
from hypothesis import strategies as st

from rlplace.errors import FileProblem, InvalidValue, UnknownName
from rlplace.graphs.formats import load_graph, save_graph
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.statistics import describe_graph

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(nothing reads|unknown cost|costs nothing|count as memory):RuntimeWarning"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def loads_or_says_why(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        found: OpGraph | FileProblem | InvalidValue | UnknownName = load_graph(path)
    except (FileProblem, InvalidValue, UnknownName) as error:
        found = error
    if isinstance(found, OpGraph):
        describe_graph(found)
        return
    assert str(path) in str(found)
    assert not isinstance(found, InvalidValue) or found.field
    assert len(str(found)) < 1000


@cache
def own_json(folder: Path) -> bytes:
    save_graph(rich_graph(), folder / "valid.json")
    data = json.loads((folder / "valid.json").read_text())
    del data["fingerprint"]  # or it would catch what the fields' own checks must
    return json.dumps(data).encode()


DNN = {
    "maxSizePerFPGA": 100.0, "maxFPGAs": 2, "maxCPUs": 1,
    "nodes": [
        {"name": f"n{i}", "id": i, "supportedOnFpga": 1, "cpuLatency": 2.0, "fpgaLatency": 0.5,
         "isBackwardNode": int(i > 3), "colorClass": min(i, 8 - i), "size": 7.0}
        for i in (1, 3, 2, 5, 7)
    ],
    "edges": [{"sourceId": i, "destId": j, "cost": 0.25} for i, j in ((1, 2), (2, 3), (3, 5), (1, 5), (5, 7))],
}  # fmt: skip


@share(320)
@given(data=st.data())
def test_own_json(data: st.DataObject, folder: Path) -> None:
    loads_or_says_why(folder / "g.json", data.draw(mutation(own_json(folder))))


@pytest.mark.slow
@share(160)
@given(data=st.data())
def test_dnn_partitioning(data: st.DataObject, folder: Path) -> None:
    loads_or_says_why(folder / "d.json", data.draw(mutation(json.dumps(DNN).encode())))


@share(160)
@given(data=st.data())
def test_node_link_json(data: st.DataObject, folder: Path) -> None:
    graph = nx.node_link_data(rich_graph().to_networkx(), edges="edges")
    loads_or_says_why(folder / "n.json", data.draw(mutation(json.dumps(graph).encode())))


@cache
def graphml(folder: Path) -> bytes:
    save_graph(rich_graph(), folder / "valid.graphml")
    return (folder / "valid.graphml").read_bytes()


def parsed(text: str | None) -> Any:
    try:
        return json.loads(text or "")
    except ValueError:
        return None


@st.composite
def mutated_xml(draw: st.DrawFn, content: bytes) -> bytes:
    if draw(st.booleans()):
        return damaged(draw, content)
    root = ET.fromstring(content)
    for _ in range(draw(st.integers(1, 3))):
        parents = [(parent, child) for parent in root.iter() for child in parent]
        if not parents:
            break
        parent, child = parents[draw(st.integers(0, len(parents) - 1))]
        text = draw(st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), max_size=6))
        kind = draw(st.sampled_from(["drop", "double", "retag", "text", "attribute", "tree", "move"]))
        if kind == "drop":
            parent.remove(child)
        elif kind == "double":
            parent.insert(0, copy.deepcopy(child))
        elif kind == "retag":
            child.tag = draw(st.sampled_from(["graph", "node", "edge", "data", "key", "hyperedge", "x"]))
        elif kind == "attribute" and child.attrib:
            child.attrib[draw(st.sampled_from(sorted(child.attrib)))] = draw(st.sampled_from(["n0", "d1", "int", text]))
        elif kind == "tree" and isinstance(tree := parsed(child.text), list):
            child.text = json.dumps(damaged_tree(draw, tree))
        elif kind == "move":
            parent.remove(child)
            root.append(child)
        else:
            child.text = draw(st.sampled_from(["-1", "1e999", "nan", "9" * 5000, "[[[", text]))
    return ET.tostring(root)


@share(260)
@given(data=st.data())
def test_graphml(data: st.DataObject, folder: Path) -> None:
    loads_or_says_why(folder / "g.graphml", data.draw(mutated_xml(graphml(folder))))


@cache
def onnx_model() -> bytes:
    onnx = pytest.importorskip("onnx")
    node, info = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    weights = {
        "w": np.ones((4, 3, 3, 3), np.float32),
        "v": np.ones((16, 5), np.float32),
        "axes": np.array([2, 3]),
        "minus": np.array([-1]),
        "zero": np.array([0]),
    }
    graph = onnx.helper.make_graph(
        [
            node("Conv", ["x", "w"], ["c"], name="/conv/Conv", pads=[1, 1, 1, 1]),
            node("MaxPool", ["c"], ["p"], name="/pool/MaxPool", kernel_shape=[2, 2], strides=[2, 2]),
            node("Shape", ["p"], ["s"]),
            node("Gather", ["s", "zero"], ["b"], axis=0),
            node("Concat", ["b", "minus"], ["t"], axis=0),
            node("Reshape", ["p", "t"], ["r"]),
            node("Gemm", ["r", "v"], ["y"], name="/fc/Gemm"),
            node("Split", ["y"], ["y0", "y1"], axis=0),
            node("Softmax", ["y0"], ["z"], axis=-1),
        ],
        "g",
        [info("x", 1, [2, 3, 4, 4])],
        [info("z", 1, None), info("y1", 1, None)],
        [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)])
    return model.SerializeToString()


@st.composite
def mutated_onnx(draw: st.DrawFn, content: bytes) -> bytes:
    import onnx

    if draw(st.booleans()):
        return damaged(draw, content)
    model = onnx.ModelProto.FromString(content)
    graph = model.graph
    for _ in range(draw(st.integers(1, 3))):
        node = graph.node[draw(st.integers(0, len(graph.node) - 1))]
        kind = draw(st.sampled_from(["op", "input", "output", "attribute", "dims", "shape", "drop", "opset", "data"]))
        size = draw(st.sampled_from([-1, 0, 1, 7, 2**31, 2**40, 2**62]))
        name = draw(st.sampled_from(["x", "w", "c", "r", "nowhere", ""]))
        if kind == "op":
            node.op_type = draw(
                st.sampled_from(
                    [
                        "Tile",
                        "Expand",
                        "ConstantOfShape",
                        "Range",
                        "Resize",
                        "Loop",
                        "Einsum",
                        "Nothing",
                        "",
                        "Attention",
                        "LSTM",
                        "MatMul",
                        "Reshape",
                        "Gather",
                        "Constant",
                        "SequenceConstruct",
                        "Pad",
                        "Scan",
                        "QLinearConv",
                    ]
                )
            )
        elif kind == "input" and node.input:
            node.input[0] = name
        elif kind == "output":
            node.output[0] = name
        elif kind == "attribute" and node.attribute:
            attribute = node.attribute[0]
            attribute.i = size
            if attribute.ints:
                attribute.ints[0] = size
        elif kind == "dims":
            graph.initializer[draw(st.integers(0, len(graph.initializer) - 1))].dims.append(size)
        elif kind == "shape":
            dims = graph.input[0].type.tensor_type.shape.dim
            dims[draw(st.integers(0, len(dims) - 1))].dim_value = size
        elif kind == "drop" and len(graph.node) > 1:
            graph.node.remove(node)
        elif kind == "opset":
            model.opset_import[0].version = draw(st.sampled_from([0, 1, 7, 25, 999, 2**62]))
        else:
            weights = graph.initializer[draw(st.integers(0, len(graph.initializer) - 1))]
            weights.raw_data = draw(st.binary(max_size=16))
            weights.data_type = draw(st.sampled_from([0, 1, 6, 7, 8, 99]))
    return model.SerializeToString()


@share(260)
@given(data=st.data())
def test_onnx(data: st.DataObject, folder: Path) -> None:
    loads_or_says_why(folder / "g.onnx", data.draw(mutated_onnx(onnx_model())))


def test_the_files_that_are_damaged_load(folder: Path) -> None:
    for name, content in (
        ("a.json", own_json(folder)),
        ("b.json", json.dumps(DNN).encode()),
        ("c.graphml", graphml(folder)),
        ("d.onnx", onnx_model()),
    ):
        (folder / name).write_bytes(content)
        assert load_graph(folder / name).num_ops >= 5


def test_an_entity_bomb_is_refused_before_anything_is_expanded(folder: Path) -> None:
    entities = "".join(f'<!ENTITY e{i} "{f"&e{i - 1};" * 10 if i else "bomb"}">' for i in range(12))
    bomb = f'<?xml version="1.0"?><!DOCTYPE graphml [{entities}]><graphml><graph id="&e11;"/></graphml>'
    (folder / "bomb.graphml").write_text(bomb)
    with pytest.raises(FileProblem, match="DOCTYPE"):
        load_graph(folder / "bomb.graphml")
    (folder / "bomb.graphml").write_text('<!DOCTYPE g SYSTEM "file:///etc/passwd"><graphml/>')
    with pytest.raises(FileProblem, match="DOCTYPE"):
        load_graph(folder / "bomb.graphml")


def test_nesting_without_end_is_refused(folder: Path) -> None:
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "deep.graphml").write_text("<graphml>" + "<graph>" * 100_000)
    for name in ("deep.json", "deep.graphml"):
        with pytest.raises((FileProblem, InvalidValue), match=r"deep\."):
            load_graph(folder / name)
