"""Lower bounds along paths: how early an op can start, and how much is left when it ends."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.paths import longest_after, longest_before
from rlplace.jit import Floats, Ints, kernel
from rlplace.measure.bounds.figures import Figures

MOST_ANCESTORS = 24
"""Nearest ancestors of an op that are looked at together."""


def heads_and_tails(
    graph: OpGraph, figures: Figures, *, with_transfers: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(N,) seconds before which no op can start, and (N,) seconds that are left, at least, when it ends.

    Without transfers: the longest path on fastest devices. Ops of a path run one after the other wherever they are.

    With transfers, for an op v and some of its ancestors: *either* all of them are on v's device, which runs them one
    after the other, each no earlier than its own head, on whichever device suits them best; *or* one of them, u, is
    elsewhere. Then on any path from u to v some tensor goes from one device to another, so that v starts no earlier
    than u's head, the ops of the path and the cheapest transfer along it. The lesser of the two is a bound, for any set
    of ancestors (here: those with the latest "or", one by one); after Papadimitriou and Yannakakis 1990, for unequal
    devices. Tails are the same with every edge turned round. Contention, co-running, launches and waiting updates only
    delay.
    """
    producers, readers = graph.tensor_op[graph.input_tensors], graph.edge_op
    is_edge = figures.is_job[producers]
    producers, readers = producers[is_edge], readers[is_edge]
    transfer_s = figures.tensor_s[graph.input_tensors[is_edge]]
    edges = _by_reader(graph.num_ops, readers, producers, transfer_s)
    if not with_transfers:
        least_s, free = figures.path_s.min(axis=1), (*edges[:2], np.zeros(len(producers)))
        return longest_before(least_s, *free), longest_after(least_s, *free)
    last = graph.num_ops - 1
    turned = _by_reader(graph.num_ops, last - producers, last - readers, transfer_s)
    tails = _earliest(np.ascontiguousarray(figures.path_s[::-1]), *turned)[::-1]
    return _earliest(figures.path_s, *edges), tails


def _by_reader(
    num_ops: int, readers: Ints, producers: Ints, transfer_s: NDArray[np.float64]
) -> tuple[Ints, Ints, NDArray[np.float64]]:
    """CSR over ops: the producers that each reads, and the transfer if they are apart."""
    order = np.lexsort((producers, readers))
    offsets = np.concatenate(([0], np.cumsum(np.bincount(readers, minlength=num_ops)))).astype(np.int32)
    return offsets, producers[order].astype(np.int32), transfer_s[order]


@kernel
def _earliest(path_s: Floats, offsets: Ints, producers: Ints, transfer_s: Floats) -> Floats:
    num_ops, num_devices = path_s.shape
    least_s = np.zeros(num_ops)
    for op in range(num_ops):
        least_s[op] = path_s[op].min()
    heads = np.zeros(num_ops)
    seen = np.full(num_ops, -1, dtype=np.int64)
    ancestors = np.zeros(MOST_ANCESTORS, dtype=np.int64)
    between_s = np.zeros(MOST_ANCESTORS)  # ops of the path from an ancestor to the op at hand
    cheapest_s = np.zeros(MOST_ANCESTORS)  # least transfer on that path
    apart_s = np.zeros(MOST_ANCESTORS)
    for op in range(num_ops):
        for a in range(offsets[op], offsets[op + 1]):
            heads[op] = max(heads[op], heads[producers[a]] + least_s[producers[a]])
        count, at = 0, -1
        while at < count and count < MOST_ANCESTORS:  # breadth first; at = -1 is the op itself
            here = op if at < 0 else ancestors[at]
            for a in range(offsets[here], offsets[here + 1]):
                producer = producers[a]
                if count < MOST_ANCESTORS and seen[producer] != op:
                    seen[producer] = op
                    ancestors[count] = producer
                    between_s[count] = 0.0 if at < 0 else between_s[at] + least_s[here]
                    cheapest_s[count] = transfer_s[a] if at < 0 else min(cheapest_s[at], transfer_s[a])
                    apart_s[count] = heads[producer] + least_s[producer] + between_s[count] + cheapest_s[count]
                    count += 1
            at += 1
        latest_first = np.argsort(-apart_s[:count])
        by_head = np.argsort(heads[ancestors[:count]])
        place = np.zeros(count, dtype=np.int64)
        for k in range(count):
            place[latest_first[k]] = k
        for k in range(count):
            if apart_s[latest_first[k]] <= heads[op]:
                break
            together_s = np.inf
            for device in range(num_devices):
                if path_s[op, device] == np.inf:
                    continue
                end_s = 0.0
                for which in by_head:
                    if place[which] <= k:
                        end_s = max(end_s, heads[ancestors[which]]) + path_s[ancestors[which], device]
                together_s = min(together_s, end_s)
            heads[op] = max(heads[op], min(apart_s[latest_first[k]], together_s))
    return heads
