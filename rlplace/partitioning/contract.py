"""`contract`: the forward graph that contiguous splits are made of, one unit for what has to move together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from rlplace.graphs.formats.dnn_partitioning import DnnPartitioning
from rlplace.graphs.opgraph import BACKWARD
from rlplace.graphs.paths import depth_first_order
from rlplace.partitioning.unit_graph import UnitGraph, unit_graph

Ints = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Contraction:
    """Units and the forward DAG over them.

    Attributes:
        units: numbered in a topological order.
        source_offsets, sources: CSR (U + 1,), (F,) int32 of the units before each unit.
        reader_offsets, readers: CSR (U + 1,), (F,) int32 of the units after each unit.
    """

    units: UnitGraph
    source_offsets: Ints
    sources: Ints
    reader_offsets: Ints
    readers: Ints


def contract(record: DnnPartitioning) -> Contraction:
    """The contraction of Tarnawski et al. (2020): what contiguous means for graphs with classes and backward nodes.

    1. A colour class is one unit, its forward and backward ops together.
    2. In a training graph, a forward op that takes no time and has a single neighbour joins it.
    3. An edge between forward ops is an edge of the forward graph; so is, reversed, an edge between backward ops of
       which one has no forward op in its unit (a mirror of the backward graph stands for the missing forward part).
    4. Units on a cycle of the forward graph are one unit.
    """
    graph = record.graph
    backward = graph.phases == BACKWARD
    sources, readers = graph.input_tensors, graph.edge_op
    unit = record.units.copy()
    if record.is_training:
        unit = _absorb(record, unit, backward)
    count = int(unit.max()) + 1
    has_forward = np.zeros(count, dtype=np.bool_)
    has_forward[unit[~backward]] = True
    a, b = unit[sources], unit[readers]
    ahead = ~backward[sources] & ~backward[readers]
    mirrored = backward[sources] & backward[readers] & ~(has_forward[a] & has_forward[b])
    tails, heads = np.concatenate((a[ahead], b[mirrored])), np.concatenate((b[ahead], a[mirrored]))
    _, component = connected_components(
        csr_array((np.ones(len(tails)), (tails, heads)), shape=(count, count)), connection="strong"
    )
    tails, heads, count = component[tails], component[heads], int(component.max()) + 1
    pairs = np.unique(np.stack((tails, heads), axis=1)[tails != heads], axis=0)
    rank = _topological_rank(count, pairs)
    pairs = rank[pairs]
    return Contraction(
        unit_graph(record, rank[component[unit]].astype(np.int32)),
        *_csr(count, pairs[:, 1], pairs[:, 0]),
        *_csr(count, pairs[:, 0], pairs[:, 1]),
    )


def _absorb(record: DnnPartitioning, unit: Ints, backward: NDArray[np.bool_]) -> Ints:
    """(N,) units after forward units without work have joined their only neighbour, again and again."""
    count = int(unit.max()) + 1
    idle = np.ones(count, dtype=np.bool_)
    busy = (record.accelerator_ms > 0) | (record.cpu_ms > 0) | backward | ~record.supported
    idle[unit[busy]] = False
    neighbours: list[set[int]] = [set() for _ in range(count)]
    for a, b in zip(unit[record.graph.input_tensors].tolist(), unit[record.graph.edge_op].tolist(), strict=True):
        if a != b:
            neighbours[a].add(b)
            neighbours[b].add(a)
    into = np.arange(count)
    queue = [u for u in range(count) if idle[u] and len(neighbours[u]) == 1]
    while queue:
        u = queue.pop()
        if len(neighbours[u]) != 1:
            continue
        host = neighbours[u].pop()
        neighbours[host].discard(u)
        into[u] = host
        if idle[host] and len(neighbours[host]) == 1:
            queue.append(host)
    while np.any(into != into[into]):
        into = into[into]
    return np.unique(into[unit], return_inverse=True)[1].astype(np.int32)


def _topological_rank(count: int, pairs: NDArray[np.int64]) -> NDArray[np.int64]:
    """(U,) place of each unit in a depth-first topological order: a branch is finished before the next begins."""
    source, reader = pairs[np.lexsort((-pairs[:, 1], pairs[:, 0]))].T  # the last reader made ready goes first
    offsets = np.searchsorted(source, np.arange(count + 1))
    order, _ = depth_first_order(count, offsets, np.ascontiguousarray(reader))
    rank = np.zeros(count, dtype=np.int64)
    rank[order] = np.arange(count)
    return rank


def _csr(count: int, keys: NDArray[np.integer], values: NDArray[np.integer]) -> tuple[Ints, Ints]:
    order = np.lexsort((values, keys))
    counts = np.bincount(keys, minlength=count)
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32), values[order].astype(np.int32)
