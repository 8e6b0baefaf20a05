"""rlplace's own graph files: every array of an `OpGraph` under its name, repeated texts and shapes in tables.

`docs/graph-files.md` is the schema.

Node-link JSON: what `networkx.node_link_data` writes, under either of its names for edges.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import numpy as np

from rlplace.decode import described
from rlplace.errors import FileProblem, InvalidValue
from rlplace.files import read_json, write_text_atomic
from rlplace.graphs.formats.fields import Fields
from rlplace.graphs.opgraph import OpGraph

if TYPE_CHECKING:
    import networkx as nx

FORMAT = "rlplace-graph"
SCHEMA = 1

Item = TypeVar("Item", bound=Hashable)

_TEXTS = ("targets", "modules", "signatures", "tensor_dtypes")
_NUMBERS = ("flops", "bytes_moved")
_INDICES = (
    "phases", "colocation", "tensor_op", "tensor_output", "input_offsets", "input_tensors", "mutation_op",
    "mutation_tensor", "output_tensors",
)  # fmt: skip
_BYTES = ("parameter_bytes", "gradient_bytes", "state_bytes", "workspace_bytes", "tensor_bytes")
_LARGEST_INDEX = 2**31 - 1
_HEAD = ("format", "schema", "strings", "shapes", "names", "tensor_shapes")
_MICRO_BATCH = "micro_batch"
"""A field that is there only where the batch is cut."""


def save_json(graph: OpGraph, path: str | os.PathLike[str]) -> None:
    """Writes `graph` as JSON, whole or not at all; its program is not kept.

    Raises:
        FileProblem: the file cannot be written.
    """
    strings, columns = _table(text for name in _TEXTS for text in getattr(graph, name))
    shapes, shape_column = _table(graph.tensor_shapes)
    data: dict[str, Any] = {
        "format": FORMAT,
        "schema": SCHEMA,
        "fingerprint": graph.fingerprint,
        "strings": strings,
        "shapes": shapes,
        "names": graph.names,
    }
    for name in _TEXTS:
        length = len(getattr(graph, name))
        data[name], columns = columns[:length], columns[length:]
    for name in (*_NUMBERS, *_INDICES, *_BYTES):
        data[name] = getattr(graph, name).tolist()
    data["tensor_shapes"] = shape_column
    if np.any(graph.micro_batch >= 0):
        data[_MICRO_BATCH] = graph.micro_batch.tolist()
    lines = ",\n".join(f"{json.dumps(key)}:{_compact(value)}" for key, value in data.items())
    write_text_atomic(path, f"{{\n{lines}\n}}\n")


def load_json(path: str | os.PathLike[str]) -> OpGraph:
    """The graph that `save_json` wrote.

    Raises:
        FileProblem: the file is missing, no JSON, or not what its fingerprint says.
        InvalidValue: a field is missing or wrong.
        UnknownName: a field that nobody knows.
    """
    return graph_from_json(read_json(path), where=str(path))


def graph_from_json(data: object, *, where: str) -> OpGraph:
    """The graph in a parsed file; `where` names the file. Raises as `load_json` does."""
    if isinstance(data, dict) and data.get("schema", SCHEMA) != SCHEMA:
        raise InvalidValue(
            "schema", described(data["schema"]), f"{SCHEMA}, the one that this version of rlplace reads", where=where
        )
    known = (*_HEAD, *_TEXTS, *_NUMBERS, *_INDICES, *_BYTES)
    fields = Fields(data, where=where, known=known, optional=("fingerprint", _MICRO_BATCH))
    fields.integer("schema", low=SCHEMA, high=SCHEMA)
    if fields.text("format") != FORMAT:
        raise InvalidValue("format", described(fields.text("format")), repr(FORMAT), where=where)
    strings = fields.texts("strings")
    columns: dict[str, Any] = {name: _looked_up(fields, name, strings, "strings") for name in _TEXTS}
    columns |= {name: fields.numbers(name) for name in _NUMBERS}
    columns |= {name: fields.integers(name) for name in _BYTES}
    columns |= {
        name: fields.integers(name, low=-1 if name == "colocation" else 0, high=_LARGEST_INDEX) for name in _INDICES
    }
    columns["phases"] = fields.integers("phases", high=2)
    if _MICRO_BATCH in fields.data:
        columns[_MICRO_BATCH] = fields.integers(_MICRO_BATCH, low=-1, high=_LARGEST_INDEX)
    shapes = fields.integer_tuples("shapes")
    columns["tensor_shapes"] = _looked_up(fields, "tensor_shapes", shapes, "shapes")
    try:
        graph = OpGraph(names=tuple(fields.texts("names")), **columns)
    except InvalidValue as error:
        raise InvalidValue(error.field, error.actual, error.expected, where=where) from error
    if "fingerprint" in fields.data and fields.text("fingerprint") != graph.fingerprint:
        raise FileProblem(
            where,
            f"its fingerprint is {described(fields.text('fingerprint'))!r}, but its content's is "
            f"{graph.fingerprint!r}: the file was damaged or edited. Remove the field `fingerprint` if you edited it.",
        )
    return graph


def _table(items: Iterable[Item]) -> tuple[list[Item], list[int]]:
    """Distinct items in order of appearance, and each item's place among them."""
    places: dict[Item, int] = {}
    column = [places.setdefault(item, len(places)) for item in items]
    return list(places), column


def _looked_up(fields: Fields, name: str, table: Sequence[Item], table_name: str) -> tuple[Item, ...]:
    indices = fields.integers(name, high=_LARGEST_INDEX)
    if len(indices) and int(indices.max()) >= len(table):
        raise InvalidValue(
            name, int(indices.max()), f"indices of `{table_name}`, which has {len(table)} entries", where=fields.where
        )
    return tuple(map(table.__getitem__, indices.tolist()))


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


_EDGES = ("edges", "links")
MOST_ROWS = 2_000_000
"""Nodes, and likewise edges: an empty one takes fifty times its text in memory."""


def is_node_link(data: object) -> TypeGuard[dict[str, Any]]:
    """Whether parsed JSON is in node-link form: it says `directed` or `multigraph`, which no other form does."""
    return isinstance(data, dict) and "nodes" in data and bool({"directed", "multigraph"} & set(data))


def read_node_link(data: dict[str, Any], *, where: str) -> nx.DiGraph[Any]:
    """The directed graph in a parsed document; a `MultiDiGraph` where two nodes have several edges.

    Args:
        data: for which `is_node_link` holds.
        where: the file, for messages.

    Raises:
        InvalidValue: the graph is undirected, an id is there twice, an edge names no node, or a field is no table.
    """
    import networkx as nx

    if data.get("directed") is not True:
        raise InvalidValue("directed", described(data.get("directed", False)), "true", where=where)
    edges_key = next((key for key in _EDGES if key in data), "edges")
    facts = _node_link_table(data.get("graph", {}), "graph", where)
    graph: nx.DiGraph[Any] = nx.MultiDiGraph() if data.get("multigraph") is True else nx.DiGraph()
    graph.graph.update(facts)
    for i, entry in enumerate(_rows(data, "nodes", where)):
        row = _node_link_table(entry, f"nodes[{i}]", where)
        node = _node(row, "id", f"nodes[{i}]", where)
        if node in graph:
            raise InvalidValue(f"nodes[{i}].id", described(node), "an id of its own for each node", where=where)
        graph.add_node(node)
        graph.nodes[node].update({key: value for key, value in row.items() if key != "id"})
    for i, entry in enumerate(_rows(data, edges_key, where)):
        row = _node_link_table(entry, f"{edges_key}[{i}]", where)
        ends = [_node(row, end, f"{edges_key}[{i}]", where) for end in ("source", "target")]
        for field, node in zip(("source", "target"), ends, strict=True):
            if node not in graph:
                raise InvalidValue(f"{edges_key}[{i}].{field}", described(node), "the id of a node", where=where)
        graph.add_edge(*ends)
        last = graph[ends[0]][ends[1]]
        said = {name: value for name, value in row.items() if name not in ("source", "target", "key")}
        (last[max(last)] if graph.is_multigraph() else last).update(said)
    return graph


def _rows(data: dict[str, Any], field: str, where: str) -> list[Any]:
    rows = data.get(field)
    if not isinstance(rows, list):
        raise InvalidValue(field, "missing" if rows is None else described(rows), "a list of objects", where=where)
    if len(rows) > MOST_ROWS:
        raise InvalidValue(field, f"{len(rows)} of them", f"at most {MOST_ROWS}", where=where)
    return rows


def _node_link_table(entry: object, field: str, where: str) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise InvalidValue(field, described(entry), "an object", where=where)
    return entry


def _node(row: dict[str, Any], field: str, place: str, where: str) -> str | int | float:
    node = row.get(field)
    if not isinstance(node, str | int | float):
        actual = "missing" if node is None else described(node)
        raise InvalidValue(f"{place}.{field}", actual, "text or a number", where=where)
    return node
