"""Edges between groups of ops, and what they say of an order: which group runs before which, and which are on a cycle.

A group is known by its first op, its root; `roots` is (N,) int64, the root of each op.
"""

from __future__ import annotations

import numpy as np

from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.paths import depth_first_order
from rlplace.jit import Floats, Longs

Pairs = tuple[Longs, Longs]


def group_edges(graph: OpGraph, roots: Longs, latency_s: float, s_per_byte: float) -> tuple[Longs, Longs, Floats]:
    """Edges by (source, target): the roots of two groups, and the seconds that it takes to send their tensors.

    A tensor goes to a group once, however many of its ops read it.

    Args:
        graph: N ops.
        roots: (N,) of each op.
        latency_s: seconds of a transfer, whatever its size ...
        s_per_byte: ... and of each byte.
    """
    n = graph.num_ops
    tensor, reader = np.divmod(np.unique(graph.input_tensors.astype(np.int64) * n + roots[graph.edge_op]), max(n, 1))
    producer = roots[graph.tensor_op[tensor]]
    outside = producer != reader
    pairs, inverse = np.unique(producer[outside] * n + reader[outside], return_inverse=True)
    send_s = latency_s + graph.tensor_bytes[tensor[outside]] * s_per_byte
    weight_s = np.bincount(inverse, weights=send_s, minlength=len(pairs))
    return pairs // max(n, 1), pairs % max(n, 1), weight_s.astype(np.float64)


def order_edges(graph: OpGraph, roots: Longs) -> Pairs:
    """Distinct edges between groups that say which of two runs first, by (source, target).

    What a parameter or buffer that lives with other ops feeds does not count: it is there before the step.
    """
    n = max(graph.num_ops, 1)
    producer = graph.tensor_op[graph.input_tensors]
    counts = ~(graph.is_resident & (graph.colocation >= 0))[producer]
    source, target = roots[producer[counts]], roots[graph.edge_op[counts]]
    outside = source != target
    pairs = np.unique(source[outside] * n + target[outside])
    return pairs // n, pairs % n


def topological_order(graph: OpGraph, roots: Longs) -> tuple[Longs, Longs]:
    """Roots in a topological order, and (N,) top levels; roots on cycles are missing from the order."""
    n = graph.num_ops
    source, target = order_edges(graph, roots)
    offsets = np.searchsorted(source, np.arange(n + 1)).astype(np.int64)
    order, level = depth_first_order(n, offsets, target)
    return order[roots[order] == order], level


def components(graph: OpGraph, roots: Longs) -> Longs:
    """(N,) int64: the strongly connected component of each op's group; a group on no cycle is one by itself."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    source, target = order_edges(graph, roots)
    n = graph.num_ops
    adjacency = csr_array((np.ones(len(source), dtype=np.int8), (source, target)), shape=(n, n))
    _, component = connected_components(adjacency, directed=True, connection="strong")
    return np.asarray(component, dtype=np.int64)[roots]
