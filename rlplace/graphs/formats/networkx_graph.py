"""`to_networkx`, `from_networkx`: a `networkx.DiGraph` that holds a whole `OpGraph`, and an `OpGraph` from any DAG.

`docs/graph-files.md` lists the attributes and the defaults for those that a graph of others lacks.

`check_spelling`: refuses attributes of a `networkx` graph that are not read but look like one that is.

`read`: attributes of nodes and edges, under any of their common names, checked.

Node-link JSON: the object of `networkx.node_link_data`, under either of its names for edges.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, TypeGuard

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rlplace.errors import InvalidValue, refuse_if
from rlplace.graphs.opgraph import (
    LARGEST_COUNT,
    LONGEST_TEXT,
    PHASES,
    GraphBuilder,
    OpGraph,
    OpRow,
    TensorRow,
    check_texts,
    unique_names,
)
from rlplace.records import Count, described, read_record, record, shortened
from rlplace.say import counted

if TYPE_CHECKING:
    import networkx as nx


SCHEMA = 1
Size = Annotated[Count, Field(le=LARGEST_COUNT)]
COUNTS = ("parameter_bytes", "gradient_bytes", "state_bytes", "workspace_bytes")


def to_networkx(graph: OpGraph) -> nx.DiGraph[Any]:
    """See `OpGraph.to_networkx`."""
    import networkx as nx

    result: nx.DiGraph[Any] = nx.DiGraph(
        schema=SCHEMA,
        fingerprint=graph.fingerprint,
        mutations=list(zip(graph.mutation_op.tolist(), graph.mutation_tensor.tolist(), strict=True)),
        outputs=graph.output_tensors.tolist(),
    )
    result.graph |= {"notes": " ".join(graph.notes)} if graph.notes else {}
    starts, output_bytes = graph.output_offsets.tolist(), graph.output_bytes.tolist()
    tensor_bytes, tensor_output = graph.tensor_bytes.tolist(), graph.tensor_output.tolist()
    counts = {name: getattr(graph, name).tolist() for name in COUNTS}
    parts = {"micro_batch": graph.micro_batch, "shard": graph.shard}
    parts = {name: column.tolist() for name, column in parts.items() if np.any(column >= 0)}
    for i in range(graph.num_ops):
        result.add_node(
            i,
            name=graph.names[i],
            target=graph.targets[i],
            module=graph.modules[i],
            signature=graph.signatures[i],
            phase=PHASES[graph.phases[i]],
            flops=float(graph.flops[i]),
            bytes_moved=float(graph.bytes_moved[i]),
            output_bytes=output_bytes[i],
            colocation=int(graph.colocation[i]),
            tensors=[
                {
                    "id": t,
                    "output": tensor_output[t],
                    "bytes": tensor_bytes[t],
                    "shape": list(graph.tensor_shapes[t]),
                    "dtype": graph.tensor_dtypes[t],
                }
                for t in range(starts[i], starts[i + 1])
            ],
            **{name: column[i] for name, column in counts.items()},
            **{name: column[i] for name, column in parts.items()},
        )
    producers = graph.tensor_op.tolist()
    for tensor, reader in zip(graph.input_tensors.tolist(), graph.edge_op.tolist(), strict=True):
        producer = producers[tensor]
        if result.has_edge(producer, reader):
            result[producer][reader]["tensors"].append(tensor)
            result[producer][reader]["bytes"] += tensor_bytes[tensor]
        else:
            result.add_edge(producer, reader, tensors=[tensor], bytes=tensor_bytes[tensor])
    return result


def from_networkx(graph: nx.DiGraph[Any], *, where: str = "networkx graph") -> OpGraph:
    """See `OpGraph.from_networkx`; `where` is for messages.

    A graph of others may say of a node: `name`, `target`, `module`, `phase`, `flops`, `bytes_moved`, `output_bytes`,
    `parameter_bytes`, `gradient_bytes`, `state_bytes`, `workspace_bytes`, `colocation`, `micro_batch`, `shard`; of an
    edge: `bytes`. Common other names are understood (`ALIASES`), misspelt ones refused, and others ignored. Ops keep
    the order of the nodes as far as edges allow.

    Raises:
        InvalidValue: the graph is cyclic or undirected, or an attribute is wrong, or misspelt.
        UnknownName: a tensor of one of our graphs has a field that does not exist.
    """
    nodes = topological_nodes(graph, where)
    check_spelling(graph.nodes(data=True), graph.edges(data=True), where)
    is_ours = graph.graph.get("schema") == SCHEMA and all("tensors" in graph.nodes[node] for node in nodes)
    step = _Reading(graph, nodes, where, is_ours=is_ours)
    for op, node in enumerate(nodes):
        with located(where, node):
            step.add_op(op, node)
    outputs = step.add_own_edges() if is_ours else step.add_edges()
    step.fill()
    with located(where):
        made = step.graph(outputs)
    kept = str(graph.graph.get("notes", "")) if is_ours else ""
    return replace(made, notes=(shortened(kept, LONGEST_TEXT),) if kept else _notes(graph, nodes, made, where))


def _notes(graph: nx.DiGraph[Any], nodes: Sequence[Hashable], made: OpGraph, where: str) -> tuple[str, ...]:
    """What the graph does not say about costs, and what it says and nothing reads."""
    rows, times_s = [graph.nodes[node] for node in nodes], given_times_s(graph, where=where, nodes=nodes)
    says = ("flops", "bytes_moved") if times_s is None else ("time_s",)
    cost = made.flops + made.bytes_moved if times_s is None else times_s
    silent = Counter(
        made.names[op]
        for op in np.flatnonzero(~made.is_source & (cost == 0)).tolist()
        if all(find_attribute(rows[op], field)[1] is None for field in says)
    )
    notes = zero_cost(made, cost) or note_on(silent, f"without {' or '.join(says)}, they take no time")
    parts = {"nodes": (rows, NODE_NAMES), "edges": ([row for *_, row in graph.edges(data=True)], EDGE_NAMES)}
    for part, (found, known) in parts.items():
        dropped = Counter(str(name) for row in found for name in row if name not in known)
        notes += note_on(dropped, "times are `time_s`, edges have `bytes`", f"attributes of {part} that nothing reads")
    return notes


def zero_cost(graph: OpGraph, cost: NDArray[np.float64]) -> tuple[str, ...]:
    """A note where no op of a graph has a cost (N,)."""
    count = 0 if np.any(cost[~graph.is_source] > 0) else int(np.count_nonzero(~graph.is_source))
    return (f"{counted(count, 'op')} without FLOPs, bytes or times: the whole graph costs nothing.",) * bool(count)


def note_on(counts: Counter[str], after: str, before: str = "", most: int = 8) -> tuple[str, ...]:
    """A note with the commonest names between two texts, by default on nodes of unknown cost; none without names."""
    before = before or f"{counted(counts.total(), 'node')} of unknown cost"
    named = [shortened(name) + f" ({count})" * (count > 1) for name, count in counts.most_common(most)]
    return (f"{before}: {', '.join([*named, *['...'] * (len(counts) > most)])}; {after}.",) * bool(counts)


def given_times_s(
    graph: nx.DiGraph[Any], *, where: str = "networkx graph", nodes: Sequence[Hashable] = ()
) -> NDArray[np.float64] | None:
    """(N,) float64 seconds that the nodes give (`time_s`), in the order of `from_networkx`, or of `nodes`.

    An `OpGraph` holds no times: make `Costs` of these. A node that says nothing takes 0 s; None where no node says
    anything.

    Raises:
        InvalidValue: the graph is cyclic or undirected, or a time is negative or no number.
    """
    times_s = []
    for node in nodes or topological_nodes(graph, where):
        with located(where, node):
            times_s.append(read(graph.nodes[node], "time_s", None))
    if all(each is None for each in times_s):
        return None
    return np.array([each or 0.0 for each in times_s], dtype=np.float64)


def topological_nodes(graph: nx.DiGraph[Any], where: str = "networkx graph") -> list[Hashable]:
    """The nodes in the topological order that is nearest to their own.

    Raises:
        InvalidValue: the graph is undirected or cyclic.
    """
    import networkx as nx

    refuse_if(not graph.is_directed(), "edges", "undirected", "a directed graph", where=where)
    place = {node: i for i, node in enumerate(graph)}
    order: list[Hashable] = []
    try:
        order.extend(nx.lexicographical_topological_sort(graph, key=place.__getitem__))
    except nx.NetworkXUnfeasible as error:
        cycle = " -> ".join(map(str, _cycle_of(graph, set(order))[:6]))
        raise InvalidValue("edges", f"a cycle ({described(cycle)})", "an acyclic graph", where=where) from error
    return order


def _cycle_of(graph: nx.DiGraph[Any], ordered: set[Hashable]) -> list[Hashable]:
    """The nodes of one cycle, where a topological sort could order the nodes `ordered` alone.

    Every other node is on a cycle or behind one, so it has a predecessor that is not ordered either: going from one to
    the next ends in a cycle, in time linear in the edges (`nx.find_cycle` takes quadratic time).
    """
    node = next(node for node in graph if node not in ordered)
    steps: dict[Hashable, int] = {}
    while node not in steps:
        steps[node] = len(steps)
        node = next(source for source in graph.predecessors(node) if source not in ordered)
    return list(steps)[steps[node] :][::-1]


@contextmanager
def located(where: str, part: Hashable = None) -> Iterator[None]:
    """While active, an error about a value also says where it is: in which file, at which node or edge."""
    try:
        yield
    except InvalidValue as error:
        raise InvalidValue(
            error.field, error.actual, error.expected, where=where if part is None else place_of(where, part)
        ) from error


def place_of(where: str, part: object) -> str:
    """A node or an edge of a graph, for messages."""
    return f"{where}, {described(str(part))}"


@record(frozen=True, slots=True)
class _Tensor:
    """A tensor as a node of one of our graphs lists it."""

    id: Size
    output: Annotated[Size, Field(lt=2**31)]
    bytes: Size
    shape: tuple[Size, ...]
    dtype: str


@record(frozen=True, slots=True)
class _Results:
    """Further attributes of tensors in one of our graphs."""

    outputs: tuple[Size, ...]
    mutations: tuple[tuple[Size, Size], ...]


class _Reading(GraphBuilder):
    """An `OpGraph` in the making: first the ops, then their inputs."""

    def __init__(self, graph: nx.DiGraph[Any], nodes: Sequence[Hashable], where: str, *, is_ours: bool) -> None:
        super().__init__()
        self._graph, self._nodes, self._where, self._is_ours = graph, nodes, where, is_ours
        self._index = {node: op for op, node in enumerate(nodes)}
        self._reads: list[set[int]] = [set() for _ in nodes]
        self._classes: dict[str, int] = {}

    def add_op(self, op: int, node: Hashable) -> None:
        row, most = self._graph.nodes[node], len(self._nodes) - 1
        given = find_attribute(row, "colocation")[1]
        self.add(
            OpRow(
                read(row, "name", "") or str(node),
                read(row, "target", "op"),
                read(row, "module", ""),
                read(row, "phase", 0),
                read(row, "signature", ""),
                flops=read(row, "flops", 0.0),
                bytes_moved=read(row, "bytes_moved", -1.0),
                colocation=_integer("colocation", given, most) if self._is_ours else self._class_of(given),
                micro_batch=_integer("micro_batch", row.get("micro_batch", -1), most),
                shard=_integer("shard", row.get("shard", -1), most),
                **{name: read(row, name, 0) for name in COUNTS},
            )
        )

    def _class_of(self, value: object) -> int:
        """The co-location class that a value stands for in a graph of others: any names one, -1 and "" name none."""
        return -1 if value in (None, -1, "") else self._classes.setdefault(str(value), len(self._classes))

    def add_own_edges(self) -> list[int]:
        """Adds the attributes of tensors in one of our graphs; returns its outputs."""
        ids: dict[int, int] = {}
        for op, node in enumerate(self._nodes):
            with located(self._where, node):
                for each in read_record(tuple[_Tensor, ...], self._graph.nodes[node]["tensors"], "tensors"):
                    refuse_if(each.id in ids, "tensors", f"id {each.id} twice", "ids of their own")
                    ids[each.id] = self.add_tensor(TensorRow(op, each.output, each.bytes, each.shape, each.dtype))
        for source, reader, row in self._graph.edges(data=True):
            sent, producer = row.get("tensors"), self._index[source]
            with located(self._where, f"{source} -> {reader}"):
                if not isinstance(sent, list) or not sent or any(type(t) is not int or t not in ids for t in sent):
                    raise InvalidValue("tensors", described(sent), "a list of ids of tensors")
                refuse_if(
                    any(self.tensors[ids[each]].op != producer for each in sent),
                    "tensors",
                    described(sent),
                    "tensors of the edge's source",
                )
            self._reads[self._index[reader]].update(ids[each] for each in sent)
        facts = self._graph.graph
        results = read_record(_Results, {name: facts.get(name) for name in ("outputs", "mutations")}, self._where)
        refuse_if(
            not ids.keys() >= {*results.outputs, *(tensor for _, tensor in results.mutations)},
            "outputs, mutations",
            "no tensors of this graph",
            "ids of tensors",
            where=self._where,
        )
        refuse_if(
            not self._index.keys() >= {op for op, _ in results.mutations},
            "mutations",
            "of no ops of this graph",
            "pairs of an op and a tensor",
            where=self._where,
        )
        self.mutations = [(self._index[op], ids[tensor]) for op, tensor in results.mutations]
        return [ids[tensor] for tensor in results.outputs]

    def add_edges(self) -> list[int]:
        """Adds a tensor for each size that a node's edges give, or one of the node's own size; returns no outputs."""
        for op, node in enumerate(self._nodes):
            with located(self._where, node):
                own = read(self._graph.nodes[node], "output_bytes", 0)
            by_size: dict[int, int] = {}
            for _, reader, row in self._graph.out_edges(node, data=True):
                with located(self._where, f"{node} -> {reader}"):
                    size = read(row, "bytes", own)
                if size not in by_size:
                    by_size[size] = self.add_tensor(TensorRow(op, len(by_size), size, (size,), "uint8"))
                self._reads[self._index[reader]].add(by_size[size])
            if not by_size:
                self.add_outputs(op, [own])
        return []

    def fill(self) -> None:
        """Sets the columns that follow from all ops and tensors together."""
        made = [0] * len(self.ops)
        for tensor in self.tensors:
            made[tensor.op] += tensor.bytes
        names = unique_names([row.name for row in self.ops])
        if not self._is_ours:  # a signature is made of both, and a default of GraphML may be the target of every node
            check_texts([*names, *(row.target for row in self.ops)], self._where)
        for row, size, name, reads in zip(self.ops, made, names, self._reads, strict=True):
            row.name, row.reads = name, sorted(reads)
            row.signature = row.signature or ("" if self._is_ours else f"{row.target}:{name}")
            if row.bytes_moved < 0:
                row.bytes_moved = float(size + self.bytes_of(row.reads))


ALIASES = {
    "name": ("name", "label"),
    "target": ("target", "op", "op_type", "optype", "type", "kind"),
    "module": ("module", "scope"),
    "flops": ("flops", "flop", "num_flops"),
    "output_bytes": ("output_bytes", "bytes", "size_bytes", "size", "memory", "mem"),
    "bytes": ("bytes", "size_bytes", "size", "volume"),
    "time_s": ("time_s",),
    "colocation": ("colocation", "color", "colour", "colorClass", "color_class"),
}
"""Attributes of graphs of others, by their meaning; the first that is there counts."""


def find_attribute(row: Mapping[str, Any], field: str) -> tuple[str, Any]:
    """The name under which a row gives `field`, and its value; None where it does not."""
    return next(((key, row[key]) for key in ALIASES.get(field, (field,)) if row.get(key) is not None), (field, None))


def read(row: Mapping[str, Any], field: str, default: Any) -> Any:
    """`field` of a row, as the type that it has in an `OpGraph`.

    Raises:
        InvalidValue: it has another type, or is out of range.
    """
    key, value = find_attribute(row, field)
    return default if value is None else _READERS.get(field, _count)(key, value)


def _text(key: str, value: object, longest: float = LONGEST_TEXT) -> str:
    if not isinstance(value, str | int | float) or (isinstance(value, int) and abs(value) > LARGEST_COUNT):
        raise InvalidValue(key, described(value), "text")
    if len(text := str(value)) > longest:
        raise InvalidValue(key, described(text), f"text of at most {longest:,} characters")
    return text


def _number(key: str, value: object) -> float:
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        raise InvalidValue(key, described(value), "a number")
    number = value if isinstance(value, int) else float(value)  # a float32 overflows where it meets 1e300
    refuse_if(not 0 <= number < 1e300, key, described(value), "a finite number >= 0")
    return float(number)


def _count(key: str, value: object) -> int:
    """A whole number, rounded up."""
    number = _number(key, value)
    refuse_if(number > LARGEST_COUNT, key, number, f"at most {LARGEST_COUNT}")
    return math.ceil(number)


def _integer(key: str, value: object, most: int) -> int:
    if type(value) is not int or not -1 <= value <= most:
        raise InvalidValue(key, described(value), f"an integer in -1..{most}")
    return value


def _phase(key: str, value: object) -> int:
    """By its name, or by its number."""
    if isinstance(value, str) and value in PHASES:
        return PHASES.index(value)
    if type(value) is int and 0 <= value < len(PHASES):
        return value
    raise InvalidValue(key, described(value), f"one of {', '.join(PHASES)}")


_READERS: dict[str, Callable[[str, object], Any]] = {
    **dict.fromkeys(("name", "target", "module"), _text),
    "signature": partial(_text, longest=math.inf),
    **dict.fromkeys(("flops", "bytes_moved", "time_s"), _number),
    "phase": _phase,
}
"""How fields are read; others are counts."""

_EDGE_FIELDS = ("bytes",)
_NODE_ONLY = (
    *("signature", "phase", "bytes_moved", "parameter_bytes", "gradient_bytes", "state_bytes", "workspace_bytes"),
    *("micro_batch", "shard", "tensors"),
)
NODE_NAMES = frozenset(
    {*_NODE_ONLY, *(name for field, names in ALIASES.items() if field not in _EDGE_FIELDS for name in names)}
)
"""Attributes of nodes that are read, under all their names."""
EDGE_NAMES = frozenset({"tensors", *(name for field in _EDGE_FIELDS for name in ALIASES[field])})
"""Attributes of edges that are read."""
ORDINARY = frozenset({"dtype", "score", "time"})
"""Names that graphs of others use, and that are like one of ours by chance."""
MOST_COMPARED = 1000
"""Names that are compared with those that are read, which takes long; a file with more was not written by hand."""


def check_spelling(nodes: Iterable[tuple[object, Mapping[Any, Any]]], edges: Iterable[Any], where: str) -> None:
    """Refuses an attribute that is not read and looks like a misspelling of one that is; others are ignored.

    Args:
        nodes: each with its attributes.
        edges: source, target and attributes of each.
        where: for messages.

    Raises:
        InvalidValue: such an attribute; names the first node or edge that has it, and its value.
    """
    of_edges = ((f"{source} -> {target}", row) for source, target, row in edges)
    for rows, known in ((nodes, NODE_NAMES), (of_edges, EDGE_NAMES)):
        owners: dict[object, object] = {}
        for part, row in rows:
            owners |= {name: part for name in row if name not in owners}
        for name, owner in islice(owners.items(), MOST_COMPARED):
            if nearest := nearest_name(name, known):
                raise InvalidValue(
                    "attribute",
                    shortened(str(name)),
                    repr(nearest),
                    where=place_of(where, owner),
                    hint=f"Name it {nearest!r}, or if it is something else, leave it out: nothing reads it.",
                )


def nearest_name(name: object, known: frozenset[str]) -> str:
    """The known name that `name` is a misspelling of; empty where it is none.

    Example:
        >>> nearest_name("flps", NODE_NAMES), nearest_name("FLOPs", NODE_NAMES), nearest_name("module_id", NODE_NAMES)
        ('flops', 'flops', '')
    """
    if not isinstance(name, str) or name in NODE_NAMES | EDGE_NAMES or name in ORDINARY or len(name) < 4:
        return ""  # short names are like too many others
    first = name.partition("_")[0]
    if first in known and not any(one.startswith(f"{first}_") for one in known):  # a compound, such as `module_id`
        return ""
    found = difflib.get_close_matches(name.lower(), sorted(known), n=1, cutoff=0.8)
    return found[0] if found else ""


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
    edges_key = "links" if "links" in data and "edges" not in data else "edges"
    graph: nx.DiGraph[Any] = nx.MultiDiGraph() if data.get("multigraph") is True else nx.DiGraph()
    if not isinstance(facts := data.get("graph", {}), dict):
        raise InvalidValue("graph", described(facts), "an object", where=where)
    graph.graph.update(facts)
    for i, row in enumerate(_rows(data, "nodes", where)):
        node = _node(row, "id", f"nodes[{i}]", where)
        refuse_if(node in graph, f"nodes[{i}].id", described(node), "an id of its own for each node", where=where)
        graph.add_node(node)
        graph.nodes[node].update({key: value for key, value in row.items() if key != "id"})
    for i, row in enumerate(_rows(data, edges_key, where)):
        ends = {field: _node(row, field, f"{edges_key}[{i}]", where) for field in ("source", "target")}
        for field, node in ends.items():
            refuse_if(node not in graph, f"{edges_key}[{i}].{field}", described(node), "the id of a node", where=where)
        source, target = ends.values()
        graph.add_edge(source, target)
        last = graph[source][target]
        said = {name: value for name, value in row.items() if name not in ("source", "target", "key")}
        (last[max(last)] if graph.is_multigraph() else last).update(said)
    return graph


def _rows(data: dict[str, Any], field: str, where: str) -> list[dict[str, Any]]:
    rows = data.get(field)
    if not isinstance(rows, list):
        raise InvalidValue(field, "missing" if rows is None else described(rows), "a list of objects", where=where)
    refuse_if(len(rows) > MOST_ROWS, field, f"{len(rows)} of them", f"at most {MOST_ROWS}", where=where)
    if (bad := next((i for i, row in enumerate(rows) if not isinstance(row, dict)), None)) is not None:
        raise InvalidValue(f"{field}[{bad}]", described(rows[bad]), "an object", where=where)
    return rows


def _node(row: dict[str, Any], field: str, place: str, where: str) -> str | int | float:
    node = row.get(field)
    if not isinstance(node, str | int | float):
        raise InvalidValue(
            f"{place}.{field}", "missing" if node is None else described(node), "text or a number", where=where
        )
    return node
