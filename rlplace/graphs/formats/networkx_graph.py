"""`to_networkx`, `from_networkx`: a `networkx.DiGraph` that holds a whole `OpGraph`, and an `OpGraph` from any DAG.

`docs/graph-files.md` lists the attributes and what stands in for those that a graph of others lacks.

Tensors on their way from a `networkx.DiGraph` into an `OpGraph`: those of one of our graphs, or made up.

`check_spelling`: attributes of a `networkx` graph that nobody reads, and that look like one that is read.

What nodes and edges of a `networkx.DiGraph` say: attributes under any of their common names, checked.

Node-link JSON: what `networkx.node_link_data` writes, under either of its names for edges.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlplace.decode import described, shortened
from rlplace.errors import InvalidValue
from rlplace.graphs.formats.own_json import LARGEST_COUNT
from rlplace.graphs.opgraph import LONGEST_TEXT, PHASES, OpGraph, check_texts

if TYPE_CHECKING:
    import networkx as nx


SCHEMA = 1
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
    starts, output_bytes = graph.output_offsets.tolist(), graph.output_bytes.tolist()
    tensor_bytes, tensor_output = graph.tensor_bytes.tolist(), graph.tensor_output.tolist()
    counts = {name: getattr(graph, name).tolist() for name in COUNTS}
    slices = graph.micro_batch.tolist() if np.any(graph.micro_batch >= 0) else None
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
            **({} if slices is None else {"micro_batch": slices[i]}),
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
    `parameter_bytes`, `gradient_bytes`, `state_bytes`, `workspace_bytes`, `colocation`, `micro_batch`; of an edge:
    `bytes`. Common other names are understood (`ALIASES`), misspelt ones refused, and others ignored. Ops keep the
    order of the nodes as far as edges allow.

    Raises:
        InvalidValue: the graph is cyclic or undirected, or an attribute is wrong, or misspelt.
    """
    nodes = topological_nodes(graph, where)
    check_spelling(graph.nodes(data=True), graph.edges(data=True), where)
    index = {node: i for i, node in enumerate(nodes)}
    rows = [graph.nodes[node] for node in nodes]
    is_ours = all("tensors" in row for row in rows) and graph.graph.get("schema") == SCHEMA
    tensors, reads, ids = (own_tensors if is_ours else made_up_tensors)(graph, nodes, index, where)
    mutations, outputs = read_results(graph, ids, index, reads, is_ours, where)
    offsets = np.cumsum([0, *map(len, reads)])
    flat = np.array([tensor for read in reads for tensor in sorted(read)], dtype=np.int32)
    table = Attributes(nodes, rows, where)
    names = _names(table)
    targets = table.column(lambda row: read_text(row, "target", "op"))
    moved = moved_bytes_of(len(rows), tensors, reads)
    if not is_ours:  # a signature is made of both, and a default of GraphML may be the target of every node
        check_texts([*names, *targets], where)
    try:
        return OpGraph(
            names=tuple(names),
            targets=tuple(targets),
            modules=tuple(table.column(lambda row: read_text(row, "module", ""))),
            signatures=tuple(
                signature if signature or is_ours else f"{target}:{name}"
                for signature, target, name in zip(
                    table.column(lambda row: read_text(row, "signature", "")), targets, names, strict=True
                )
            ),
            phases=np.array(table.column(read_phase), dtype=np.int8),
            flops=np.array(table.column(lambda row: read_number(row, "flops", 0.0)), dtype=np.float64),
            bytes_moved=np.array(
                [
                    moved_bytes if given < 0 else given
                    for given, moved_bytes in zip(
                        table.column(lambda row: read_number(row, "bytes_moved", -1.0)), moved, strict=True
                    )
                ],
                dtype=np.float64,
            ),
            parameter_bytes=table.counts("parameter_bytes"),
            gradient_bytes=table.counts("gradient_bytes"),
            state_bytes=table.counts("state_bytes"),
            workspace_bytes=table.counts("workspace_bytes"),
            colocation=_colocation(rows, is_ours, where),
            tensor_op=np.array([tensor.producer for tensor in tensors], dtype=np.int32),
            tensor_output=np.array([tensor.output for tensor in tensors], dtype=np.int32),
            tensor_bytes=np.array([tensor.num_bytes for tensor in tensors], dtype=np.int64),
            tensor_shapes=tuple(tensor.shape for tensor in tensors),
            tensor_dtypes=tuple(tensor.dtype for tensor in tensors),
            input_offsets=offsets,
            input_tensors=flat,
            mutation_op=np.array([op for op, _ in mutations], dtype=np.int32),
            mutation_tensor=np.array([tensor for _, tensor in mutations], dtype=np.int32),
            output_tensors=np.array(outputs, dtype=np.int32),
            micro_batch=_micro_batch(table),
        )
    except InvalidValue as error:
        if error.where != "graph":  # already says which node
            raise
        raise InvalidValue(error.field, error.actual, error.expected, where=where) from error


def given_times_s(graph: nx.DiGraph[Any], *, where: str = "networkx graph") -> NDArray[np.float64] | None:
    """(N,) float64 seconds that the nodes give (`time_s`), in the order of `from_networkx`.

    An `OpGraph` holds no times: make `Costs` of these. A node that says nothing takes 0 s; None where no node says
    anything.

    Raises:
        InvalidValue: the graph is cyclic or undirected, or a time is negative or no number.
    """
    nodes = topological_nodes(graph, where)
    rows = [graph.nodes[node] for node in nodes]
    if all(find_attribute(row, "time_s")[1] is None for row in rows):
        return None
    table = Attributes(nodes, rows, where)
    return np.array(table.column(lambda row: read_number(row, "time_s", 0.0)), dtype=np.float64)


def topological_nodes(graph: nx.DiGraph[Any], where: str = "networkx graph") -> list[Hashable]:
    """The nodes in the topological order that is nearest to their own.

    Raises:
        InvalidValue: the graph is undirected or cyclic.
    """
    import networkx as nx

    if not graph.is_directed():
        raise InvalidValue("edges", "undirected", "a directed graph", where=where)
    place = {node: i for i, node in enumerate(graph)}
    order: list[Hashable] = []
    try:
        for node in nx.lexicographical_topological_sort(graph, key=place.__getitem__):
            order.append(node)
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


def _names(table: Attributes) -> list[str]:
    given = table.column(lambda row: read_text(row, "name", ""))
    names = [name or str(node) for node, name in zip(table.nodes, given, strict=True)]
    return names if len(set(names)) == len(names) else [f"{name}#{i}" for i, name in enumerate(names)]


def _colocation(rows: Sequence[Mapping[str, Any]], is_ours: bool, where: str) -> NDArray[np.int32]:
    """Classes as they are in one of our graphs; of a graph of others, any value names a class, and are numbered."""
    found = [find_attribute(row, "colocation") for row in rows]
    if is_ours:
        bad = next((value for _, value in found if type(value) is not int or not -1 <= value < len(rows)), None)
        if bad is not None or any(value is None for _, value in found):
            raise InvalidValue("colocation", described(bad), f"an integer in -1..{len(rows) - 1}", where=where)
        return np.array([value for _, value in found], dtype=np.int32)
    classes: dict[str, int] = {}
    free = (None, -1, "")
    return np.array(
        [-1 if value in free else classes.setdefault(str(value), len(classes)) for _, value in found], dtype=np.int32
    )


def _micro_batch(table: Attributes) -> NDArray[np.int32]:
    """(N,) int32: the slice of the batch that each node works on, -1 where it says none."""
    most = len(table.rows) - 1

    def read(row: Mapping[str, Any]) -> int:
        value = row.get("micro_batch", -1)
        if type(value) is not int or not -1 <= value <= most:
            raise InvalidValue("micro_batch", described(value), f"an integer in -1..{most}")
        return value

    return np.array(table.column(read), dtype=np.int32)


@dataclass
class Tensor:
    """A tensor on its way into an `OpGraph`."""

    producer: int
    output: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str


def own_tensors(
    graph: nx.DiGraph[Any], nodes: Sequence[Hashable], index: Mapping[Hashable, int], where: str
) -> tuple[list[Tensor], list[set[int]], dict[int, int]]:
    """Tensors as one of our graphs lists them, the tensors (by place) that each node reads, and places by id.

    Raises:
        InvalidValue: a record or an edge's list is malformed.
    """
    tensors: list[Tensor] = []
    ids: dict[int, int] = {}
    for node in nodes:
        records = graph.nodes[node]["tensors"]
        if not isinstance(records, list):
            raise InvalidValue("tensors", described(records), "a list of tensors", where=place_of(where, node))
        for record in records:
            tensor = _read_tensor(record, index[node], place_of(where, node))
            if record["id"] in ids:
                raise InvalidValue(
                    "tensors", f"id {record['id']} twice", "ids of their own", where=place_of(where, node)
                )
            ids[record["id"]] = len(tensors)
            tensors.append(tensor)
    reads: list[set[int]] = [set() for _ in nodes]
    for source, reader, row in graph.edges(data=True):
        read = row.get("tensors")
        if not isinstance(read, list) or not read or any(type(t) is not int or t not in ids for t in read):
            raise InvalidValue(
                "tensors", described(read), "a list of ids of tensors", where=place_of(where, f"{source} -> {reader}")
            )
        for tensor_id in read:
            if tensors[ids[tensor_id]].producer != index[source]:
                raise InvalidValue(
                    "tensors", tensor_id, "tensors of the edge's source", where=place_of(where, f"{source} -> {reader}")
                )
            reads[index[reader]].add(ids[tensor_id])
    return tensors, reads, ids


def _read_tensor(record: Any, producer: int, where: str) -> Tensor:
    expected = {"id": int, "output": int, "bytes": int, "shape": list, "dtype": str}
    if not isinstance(record, dict):
        raise InvalidValue("tensors", described(record), "tensors with id, output, bytes, shape and dtype", where=where)
    for key, kind in expected.items():
        value = record.get(key)
        if type(value) is not kind or (isinstance(value, int) and not 0 <= value <= LARGEST_COUNT):
            raise InvalidValue(f"tensors.{key}", described(value), f"a {kind.__name__}", where=where)
    shape = record["shape"]
    if any(type(size) is not int or not 0 <= size <= LARGEST_COUNT for size in shape):
        raise InvalidValue("tensors.shape", described(shape), "sizes", where=where)
    if record["output"] > np.iinfo(np.int32).max:
        raise InvalidValue("tensors.output", record["output"], "an output index", where=where)
    return Tensor(producer, record["output"], record["bytes"], tuple(shape), record["dtype"])


def made_up_tensors(
    graph: nx.DiGraph[Any], nodes: Sequence[Hashable], index: Mapping[Hashable, int], where: str
) -> tuple[list[Tensor], list[set[int]], dict[int, int]]:
    """One tensor for each size that a node's edges give; one of the node's own size where they give none.

    The rest comes back as from `own_tensors`, no ids.

    Raises:
        InvalidValue: a size is wrong.
    """
    tensors: list[Tensor] = []
    reads: list[set[int]] = [set() for _ in nodes]
    for i, node in enumerate(nodes):
        own = int(Attributes([node], [graph.nodes[node]], where).counts("output_bytes")[0])
        by_size: dict[int, int] = {}
        for _, reader, row in graph.out_edges(node, data=True):
            try:
                size = read_count(row, "bytes", own)
            except InvalidValue as error:
                where_edge = place_of(where, f"{node} -> {reader}")
                raise InvalidValue(error.field, error.actual, error.expected, where=where_edge) from error
            if size not in by_size:
                by_size[size] = len(tensors)
                tensors.append(Tensor(i, len(by_size) - 1, size, (size,), "uint8"))
            reads[index[reader]].add(by_size[size])
        if not by_size:
            tensors.append(Tensor(i, 0, own, (own,), "uint8"))
    return tensors, reads, {}


def read_results(
    graph: nx.DiGraph[Any],
    ids: Mapping[int, int],
    index: Mapping[Hashable, int],
    reads: Sequence[set[int]],
    is_ours: bool,
    where: str,
) -> tuple[list[tuple[int, int]], list[int]]:
    """In-place updates and outputs of one of our graphs; of a graph of others, none: what nobody reads is freed.

    Raises:
        InvalidValue: they name what is not there.
    """
    if not is_ours:
        return [], []
    outputs, mutations = graph.graph.get("outputs"), graph.graph.get("mutations")
    if not isinstance(outputs, list) or any(type(t) is not int or t not in ids for t in outputs):
        raise InvalidValue("outputs", described(outputs), "a list of ids of tensors", where=where)
    pairs = (
        [tuple(pair) if isinstance(pair, list | tuple) else () for pair in mutations or ()]
        if isinstance(mutations, list)
        else [()]
    )
    if any(len(p) != 2 or set(map(type, p)) != {int} or p[0] not in index or p[1] not in ids for p in pairs):
        raise InvalidValue("mutations", described(mutations), "a list of pairs of an op and a tensor", where=where)
    return [(index[op], ids[tensor]) for op, tensor in pairs], [ids[tensor] for tensor in outputs]


def moved_bytes_of(num_ops: int, tensors: Sequence[Tensor], reads: Sequence[set[int]]) -> list[float]:
    """Bytes of each op's inputs and outputs."""
    moved = [0.0] * num_ops
    for tensor in tensors:
        moved[tensor.producer] += tensor.num_bytes
    for op, read in enumerate(reads):
        moved[op] += sum(tensors[tensor].num_bytes for tensor in read)
    return moved


Item = TypeVar("Item")

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
"""Attributes of graphs of others, by what they stand for; the first that is there counts."""


@dataclass(frozen=True)
class Attributes:
    """What nodes say: what is wrong with one is said with its name.

    Attributes:
        nodes: N of them.
        rows: (N,) what each says.
        where: for messages.
    """

    nodes: Sequence[Hashable]
    rows: Sequence[Mapping[str, Any]]
    where: str

    def column(self, read: Callable[[Mapping[str, Any]], Item]) -> list[Item]:
        """(N,) what `read` makes of each row.

        Raises:
            InvalidValue: `read` did; it names the node.
        """
        values: list[Item] = []
        try:
            for row in self.rows:
                values.append(read(row))
        except InvalidValue as error:
            where = place_of(self.where, self.nodes[len(values)])
            raise InvalidValue(error.field, error.actual, error.expected, where=where) from error
        return values

    def counts(self, field: str) -> NDArray[np.int64]:
        """(N,) int64: `read_count` of each row; raises as `column` does."""
        return np.array(self.column(lambda row: read_count(row, field)), dtype=np.int64)


def find_attribute(row: Mapping[str, Any], field: str) -> tuple[str, Any]:
    """The name under which a row gives `field`, and its value; None where it does not."""
    for key in ALIASES.get(field, (field,)):
        value = row.get(key)
        if value is not None:
            return key, value
    return field, None


def read_text(row: Mapping[str, Any], field: str, default: str) -> str:
    """`field` of a row as text.

    Raises:
        InvalidValue: it is neither text nor a number, or too long.
    """
    key, value = find_attribute(row, field)
    if value is None:
        return default
    if not isinstance(value, str | int | float) or (isinstance(value, int) and abs(value) > LARGEST_COUNT):
        raise InvalidValue(key, described(value), "text")
    text = str(value)
    if field != "signature" and len(text) > LONGEST_TEXT:
        raise InvalidValue(key, described(text), f"text of at most {LONGEST_TEXT:,} characters")
    return text


def read_number(row: Mapping[str, Any], field: str, default: float) -> float:
    """`field` of a row as a number.

    Raises:
        InvalidValue: it is none, or negative, or not finite.
    """
    key, value = find_attribute(row, field)
    if value is None:
        return default
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        raise InvalidValue(key, described(value), "a number")
    number = value if isinstance(value, int) else float(value)  # a float32 overflows where it meets 1e300
    if not 0 <= number < 1e300:
        raise InvalidValue(key, described(value), "a finite number >= 0")
    return float(number)


def read_count(row: Mapping[str, Any], field: str, default: int = 0) -> int:
    """`field` of a row as a whole number, rounded up; raises as `read_number` does, and where it is too large."""
    value = read_number(row, field, float(default))
    if value > LARGEST_COUNT:
        raise InvalidValue(field, value, f"at most {LARGEST_COUNT}")
    return math.ceil(value)


def read_phase(row: Mapping[str, Any]) -> int:
    """The phase of a row, by name or number, as an index of `PHASES`.

    Raises:
        InvalidValue: there is no such phase.
    """
    value = row.get("phase", 0)
    if isinstance(value, str) and value in PHASES:
        return PHASES.index(value)
    if type(value) is int and 0 <= value < len(PHASES):
        return value
    raise InvalidValue("phase", described(value), f"one of {', '.join(PHASES)}")


def place_of(where: str, part: object) -> str:
    """A node or an edge of a graph, for messages."""
    return f"{where}, {described(str(part))}"


_EDGE_FIELDS = ("bytes",)
_NODE_ONLY = (
    *("signature", "phase", "bytes_moved", "parameter_bytes", "gradient_bytes", "state_bytes", "workspace_bytes"),
    *("micro_batch", "tensors"),
)
NODE_NAMES = frozenset(
    {*_NODE_ONLY, *(name for field, names in ALIASES.items() if field not in _EDGE_FIELDS for name in names)}
)
"""Attributes of nodes that are read, under all their names."""
EDGE_NAMES = frozenset({"tensors", *(name for field in _EDGE_FIELDS for name in ALIASES[field])})
"""Attributes of edges that are read."""
ALIKE = 0.8
"""`difflib`'s ratio of two names from which one is taken for a misspelling of the other."""
SHORTEST = 4
"""Shorter names are like too many others."""
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
        InvalidValue: such an attribute; names the first node or edge that has it, and what it is like.
    """
    of_nodes: dict[object, object] = {}
    for node, row in nodes:
        for name in row:
            of_nodes.setdefault(name, node)
    of_edges: dict[object, object] = {}
    for source, target, row in edges:
        for name in row:
            of_edges.setdefault(name, f"{source} -> {target}")
    for owners, known in ((of_nodes, NODE_NAMES), (of_edges, EDGE_NAMES)):
        for name, owner in islice(owners.items(), MOST_COMPARED):
            nearest = nearest_name(name, known)
            if nearest:
                hint = f"Name it {nearest!r}, or if it is something else, leave it out: nothing reads it."
                raise InvalidValue(
                    "attribute", shortened(str(name)), repr(nearest), where=place_of(where, owner), hint=hint
                )


def nearest_name(name: object, known: frozenset[str]) -> str:
    """The known name that `name` is a misspelling of; empty where it is none.

    Example:
        >>> nearest_name("flps", NODE_NAMES), nearest_name("FLOPs", NODE_NAMES), nearest_name("module_id", NODE_NAMES)
        ('flops', 'flops', '')
    """
    if not isinstance(name, str) or name in NODE_NAMES | EDGE_NAMES or name in ORDINARY or len(name) < SHORTEST:
        return ""
    first = name.partition("_")[0]
    if first in known and not any(one.startswith(f"{first}_") for one in known):  # a compound, such as `module_id`
        return ""
    found = difflib.get_close_matches(name.lower(), sorted(known), n=1, cutoff=ALIKE)
    return found[0] if found else ""


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
