"""Tensors on their way from a `networkx.DiGraph` into an `OpGraph`: those of one of our graphs, or made up."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlplace.decode import described
from rlplace.errors import InvalidValue
from rlplace.graphs.formats.attributes import Attributes, place_of, read_count
from rlplace.graphs.formats.fields import LARGEST_COUNT

if TYPE_CHECKING:
    import networkx as nx


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
