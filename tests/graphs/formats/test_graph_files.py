"""Which format a file is in, own JSON, DOT, and the column of micro-batches in all of them."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from graph_files import assert_same, rich_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from micrographs import fork_join, op_graph
from random_problems import random_graph

from rlplace.errors import FileProblem, InvalidValue, RlplaceError, UnknownName
from rlplace.graphs.formats import load_graph, save_graph
from rlplace.graphs.formats.graph_files import COLOURS, SOURCE_COLOUR, graph_from_json, save_dot, save_json, to_dot
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.synthetic import FAMILIES


@pytest.mark.parametrize("name", ["g.json", "g.graphml", "g.xml", "g.GRAPHML"])
def test_the_ending_says_the_format(name: str, tmp_path: Path) -> None:
    save_graph(rich_graph(), tmp_path / name)
    assert_same(load_graph(tmp_path / name), rich_graph())


@pytest.mark.parametrize("ending", [".json", ".graphml"])
def test_the_content_says_it_where_the_ending_does_not(ending: str, tmp_path: Path) -> None:
    save_graph(rich_graph(), tmp_path / f"g{ending}")
    (tmp_path / "plain").write_bytes((tmp_path / f"g{ending}").read_bytes())
    assert_same(load_graph(tmp_path / "plain"), rich_graph())


def test_what_cannot_be_read_or_written_says_so(tmp_path: Path) -> None:
    save_graph(rich_graph(), tmp_path / "g.dot")
    with pytest.raises(FileProblem, match="DOT is for looking at"):
        load_graph(tmp_path / "g.dot")
    with pytest.raises(UnknownName, match=r"'.onx'.*Known: .dot, .graphml, .gv, .json, .xml"):
        save_graph(rich_graph(), tmp_path / "g.onx")
    (tmp_path / "g.txt").write_text("hello")
    with pytest.raises(UnknownName, match=r"\.txt"):
        load_graph(tmp_path / "g.txt")
    for missing in ("no.json", "no.graphml", "no.onnx", "no"):
        with pytest.raises(FileProblem, match="no such file"):
            load_graph(tmp_path / missing)


def test_ops_are_boxes_in_their_module_coloured_by_phase() -> None:
    lines = to_dot(rich_graph(), depth=1).splitlines()
    start = lines.index('subgraph cluster_0 { label="enc"; color=gray;')
    assert lines[start + 1] == f'n0 [label="w\\nparameter" fillcolor="{SOURCE_COLOUR}"];'
    assert lines[start + 2].startswith(r'n2 [label="mm \"1\"\nü\naten.mm.default"')
    assert [line.split()[0] for line in lines[start + 1 : start + 6]] == ["n0", "n2", "n3", "n4", "n5"]
    assert COLOURS["forward"] in lines[start + 2]
    assert COLOURS["backward"] in lines[start + 3]
    assert COLOURS["update"] in lines[start + 5]
    assert 'n2 -> n3 [tooltip="1099511627776 bytes"];' in lines
    assert sum("->" in line for line in lines) == 7
    assert to_dot(rich_graph(), depth=2).count("subgraph") == 2


def test_a_big_graph_is_cut_and_says_so() -> None:
    text = to_dot(fork_join(9, 9), max_ops=11)
    assert text.count("label=") == 12
    assert 'label="... and 80 more ops"' in text
    assert text.count("->") == 18
    assert "more ops" not in to_dot(fork_join(9, 9))


def test_a_file_and_mistakes(tmp_path: Path) -> None:
    save_dot(rich_graph(), tmp_path / "g.dot")
    assert (tmp_path / "g.dot").read_text().count("{") == (tmp_path / "g.dot").read_text().count("}") == 3
    for options in ({"max_ops": 0}, {"depth": 0}):
        with pytest.raises(InvalidValue, match="at least 1"):
            to_dot(rich_graph(), **options)


COSTS_NOTHING = pytest.mark.filterwarnings("ignore:.*the whole graph costs nothing:RuntimeWarning")


def content(tmp_path: Path) -> dict[str, Any]:
    save_json(rich_graph(), tmp_path / "g.json")
    return json.loads((tmp_path / "g.json").read_text())


def test_a_graph_comes_back_as_it_was(tmp_path: Path) -> None:
    save_json(rich_graph(), tmp_path / "g.json")
    assert_same(load_graph(tmp_path / "g.json"), rich_graph())


@COSTS_NOTHING
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 30))
def test_any_graph_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, seed: int, num_ops: int) -> None:
    graph = random_graph(np.random.default_rng(seed), num_ops)
    path = tmp_path_factory.mktemp("json") / "g.json"
    save_json(graph, path)
    assert_same(load_graph(path), graph)


@COSTS_NOTHING
def test_repeated_texts_and_shapes_are_kept_once_and_shared_when_read(tmp_path: Path) -> None:
    save_json(op_graph([[]] * 1000, 8), tmp_path / "g.json")
    data = json.loads((tmp_path / "g.json").read_text())
    assert data["shapes"] == [[8]]
    assert len(data["strings"]) == 1003  # a signature for each op, one target, one module, one dtype
    graph = load_graph(tmp_path / "g.json")
    assert graph.targets[0] is graph.targets[999]
    assert graph.tensor_shapes[0] is graph.tensor_shapes[999]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"schema": 2}, "schema"),
        ({"schema": "1"}, "schema"),
        ({"names": ["a"]}, "targets"),
        ({"names": ["a", "b", "c", "d", "e", 6]}, "names"),
        ({"names": ["a"] * 6}, "names"),
        ({"names": "abcdef"}, "names"),
        ({"targets": [0, 1, 2, 3, 4, 999]}, "targets"),
        ({"targets": [0, 1, 2, 3, 4, -1]}, "targets"),
        ({"phases": [0, 0, 0, 0, 0, 3]}, "phases"),
        ({"phases": [0, 0, 0, 0, 0, True]}, "phases"),
        ({"phases": [0, 0, 0, 0, 0, 1.0]}, "phases"),
        ({"flops": [0, 0, 0, 0, 0, -1]}, "flops"),
        ({"flops": [0, 0, 0, 0, 0, 10**400]}, "flops"),
        ({"flops": [0, 0, 0, 0, 0, None]}, "flops"),
        ({"colocation": [10**9] * 6}, "colocation"),
        ({"tensor_bytes": [2**70, 0, 0, 0, 0]}, "tensor_bytes"),
        ({"tensor_op": [0, 1, 2, 3, 2**40]}, "tensor_op"),
        ({"tensor_op": [0, 1, 2, 3, 6]}, "tensor_op"),
        ({"shapes": [[2, -3], [4], []]}, "shapes"),
        ({"shapes": [[2, "3"], [4], []]}, "shapes"),
        ({"shapes": [3, [4], []]}, "shapes"),
        ({"input_offsets": {}}, "input_offsets"),
        ({"output_tensors": [5]}, "output_tensors"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, Any], field: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=f"here: {field}") as refused:
        graph_from_json(content(tmp_path) | change, where="here")
    assert refused.value.field.partition("[")[0] == field
    assert len(str(refused.value)) < 300


def test_missing_and_unknown_fields_are_named(tmp_path: Path) -> None:
    data = content(tmp_path)
    for name in data:
        if name != "fingerprint":
            with pytest.raises(RlplaceError, match=name):
                graph_from_json({key: value for key, value in data.items() if key != name}, where="here")
    with pytest.raises(UnknownName, match="did you mean 'flops'"):
        graph_from_json(data | {"flps": []}, where="here")
    with pytest.raises(UnknownName, match="format"):
        graph_from_json(data | {"format": "other"}, where="here")
    with pytest.raises(InvalidValue, match="a JSON object"):
        graph_from_json([data], where="here")


def test_an_edited_file_is_noticed_unless_it_says_no_fingerprint(tmp_path: Path) -> None:
    data = content(tmp_path)
    data["output_tensors"] = [2]
    with pytest.raises(FileProblem, match="fingerprint"):
        graph_from_json(data, where="here")
    del data["fingerprint"]
    assert graph_from_json(data, where="here").output_tensors.tolist() == [2]


def test_the_documents_example_is_a_graph() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "graph-files.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```json\n(.*?)```", page, flags=re.DOTALL)
    graph = graph_from_json(json.loads(example), where="docs")
    assert graph.names == ("x", "relu")
    assert graph.targets == ("input", "aten.relu.default")
    rows = re.findall(r"^\| (`.*?) \|", page, flags=re.MULTILINE)
    assert set(json.loads(example)) <= {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_the_documents_families_are_those_there_are() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "graph-files.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (`\w+=.*?) \|", page, flags=re.MULTILINE))
    assert set(rows) == set(FAMILIES)
    for family, text in rows.items():
        defaults = {n: p.default for n, p in inspect.signature(FAMILIES[family]).parameters.items() if n != "rng"}
        assert dict(re.findall(r"`(\w+)=([\w.]+)`", text)) == {n: str(v).lower() for n, v in defaults.items()}


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
