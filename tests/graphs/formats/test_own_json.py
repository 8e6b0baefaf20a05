"""Own JSON: round trips, tables, and mistakes named by their field."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graph_files import assert_same, rich_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from micrographs import op_graph
from random_problems import random_graph

from rlplace.errors import FileProblem, InvalidValue, RlplaceError, UnknownName
from rlplace.graphs.formats import load_graph
from rlplace.graphs.formats.graph_files import graph_from_json, save_json
from rlplace.graphs.synthetic import FAMILIES

COSTS_NOTHING = pytest.mark.filterwarnings("ignore:.*the whole graph costs nothing:RuntimeWarning")


def content(tmp_path: Path) -> dict[str, Any]:
    save_json(rich_graph(), tmp_path / "g.json")
    data: dict[str, Any] = json.loads((tmp_path / "g.json").read_text())
    return data


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
