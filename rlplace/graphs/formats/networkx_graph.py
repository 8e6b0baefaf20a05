"""`to_networkx`, `from_networkx`: a `networkx.DiGraph` that holds a whole `OpGraph`, and an `OpGraph` from any DAG.

`docs/graph-files.md` lists the attributes and what stands in for those that a graph of others lacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.graphs.formats.fields import LARGEST_COUNT, shown
from rlplace.graphs.opgraph import PHASES, OpGraph

if TYPE_CHECKING:
    import networkx as nx

Item = TypeVar("Item")

SCHEMA = 1
COUNTS = ("parameter_bytes", "gradient_bytes", "state_bytes", "workspace_bytes")
ALIASES = {
    "name": ("name", "label"),
    "target": ("target", "op", "op_type", "optype", "type", "kind"),
    "module": ("module", "scope"),
    "flops": ("flops", "flop", "num_flops"),
    "output_bytes": ("output_bytes", "bytes", "size_bytes", "size", "memory", "mem"),
    "bytes": ("bytes", "size_bytes", "size", "volume"),
    "time_s": ("time_s", "time", "cost", "weight", "latency", "duration"),
    "colocation": ("colocation", "color", "colour", "colorClass", "color_class"),
}
"""Attributes of graphs of others, by what they stand for; the first that is there counts."""


@dataclass
class _Tensor:
    """A tensor on its way into an `OpGraph`."""

    producer: int
    output: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str


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
                {"id": t, "output": tensor_output[t], "bytes": tensor_bytes[t], "shape": list(graph.tensor_shapes[t]),
                 "dtype": graph.tensor_dtypes[t]}
                for t in range(starts[i], starts[i + 1])
            ],
            **{name: column[i] for name, column in counts.items()},
        )  # fmt: skip
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
    `parameter_bytes`, `gradient_bytes`, `state_bytes`, `workspace_bytes`, `colocation`; of an edge: `bytes`. Common
    other names are understood (`ALIASES`). Ops keep the order of the nodes as far as edges allow.

    Raises:
        InvalidValue: the graph is cyclic or undirected, or an attribute is wrong.
    """
    nodes = topological_nodes(graph, where)
    index = {node: i for i, node in enumerate(nodes)}
    rows = [graph.nodes[node] for node in nodes]
    is_ours = all("tensors" in row for row in rows) and graph.graph.get("schema") == SCHEMA
    tensors, reads, ids = (_own_tensors if is_ours else _made_up_tensors)(graph, nodes, index, where)
    mutations, outputs = _results(graph, ids, index, reads, is_ours, where)
    offsets = np.cumsum([0, *map(len, reads)])
    flat = np.array([tensor for read in reads for tensor in sorted(read)], dtype=np.int32)
    table = _Table(nodes, rows, where)
    names = _names(table)
    targets = table.column(lambda row: _text(row, "target", "op"))
    moved = _moved_bytes(len(rows), tensors, reads)
    try:
        return OpGraph(
            names=tuple(names),
            targets=tuple(targets),
            modules=tuple(table.column(lambda row: _text(row, "module", ""))),
            signatures=tuple(
                signature if signature or is_ours else f"{target}:{name}"
                for signature, target, name in zip(
                    table.column(lambda row: _text(row, "signature", "")), targets, names, strict=True
                )
            ),
            phases=np.array(table.column(_phase), dtype=np.int8),
            flops=np.array(table.column(lambda row: _number(row, "flops", 0.0)), dtype=np.float64),
            bytes_moved=np.array(
                [
                    moved_bytes if given < 0 else given
                    for given, moved_bytes in zip(
                        table.column(lambda row: _number(row, "bytes_moved", -1.0)), moved, strict=True
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
        )
    except InvalidValue as error:
        if error.where != "graph":  # already says which node
            raise
        raise InvalidValue(error.field, error.actual, error.expected, where=where) from error


def given_times_s(graph: nx.DiGraph[Any], *, where: str = "networkx graph") -> NDArray[np.float64]:
    """(N,) float64 seconds that the nodes give (`time_s`, `time`, `cost`, ...), in the order of `from_networkx`.

    An `OpGraph` holds no times: make `Costs` of these. A node that says nothing takes 0 s.

    Raises:
        InvalidValue: the graph is cyclic or undirected, or a time is negative or no number.
    """
    nodes = topological_nodes(graph, where)
    table = _Table(nodes, [graph.nodes[node] for node in nodes], where)
    return np.array(table.column(lambda row: _number(row, "time_s", 0.0)), dtype=np.float64)


def topological_nodes(graph: nx.DiGraph[Any], where: str = "networkx graph") -> list[Hashable]:
    """The nodes in the topological order that is nearest to their own.

    Raises:
        InvalidValue: the graph is undirected or cyclic.
    """
    import networkx as nx

    if not graph.is_directed():
        raise InvalidValue("edges", "undirected", "a directed graph", where=where)
    place = {node: i for i, node in enumerate(graph)}
    try:
        return list(nx.lexicographical_topological_sort(graph, key=place.__getitem__))
    except nx.NetworkXUnfeasible as error:
        cycle = " -> ".join(str(source) for source, *_ in nx.find_cycle(graph)[:6])
        raise InvalidValue("edges", f"a cycle ({shown(cycle)})", "an acyclic graph", where=where) from error


def _own_tensors(
    graph: nx.DiGraph[Any], nodes: Sequence[Hashable], index: Mapping[Hashable, int], where: str
) -> tuple[list[_Tensor], list[set[int]], dict[int, int]]:
    tensors: list[_Tensor] = []
    ids: dict[int, int] = {}
    for node in nodes:
        records = graph.nodes[node]["tensors"]
        if not isinstance(records, list):
            raise InvalidValue("tensors", shown(records), "a list of tensors", where=_of(where, node))
        for record in records:
            tensor = _read_tensor(record, index[node], _of(where, node))
            if record["id"] in ids:
                raise InvalidValue("tensors", f"id {record['id']} twice", "ids of their own", where=_of(where, node))
            ids[record["id"]] = len(tensors)
            tensors.append(tensor)
    reads: list[set[int]] = [set() for _ in nodes]
    for source, reader, row in graph.edges(data=True):
        read = row.get("tensors")
        if not isinstance(read, list) or not read or any(type(t) is not int or t not in ids for t in read):
            raise InvalidValue(
                "tensors", shown(read), "a list of ids of tensors", where=_of(where, f"{source} -> {reader}")
            )
        for tensor_id in read:
            if tensors[ids[tensor_id]].producer != index[source]:
                raise InvalidValue(
                    "tensors", tensor_id, "tensors of the edge's source", where=_of(where, f"{source} -> {reader}")
                )
            reads[index[reader]].add(ids[tensor_id])
    return tensors, reads, ids


def _read_tensor(record: Any, producer: int, where: str) -> _Tensor:
    expected = {"id": int, "output": int, "bytes": int, "shape": list, "dtype": str}
    if not isinstance(record, dict):
        raise InvalidValue("tensors", shown(record), "tensors with id, output, bytes, shape and dtype", where=where)
    for key, kind in expected.items():
        value = record.get(key)
        if type(value) is not kind or (isinstance(value, int) and not 0 <= value <= LARGEST_COUNT):
            raise InvalidValue(f"tensors.{key}", shown(value), f"a {kind.__name__}", where=where)
    shape = record["shape"]
    if any(type(size) is not int or not 0 <= size <= LARGEST_COUNT for size in shape):
        raise InvalidValue("tensors.shape", shown(shape), "sizes", where=where)
    if record["output"] > np.iinfo(np.int32).max:
        raise InvalidValue("tensors.output", record["output"], "an output index", where=where)
    return _Tensor(producer, record["output"], record["bytes"], tuple(shape), record["dtype"])


def _made_up_tensors(
    graph: nx.DiGraph[Any], nodes: Sequence[Hashable], index: Mapping[Hashable, int], where: str
) -> tuple[list[_Tensor], list[set[int]], dict[int, int]]:
    """One tensor for each size that a node's edges give; one of the node's own size where they give none."""
    tensors: list[_Tensor] = []
    reads: list[set[int]] = [set() for _ in nodes]
    for i, node in enumerate(nodes):
        own = _Table([node], [graph.nodes[node]], where).column(lambda row: _count(row, "output_bytes"))[0]
        by_size: dict[int, int] = {}
        for _, reader, row in graph.out_edges(node, data=True):
            try:
                size = _count(row, "bytes", own)
            except InvalidValue as error:
                where_edge = _of(where, f"{node} -> {reader}")
                raise InvalidValue(error.field, error.actual, error.expected, where=where_edge) from error
            if size not in by_size:
                by_size[size] = len(tensors)
                tensors.append(_Tensor(i, len(by_size) - 1, size, (size,), "uint8"))
            reads[index[reader]].add(by_size[size])
        if not by_size:
            tensors.append(_Tensor(i, 0, own, (own,), "uint8"))
    return tensors, reads, {}


def _results(
    graph: nx.DiGraph[Any], ids: Mapping[int, int], index: Mapping[Hashable, int], reads: Sequence[set[int]],
    is_ours: bool, where: str,
) -> tuple[list[tuple[int, int]], list[int]]:  # fmt: skip
    """In-place updates and outputs of one of our graphs; of a graph of others, none: what nobody reads is freed."""
    if not is_ours:
        return [], []
    outputs, mutations = graph.graph.get("outputs"), graph.graph.get("mutations")
    if not isinstance(outputs, list) or any(type(t) is not int or t not in ids for t in outputs):
        raise InvalidValue("outputs", shown(outputs), "a list of ids of tensors", where=where)
    pairs = [tuple(pair) if isinstance(pair, list | tuple) else () for pair in mutations or ()] if isinstance(
        mutations, list) else [()]  # fmt: skip
    if any(len(p) != 2 or set(map(type, p)) != {int} or p[0] not in index or p[1] not in ids for p in pairs):
        raise InvalidValue("mutations", shown(mutations), "a list of pairs of an op and a tensor", where=where)
    return [(index[op], ids[tensor]) for op, tensor in pairs], [ids[tensor] for tensor in outputs]


@dataclass(frozen=True)
class _Table:
    """Attributes of nodes (or edges): what is wrong with one is said with its name."""

    nodes: Sequence[Hashable]
    rows: Sequence[Mapping[str, Any]]
    where: str

    def column(self, read: Callable[[Mapping[str, Any]], Item]) -> list[Item]:
        values: list[Item] = []
        try:
            for row in self.rows:
                values.append(read(row))
        except InvalidValue as error:
            where = _of(self.where, self.nodes[len(values)])
            raise InvalidValue(error.field, error.actual, error.expected, where=where) from error
        return values

    def counts(self, field: str) -> NDArray[np.int64]:
        return np.array(self.column(lambda row: _count(row, field)), dtype=np.int64)


def _moved_bytes(num_ops: int, tensors: Sequence[_Tensor], reads: Sequence[set[int]]) -> list[float]:
    """Bytes of each op's inputs and outputs."""
    moved = [0.0] * num_ops
    for tensor in tensors:
        moved[tensor.producer] += tensor.num_bytes
    for op, read in enumerate(reads):
        moved[op] += sum(tensors[tensor].num_bytes for tensor in read)
    return moved


def _names(table: _Table) -> list[str]:
    given = table.column(lambda row: _text(row, "name", ""))
    names = [name or str(node) for node, name in zip(table.nodes, given, strict=True)]
    return names if len(set(names)) == len(names) else [f"{name}#{i}" for i, name in enumerate(names)]


def _find(row: Mapping[str, Any], field: str) -> tuple[str, Any]:
    for key in ALIASES.get(field, (field,)):
        value = row.get(key)
        if value is not None:
            return key, value
    return field, None


def _text(row: Mapping[str, Any], field: str, default: str) -> str:
    key, value = _find(row, field)
    if value is None:
        return default
    if not isinstance(value, str | int | float):
        raise InvalidValue(key, shown(value), "text")
    return str(value)


def _number(row: Mapping[str, Any], field: str, default: float) -> float:
    key, value = _find(row, field)
    if value is None:
        return default
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        raise InvalidValue(key, shown(value), "a number")
    if not 0 <= value < 1e300:
        raise InvalidValue(key, shown(value), "a finite number >= 0")
    return float(value)


def _count(row: Mapping[str, Any], field: str, default: int = 0) -> int:
    value = _number(row, field, float(default))
    if value > LARGEST_COUNT:
        raise InvalidValue(field, value, f"at most {LARGEST_COUNT}")
    return math.ceil(value)


def _phase(row: Mapping[str, Any]) -> int:
    value = row.get("phase", 0)
    if isinstance(value, str) and value in PHASES:
        return PHASES.index(value)
    if type(value) is int and 0 <= value < len(PHASES):
        return value
    raise InvalidValue("phase", shown(value), f"one of {', '.join(PHASES)}")


def _colocation(rows: Sequence[Mapping[str, Any]], is_ours: bool, where: str) -> NDArray[np.int32]:
    """Classes as they are in one of our graphs; of a graph of others, any value names a class, and are numbered."""
    found = [_find(row, "colocation") for row in rows]
    if is_ours:
        bad = next((value for _, value in found if type(value) is not int or not -1 <= value < len(rows)), None)
        if bad is not None or any(value is None for _, value in found):
            raise InvalidValue("colocation", shown(bad), f"an integer in -1..{len(rows) - 1}", where=where)
        return np.array([value for _, value in found], dtype=np.int32)
    classes: dict[str, int] = {}
    free = (None, -1, "")
    return np.array(
        [-1 if value in free else classes.setdefault(str(value), len(classes)) for _, value in found], dtype=np.int32
    )


def _of(where: str, part: object) -> str:
    return f"{where}, {shown(str(part))}"
