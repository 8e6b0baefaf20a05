"""Small graph files that stand for much: refused without the memory and the time that they ask for."""

from __future__ import annotations

import hashlib
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from asking import asked
from micrographs import fork_join

import rlplace
from rlplace.errors import InvalidValue
from rlplace.graphs.formats import load_graph, save_graph

pytestmark = pytest.mark.filterwarnings("ignore:.*(that nothing reads|unknown cost|costs nothing):RuntimeWarning")


def refused(path: Path) -> str:
    """What the command says that refuses a graph file."""
    code, said = asked("graph", str(path))
    assert code == 2, said
    assert len(said) < 2000
    return " ".join(said.split())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ending", ["json", "graphml"])
def test_a_cycle_is_found_in_linear_time(ending: str, tmp_path: Path) -> None:
    """Searches for it from each node would take an hour."""
    count = 20_000
    ends = [*((i, i - 1) for i in range(1, count - 2)), (count - 2, count - 1), (count - 1, count - 2)]
    path = tmp_path / f"g.{ending}"
    if ending == "json":
        edges = [{"source": i, "target": j} for i, j in ends]
        path.write_text(json.dumps({"directed": True, "nodes": [{"id": i} for i in range(count)], "edges": edges}))
    else:
        rows = [*(f'<node id="{i}"/>' for i in range(count)), *(f'<edge source="{i}" target="{j}"/>' for i, j in ends)]
        path.write_text(f"<graphml><graph>{''.join(rows)}</graph></graphml>")
    assert re.search("edges is 'a cycle .19999 -> 19998.', expected an acyclic graph", refused(path))


def test_the_cycle_that_is_named_is_one() -> None:
    graph = nx.DiGraph([("a", "b"), ("b", "c"), ("c", "d"), ("d", "b"), ("d", "e"), ("x", "e"), ("e", "f"), ("c", "f")])
    with pytest.raises(InvalidValue, match="a cycle") as caught:
        rlplace.OpGraph.from_networkx(graph)
    named = re.findall(r"\w", str(caught.value.actual).partition("(")[2])
    assert sorted(named) == ["b", "c", "d"]
    assert all(graph.has_edge(*pair) for pair in zip(named, [*named[1:], named[0]], strict=True))


def own_json(path: Path, count: int, **changes: list[Any]) -> Path:
    """A file of `count` ops, which read nothing, that share one text and one shape of each column."""
    zeros = [0] * count
    zero = (
        *("targets", "modules", "signatures", "tensor_dtypes", "flops", "bytes_moved", "parameter_bytes", "phases"),
        *("gradient_bytes", "state_bytes", "workspace_bytes", "tensor_bytes", "tensor_output", "tensor_shapes"),
    )
    empty = ("input_tensors", "mutation_op", "mutation_tensor", "output_tensors")
    data = {"format": "rlplace-graph", "schema": 1, "strings": [""], "shapes": [[1]]}
    data |= dict.fromkeys(zero, zeros) | {name: [] for name in empty}
    data |= {"names": list(map(str, range(count))), "tensor_op": list(range(count)), "input_offsets": [*zeros, 0]}
    path.write_text(json.dumps(data | {"colocation": [-1] * count} | changes))
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(
            ({"strings": ["", "t" * 4097], name: [1, 0, 0]}, f"{name} is 'ttt")
            for name in ("targets", "modules", "tensor_dtypes")
        ),
        ({"names": ["a", "b", "t" * 4097]}, "names is 'ttt"),
        ({"strings": ["t" * (1 << 27)], "targets": [0] * 3}, "targets is 'ttt"),
        (
            {"strings": ["", "t" * (1 << 20)], "signatures": [1] * 300},
            "characters altogether', expected at most 268,435,456",
        ),
        ({"shapes": [[1] * 65]}, "tensor_shapes is 'of 65 dimensions', expected at most 64"),
    ],
    ids=["target", "module", "dtype", "name", "huge target", "signature", "shape"],
)
def test_a_long_text_or_shape_of_many_ops_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    said = refused(own_json(tmp_path / "g.json", len(changes.get("signatures", "abc")), **changes))
    assert words in said


def test_what_is_long_but_usual_is_read(tmp_path: Path) -> None:
    signature, target = f"aten.cat({'float32(4, 4), ' * 2000})", "t" * 4096
    changes = {"strings": [target, signature], "signatures": [1, 1, 0], "shapes": [[1] * 64]}
    graph = load_graph(own_json(tmp_path / "g.json", 3, **changes))
    assert graph.signatures == (signature, signature, target)
    save_graph(graph, tmp_path / "again.json")
    assert load_graph(tmp_path / "again.json").fingerprint == graph.fingerprint


@pytest.mark.parametrize("count", [1, 2, 1024, 1025, 2048])
def test_fingerprints_are_of_the_whole_columns(count: int, tmp_path: Path) -> None:
    """Digested piece by piece, they are what they were when files were first saved."""
    graph = load_graph(own_json(tmp_path / "g.json", count, strings=["it's", "b"], targets=[0, *[1] * (count - 1)]))
    parts = (graph.targets, graph.tensor_shapes, graph.tensor_dtypes)
    digest = hashlib.sha256("".join(map(repr, parts)).encode())
    for name in (
        *("tensor_op", "tensor_output", "input_offsets", "input_tensors"),
        *("mutation_op", "mutation_tensor", "output_tensors"),
    ):
        digest.update(getattr(graph, name).astype("<i8").tobytes())
    assert graph.fingerprint == digest.hexdigest()[:16]


@pytest.mark.parametrize("field", ["target", "name", "module", "op"])
def test_a_long_default_of_graphml_is_refused(field: str, tmp_path: Path) -> None:
    path, nodes = tmp_path / "g.graphml", "".join(f'<node id="{i}"/>' for i in range(5))
    key = f'<key id="k" for="node" attr.name="{field}"><default>{"t" * 100_000}</default></key>'
    path.write_text(f"<graphml>{key}<graph>{nodes}</graph></graphml>")
    assert f"{field} is 'ttt" in refused(path)
    assert "expected text of at most 4,096 characters" in refused(path)


def test_a_default_of_graphml_counts_for_every_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlplace.graphs.opgraph.MOST_TEXT", 1000, raising=False)
    path, nodes = tmp_path / "g.graphml", "".join(f'<node id="{i}"/>' for i in range(20))
    for count, is_refused in ((10, False), (100, True)):
        key = f'<key id="k" for="node" attr.name="target"><default>{"t" * count}</default></key>'
        path.write_text(f"<graphml>{key}<graph>{nodes}</graph></graphml>")
        assert (asked("graph", str(path))[0] == 2) == is_refused


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (f"[{'[],' * 6000}[]]", "too many values"),
        ("[NaN]", "NaN is no JSON number"),
        ('[{"id": 0, "id": 1}]', "the key 'id' is given twice"),
        (r'["\ud800"]', "a text in it is no Unicode"),
        ("[" * 3000 + "]" * 3000, "nested too deeply"),
    ],
)
def test_lists_within_graphml_are_read_as_all_json(
    content: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_graph(fork_join(1, 1, 8), tmp_path / "g.graphml")
    text = (tmp_path / "g.graphml").read_text()
    assert load_graph(tmp_path / "g.graphml").num_ops
    key = re.search('<key id="([^"]*)" for="graph" attr.name="outputs"', text)[1]
    path = tmp_path / "h.graphml"
    path.write_text(re.sub(f'(<data key="{key}">).*?(</data>)', lambda found: found[1] + content + found[2], text))
    monkeypatch.setattr("rlplace.graphs.formats.graphml.MOST_GRAPH_VALUES", 5000)
    assert words in refused(path)


def test_lists_within_graphml_count_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A default may be that of every node."""
    graph = '<key id="s" for="graph" attr.name="schema" attr.type="long"/><graph><data key="s">1</data>'
    path = tmp_path / "g.graphml"

    def write(default: str, count: int) -> None:
        key = f'<key id="t" for="node" attr.name="tensors"><default>{default}</default></key>'
        nodes = "".join(f'<node id="n{i}"/>' for i in range(count))
        path.write_text(f"<graphml>{key}{graph}{nodes}</graph></graphml>")

    monkeypatch.setattr("rlplace.graphs.formats.graphml.MOST_GRAPH_VALUES", 1000)
    write(f"[{'[],' * 40}[]]", 20)
    assert "too many values" in refused(path)
    monkeypatch.setattr("rlplace.graphs.formats.graphml.LARGEST_JSON_BYTES", 100_000)
    write(f"[&quot;{'t' * 5000}&quot;]", 30)
    assert "too many values" in refused(path)


def onnx_model(
    path: Path, nodes: list[Any], rank: int = 1, opsets: int = 1, functions: list[Any] | None = None
) -> Path:
    """A model from `x` to `y`; nodes of the domain `z` are unknown to onnx, which infers nothing of them."""
    onnx = pytest.importorskip("onnx")
    ends = [onnx.helper.make_tensor_value_info(name, 1, [1] * rank) for name in ("x", "y")]
    imports = [("", 18), ("z", 1), *((f"d{k}", 1) for k in range(2, opsets))]
    graph = onnx.helper.make_graph(nodes, "g", ends[:1], ends[1:])
    made = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid(*each) for each in imports], functions=functions or []
    )
    path.write_bytes(made.SerializeToString())
    return path


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ({"rank": 65}, "dimensions of a value is 65, expected at most 64"),
        ({"inputs": 10_001}, "inputs of a node is 10001, expected at most 10,000"),
        ({"outputs": 10_001}, "outputs of a node is 10001, expected at most 10,000"),
        ({"opsets": 101}, "opset_import is 101, expected at most 100"),
        ({"rank": 64, "inputs": 10_000, "opsets": 100, "outputs": 10_000}, ""),
    ],
    ids=str,
)
def test_lists_in_onnx_that_are_gone_through_again_and_again_are_short(
    size: dict[str, int], words: str, tmp_path: Path
) -> None:
    onnx = pytest.importorskip("onnx")
    outputs = ["y", *(f"o{k}" for k in range(1, size.get("outputs", 1)))]
    node = onnx.helper.make_node("Foo", ["x"] * size.get("inputs", 1), outputs, domain="z")
    path = onnx_model(tmp_path / "m.onnx", [node], size.get("rank", 1), size.get("opsets", 2))
    assert words in refused(path) if words else load_graph(path).num_ops == 2


def test_a_shape_that_onnx_infers_has_no_more_dimensions_either(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    shape = onnx.helper.make_node("Constant", [], ["s"], value_ints=[1] * 65)
    nodes = [
        shape,
        onnx.helper.make_node("Expand", ["x", "s"], ["w"]),
        onnx.helper.make_node("ReduceSum", ["w"], ["y"]),
    ]
    assert "of 65 dimensions" in refused(onnx_model(tmp_path / "m.onnx", nodes))


def test_signatures_in_onnx_are_bounded_altogether(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx = pytest.importorskip("onnx")
    monkeypatch.setattr("rlplace.graphs.formats.onnx_file.MOST_TEXT", 10_000, raising=False)
    nodes = [onnx.helper.make_node("Foo", ["x"] * 60, [f"t{k}"], domain="z") for k in range(20)]
    nodes.append(onnx.helper.make_node("Foo", [f"t{k}" for k in range(20)], ["y"], domain="z"))
    for node in nodes[:-1]:
        node.output.append(f"more of {node.output[0]}")
    infos = [onnx.helper.make_tensor_value_info(f"t{k}", 1, [1]) for k in range(20)]
    path = onnx_model(tmp_path / "m.onnx", nodes)
    model = onnx.load(path)
    model.graph.value_info.extend(infos)
    onnx.save(model, path)
    assert "nodes with too many inputs or attributes" in refused(path)


def encoded(field: int, content: bytes) -> bytes:
    """A field of a protobuf message."""

    def number(value: int) -> bytes:
        return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + number(value >> 7)

    return number(field << 3 | 2) + number(len(content)) + content


def test_messages_without_content_are_counted_before_they_are_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx = pytest.importorskip("onnx")
    path = tmp_path / "m.onnx"
    path.write_bytes(encoded(7, b"\x0a\0" * 100_001))
    assert "too many nodes, expected at most 100,000" in refused(path)
    monkeypatch.setattr(onnx, "load_model_from_string", lambda _: pytest.fail("it was parsed"))
    monkeypatch.setattr("rlplace.graphs.formats.onnx_limits.MOST_MESSAGES", 1000)
    attributes = encoded(7, encoded(1, b"\x2a\0" * 1001))
    for content in (encoded(7, b"\x0a\0" * 1001), attributes, encoded(25, b"\x3a\0" * 1001)):
        path.write_bytes(content)
        assert "too many messages, expected at most 1,000" in refused(path)
    for content in (b"\x3b" + attributes + b"\x3c", b"\x3a\x05", encoded(7, b"\x0a\x05ab"), b"\xff" * 20, b"\x3d\0"):
        path.write_bytes(content)
        assert "not a valid ONNX model" in refused(path)


def test_messages_in_functions_count_as_often_as_they_are_called(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    node = onnx.helper.make_node("Foo", ["a"], ["b"], domain="z")
    for _ in range(20_000):
        node.attribute.add()
    function = onnx.helper.make_function("z", "f", ["a"], ["b"], [node], [onnx.helper.make_opsetid("z", 1)])
    names = ["x", *(f"t{k}" for k in range(59)), "y"]
    calls = [onnx.helper.make_node("f", [a], [b], domain="z") for a, b in pairwise(names)]
    assert "too large once its functions are called" in refused(
        onnx_model(tmp_path / "m.onnx", calls, 1, 2, [function])
    )
