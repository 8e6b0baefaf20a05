"""GraphML: the graph of `to_networkx` as XML; and any directed GraphML of others.

XML is parsed with expat alone: a document type, and with it every entity, is refused before anything is expanded.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from xml.parsers import expat
from xml.sax.saxutils import escape

from rlplace.errors import FileProblem, InvalidValue, refuse_if
from rlplace.files import LARGEST_JSON_BYTES, MOST_GRAPH_VALUES, parse_json, read_plain, write_text_atomic
from rlplace.graphs.formats.networkx_graph import EDGE_NAMES, NODE_NAMES, SCHEMA, from_networkx, to_networkx
from rlplace.graphs.opgraph import OpGraph
from rlplace.records import described

if TYPE_CHECKING:
    import networkx as nx

_TYPES = {int: "long", float: "double", str: "string", list: "string"}
_STRUCTURED = ("tensors", "mutations", "outputs")
"""Attributes that hold lists: JSON inside the XML."""
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_OWNERS = ("graph", "node", "edge")
_DEEPEST = 100


def save_graphml(graph: OpGraph, path: str | os.PathLike[str]) -> None:
    """Writes `graph` as GraphML, whole or not at all; its program is not kept.

    Raises:
        FileProblem: the file cannot be written.
        InvalidValue: a name holds a character that XML has no way to write.
    """
    content = to_networkx(graph)
    keys: dict[tuple[str, str], str] = {}
    declarations: list[str] = []

    def data(owner: str, attributes: dict[str, Any]) -> str:
        lines = []
        for name, value in attributes.items():
            if (owner, name) not in keys:
                key = keys[owner, name] = f"d{len(keys)}"
                kind = _TYPES[type(value)]
                declarations.append(f'<key id="{key}" for="{owner}" attr.name="{name}" attr.type="{kind}"/>')
            text = json.dumps(value, separators=(",", ":")) if isinstance(value, list) else str(value)
            refuse_if(
                _NOT_XML.search(text),
                name,
                described(text),
                "characters that XML can hold",
                where=str(path),
                hint="Save it as .json.",
            )
            lines.append(f'<data key="{keys[owner, name]}">{escape(text, {chr(13): "&#13;"})}</data>')
        return "".join(lines)

    body = [data("graph", content.graph)]
    body += [f'<node id="n{node}">{data("node", row)}</node>' for node, row in content.nodes(data=True)]
    body += [f'<edge source="n{i}" target="n{j}">{data("edge", row)}</edge>' for i, j, row in content.edges(data=True)]
    head = [
        '<?xml version="1.0" encoding="UTF-8"?>\n<graphml xmlns="http://graphml.graphdrawing.org/xmlns">',
        *declarations,
    ]
    write_text_atomic(path, "\n".join([*head, '<graph edgedefault="directed">', *body, "</graph>\n</graphml>\n"]))


def load_graphml(path: str | os.PathLike[str]) -> OpGraph:
    """The graph in a GraphML file: one of `save_graphml`, or any directed acyclic one (see `OpGraph.from_networkx`).

    Raises:
        FileProblem: the file is missing, too large, not well-formed, or has a document type.
        InvalidValue: an element or attribute is wrong.
    """
    return from_networkx(read_graphml(path), where=str(path))


def read_graphml(path: str | os.PathLike[str]) -> nx.DiGraph[Any]:
    """The `networkx.DiGraph` in a GraphML file, every attribute as its `key` says; raises as `load_graphml` does.

    Where two nodes have several edges, it is a `MultiDiGraph`. A default that no reader of graphs asks for is that of
    the first node or edge alone.
    """
    return _Reader(str(path)).read(
        read_plain(path, largest_bytes=LARGEST_JSON_BYTES, holds="GraphML", follows_links=True)
    )


class _Reader:
    """Takes the elements of one document as expat finds them."""

    def __init__(self, path: str) -> None:
        import networkx as nx

        self.path = path
        self.graph: nx.DiGraph[Any] = nx.DiGraph()
        self.keys: dict[str, tuple[str, str, str]] = {}  # name, type and what it is for, by id
        self.defaults: dict[str, Any] = {}  # by id
        self.stack: list[str] = []
        self.target: dict[str, Any] | None = None  # where data goes
        self.key = ""
        self.text: list[str] = []
        self.edges: list[tuple[str, str, dict[str, Any], int]] = []
        self.num_graphs = self.num_values = self.num_characters = 0  # the last of lists in JSON
        self.parser = expat.ParserCreate("utf-8")
        self.parser.buffer_text = True
        self.parser.StartDoctypeDeclHandler = self._doctype
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self.text.append

    def read(self, content: bytes) -> nx.DiGraph[Any]:
        import networkx as nx

        if content.count(b"=") > MOST_GRAPH_VALUES:  # before an element is made of all its attributes
            raise self._too_many()
        try:
            self.parser.Parse(content, True)
        except expat.ExpatError as error:
            raise FileProblem(self.path, f"not well-formed XML: {error}.") from error
        refuse_if(self.num_graphs != 1, "graph", f"{self.num_graphs} of them", "one graph element", where=self.path)
        if len({ends[:2] for ends in self.edges}) < len(self.edges):  # each of several edges brings a tensor
            self.graph = nx.MultiDiGraph(self.graph)
        for source, target, row, line in self.edges:
            for field, node in (("source", source), ("target", target)):
                refuse_if(
                    node not in self.graph,
                    field,
                    described(node),
                    "the id of a node",
                    where=f"{self.path}, line {line}",
                )
            self.graph.add_edge(source, target, **row)
        self._apply_defaults()
        return self._decoded() if self.graph.graph.get("schema") == SCHEMA else self.graph

    def _doctype(self, *_: object) -> None:
        raise FileProblem(self.path, "holds a document type (<!DOCTYPE ...>), which is refused: entities can be bombs.")

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        element = tag.rpartition(":")[2]
        parent = self.stack[-1] if self.stack else ""
        self.stack.append(element)
        self.num_values += 8 if element in ("node", "edge") else 1  # by what it takes in memory
        if self.num_values > MOST_GRAPH_VALUES:
            raise self._too_many()
        if len(self.stack) > _DEEPEST:
            raise FileProblem(self.path, f"elements nested {_DEEPEST} deep, expected those of a graph.")
        if not parent and element != "graphml":
            raise InvalidValue("root element", described(element), "graphml", where=self._here())
        if element == "key":
            self.key = self._need(attributes, "id")
            named, kind = attributes.get("attr.name", self.key), attributes.get("attr.type", "string")
            self.keys[self.key] = named, kind, attributes.get("for", "all")
        elif element == "graph":
            self.num_graphs += 1
            if parent != "graphml" or self.num_graphs > 1:
                raise InvalidValue("graph", "another graph", "one graph, not nested", where=self._here())
            if (order := attributes.get("edgedefault", "directed")) != "directed":
                raise InvalidValue("edgedefault", described(order), "'directed'", where=self._here())
            self.target = self.graph.graph
        elif element == "node":
            node = self._need(attributes, "id")
            if node in self.graph:
                raise InvalidValue("id", described(node), "an id of its own for each node", where=self._here())
            self.graph.add_node(node)
            self.target = self.graph.nodes[node]
        elif element == "edge":
            if attributes.get("directed", "true") != "true":
                raise InvalidValue("directed", described(attributes["directed"]), "directed edges", where=self._here())
            self.target = {}
            ends = self._need(attributes, "source"), self._need(attributes, "target")
            self.edges.append((*ends, self.target, self.parser.CurrentLineNumber))
        elif element == "hyperedge":
            raise InvalidValue("hyperedge", "an edge of many nodes", "edges of two nodes", where=self._here())
        elif element == "data":
            self.key = self._need(attributes, "key")
            if self.key not in self.keys:
                raise InvalidValue("key", described(self.key), "the id of a key element", where=self._here())
        self.text.clear()

    def _end(self, tag: str) -> None:
        element = self.stack.pop()
        parent = self.stack[-1] if self.stack else ""
        if element == "data" and parent in _OWNERS and self.target is not None:
            self.target[self.keys[self.key][0]] = self._value()
        elif element == "default" and parent == "key":
            self.defaults[self.key] = self._value()
        elif element in ("node", "edge"):
            self.target = self.graph.graph
        self.text.clear()

    def _value(self) -> Any:
        text, (name, kind, _) = "".join(self.text), self.keys[self.key]
        try:
            if kind in ("int", "long"):
                return int(text)
            if kind in ("float", "double"):
                return float(text)
        except ValueError:
            raise InvalidValue(name, described(text), f"a value of type {kind}", where=self._here()) from None
        return text.strip().lower() == "true" if kind == "boolean" else text

    def _apply_defaults(self) -> None:
        """Gives every row the defaults that are read, so that time is linear in the file; the first row has all."""
        owners: tuple[tuple[str, Iterable[dict[str, Any]], frozenset[str]], ...] = (
            ("graph", [self.graph.graph], frozenset()),
            ("node", (row for _, row in self.graph.nodes(data=True)), NODE_NAMES),
            ("edge", (row for *_, row in self.graph.edges(data=True)), EDGE_NAMES),
        )
        for owner, rows, known in owners:
            keys = [key for key in reversed(self.defaults) if self.keys[key][2] in (owner, "all")]
            defaults = {self.keys[key][0]: self.defaults[key] for key in keys}  # the first of a name counts
            read = {name: value for name, value in defaults.items() if name in known}
            for place, row in enumerate(rows):
                row |= {name: value for name, value in (read if place else defaults).items() if name not in row}

    def _decoded(self) -> nx.DiGraph[Any]:
        """One of our graphs: nodes by number again, lists as lists."""
        import networkx as nx

        parts = (self.graph.nodes(data=True), self.graph.edges(data=True))
        for row in (self.graph.graph, *(row for part in parts for *_, row in part)):
            for name in _STRUCTURED:
                if name in row:
                    row[name] = self._parsed(name, str(row[name]))
        numbers = {node: int(node[1:]) if re.fullmatch(r"n[0-9]{1,9}", node) else node for node in self.graph}
        refuse_if(
            len(set(numbers.values())) != len(numbers),
            "id",
            "one number twice",
            "an id of its own for each node",
            where=self.path,
        )
        relabelled: nx.DiGraph[Any] = nx.relabel_nodes(self.graph, numbers)
        return relabelled

    def _parsed(self, name: str, text: str) -> Any:
        """The entries of a list in JSON; all of the file count together, since a default may be that of every node."""
        self.num_values += 1 + sum(map(text.count, ",[{"))
        self.num_characters += len(text)
        if self.num_values > MOST_GRAPH_VALUES or self.num_characters > LARGEST_JSON_BYTES:
            raise self._too_many()
        return parse_json(text, f"{self.path}, {name}", most_values=MOST_GRAPH_VALUES)

    def _too_many(self) -> FileProblem:
        return FileProblem(self.path, f"XML with too many values, expected at most {MOST_GRAPH_VALUES:,}.")

    def _need(self, attributes: dict[str, str], name: str) -> str:
        if name not in attributes:
            raise InvalidValue(name, "missing", f"an attribute of <{self.stack[-1]}>", where=self._here())
        return attributes[name]

    def _here(self) -> str:
        return f"{self.path}, line {self.parser.CurrentLineNumber}"
