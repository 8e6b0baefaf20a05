"""`to_networkx`, `from_networkx`: a `networkx.DiGraph` that holds a whole `OpGraph`, and an `OpGraph` from any DAG.

`docs/graph-files.md` lists the attributes and what stands in for those that a graph of others lacks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlplace.decode import described
from rlplace.errors import InvalidValue
from rlplace.graphs.formats.attributes import Attributes, find_attribute, read_number, read_phase, read_text
from rlplace.graphs.formats.networkx_tensors import made_up_tensors, moved_bytes_of, own_tensors, read_results
from rlplace.graphs.formats.spelling import check_spelling
from rlplace.graphs.opgraph import PHASES, OpGraph

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
    try:
        return list(nx.lexicographical_topological_sort(graph, key=place.__getitem__))
    except nx.NetworkXUnfeasible as error:
        cycle = " -> ".join(str(source) for source, *_ in nx.find_cycle(graph)[:6])
        raise InvalidValue("edges", f"a cycle ({described(cycle)})", "an acyclic graph", where=where) from error


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
