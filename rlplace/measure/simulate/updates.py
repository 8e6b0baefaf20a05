"""`Updates`: the in-place updates of a step, and what it takes to know which ops they wait for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlplace.errors import InvalidValue
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.paths import topological_order
from rlplace.jit import Bytes, Ints, Longs


class Updates(NamedTuple):
    """In-place updates, and what it takes to know which ops they wait for. CSR over ops, over tensors, over ops."""

    updated_offsets: Ints  # tensors that an op updates
    updated_tensors: Ints
    updater_offsets: Ints  # ops that update a tensor
    updater_ops: Ints
    concerned: Bytes  # (N,) ops that read or update a tensor that some op updates
    tensor_op: Ints
    input_offsets: Ints
    input_tensors: Ints
    route_kind: Ints
    num_devices: int


def lay_out_updates(graph: OpGraph, route_kind: Ints, num_devices: int) -> Updates:
    """The in-place updates of a graph on a host.

    Args:
        graph: with its mutations.
        route_kind: (D * D,) kinds of route.
        num_devices: D.

    Raises:
        InvalidValue: updates that wait for each other.
    """
    pairs = np.unique(np.stack([graph.mutation_op, graph.mutation_tensor], axis=1), axis=0).astype(np.int64)
    ops, tensors = pairs[:, 0], pairs[:, 1]
    by_tensor = np.lexsort((ops, tensors))
    updated = np.zeros(graph.num_tensors, dtype=np.bool_)
    updated[tensors] = True
    concerned = np.zeros(graph.num_ops, dtype=np.int8)
    concerned[ops] = 1
    concerned[graph.edge_op[updated[graph.input_tensors]]] = 1
    if not _come_last(graph, ops, tensors):
        _check_updates(graph, ops, tensors)
    return Updates(
        updated_offsets=_offsets(ops, graph.num_ops),
        updated_tensors=tensors.astype(np.int32),
        updater_offsets=_offsets(tensors, graph.num_tensors),
        updater_ops=ops[by_tensor].astype(np.int32),
        concerned=concerned,
        tensor_op=graph.tensor_op,
        input_offsets=graph.input_offsets,
        input_tensors=graph.input_tensors,
        route_kind=route_kind,
        num_devices=num_devices,
    )


def _offsets(keys: Longs, count: int) -> Ints:
    return np.concatenate(([0], np.cumsum(np.bincount(keys, minlength=count)))).astype(np.int32)


def _come_last(graph: OpGraph, ops: Longs, tensors: Longs) -> bool:
    """Whether every update has a higher index than each op that reads its tensor and does not update it."""
    is_update = np.isin(
        graph.edge_op.astype(np.int64) * graph.num_tensors + graph.input_tensors, ops * graph.num_tensors + tensors
    )
    last_reader = np.full(graph.num_tensors, -1, dtype=np.int64)
    np.maximum.at(last_reader, graph.input_tensors[~is_update], graph.edge_op[~is_update])
    return bool(np.all(last_reader[tensors] < ops))


def _check_updates(graph: OpGraph, ops: Longs, tensors: Longs) -> None:
    """Raise where an op that updates a tensor in place would have to wait for a reader that waits for it."""
    waits_for: list[set[int]] = [
        set(graph.tensor_op[graph.input_tensors[graph.input_offsets[i] : graph.input_offsets[i + 1]]].tolist())
        for i in range(graph.num_ops)
    ]
    offsets, readers = graph.readers
    updaters: dict[int, list[int]] = {}
    for op, tensor in zip(ops.tolist(), tensors.tolist(), strict=True):
        updaters.setdefault(tensor, []).append(op)
    for tensor, writers in updaters.items():
        earlier = set(readers[offsets[tensor] : offsets[tensor + 1]].tolist()) - set(writers)
        for writer in sorted(writers):
            waits_for[writer] |= earlier | {int(graph.tensor_op[tensor])}
            earlier |= {writer}
    edges = [(before, op) for op, befores in enumerate(waits_for) for before in befores - {op}]
    runs = set(topological_order(graph.num_ops, edges))
    if len(runs) < graph.num_ops:
        stuck = min(set(ops.tolist()) - runs)
        raise InvalidValue(
            "mutation_op",
            f"op {graph.names[stuck]!r} waits for a reader that waits for it",
            "in-place updates after every other reader of their tensor",
            where="graph",
        )
