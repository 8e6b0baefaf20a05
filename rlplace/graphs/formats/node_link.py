"""Node-link JSON: what `networkx.node_link_data` writes, under either of its names for edges."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

from rlplace.decode import described
from rlplace.errors import InvalidValue

if TYPE_CHECKING:
    import networkx as nx

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
    facts = _table(data.get("graph", {}), "graph", where)
    graph: nx.DiGraph[Any] = nx.MultiDiGraph() if data.get("multigraph") is True else nx.DiGraph()
    graph.graph.update(facts)
    for i, entry in enumerate(_rows(data, "nodes", where)):
        row = _table(entry, f"nodes[{i}]", where)
        node = _node(row, "id", f"nodes[{i}]", where)
        if node in graph:
            raise InvalidValue(f"nodes[{i}].id", described(node), "an id of its own for each node", where=where)
        graph.add_node(node)
        graph.nodes[node].update({key: value for key, value in row.items() if key != "id"})
    for i, entry in enumerate(_rows(data, edges_key, where)):
        row = _table(entry, f"{edges_key}[{i}]", where)
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


def _table(entry: object, field: str, where: str) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise InvalidValue(field, described(entry), "an object", where=where)
    return entry


def _node(row: dict[str, Any], field: str, place: str, where: str) -> str | int | float:
    node = row.get(field)
    if not isinstance(node, str | int | float):
        actual = "missing" if node is None else described(node)
        raise InvalidValue(f"{place}.{field}", actual, "text or a number", where=where)
    return node
