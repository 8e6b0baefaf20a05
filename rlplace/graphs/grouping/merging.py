"""Kernels of coarsening: a union-find whose roots carry cost, bytes and the devices where a group may be."""

from __future__ import annotations

import heapq

import numpy as np

from rlplace.jit import Bools, Floats, Ints, Longs, kernel, part

FREELY, BY_HUBS, PAIRWISE = range(3)


@part
def find(parent: Longs, op: int) -> int:
    """The root of `op`; halves the path to it."""
    while parent[op] != op:
        parent[op] = parent[parent[op]]
        op = parent[op]
    return op


@part
def _share_device(allowed: Bools, one: int, other: int) -> bool:
    """Whether a device is allowed for both groups. (A loop: whole-row expressions take seconds to compile.)"""
    found = False
    for device in range(allowed.shape[1]):
        found = found or (allowed[one, device] and allowed[other, device])
    return found


@part
def _join(parent: Longs, cost_s: Floats, load_bytes: Floats, allowed: Bools, low: int, high: int) -> None:
    """Merges group `high` into group `low`, which may be on the devices that both may be on."""
    parent[high] = low
    cost_s[low] += cost_s[high]
    load_bytes[low] += load_bytes[high]
    for device in range(allowed.shape[1]):
        allowed[low, device] = allowed[low, device] and allowed[high, device]


@kernel
def merge_along(
    parent: Longs,
    cost_s: Floats,
    load_bytes: Floats,
    allowed: Bools,
    fence: Longs,
    first: Longs,
    second: Longs,
    weight_s: Floats,
    least_ratio: float,
    cap_s: float,
    cap_bytes: float,
    limit: int,
    growth: int,
) -> int:
    """How many of the pairs `first[k]`, `second[k]` were merged, in order; the root of a group is its first op.

    A pair is left out when the merged group would pass `cap_s` or `cap_bytes`, when a fence is between the two, when no
    device is allowed for both, when `weight_s[k]` is less than `least_ratio` times the cost of the cheaper of the two,
    once `limit` are merged, and when in this call either of the two grew already (`growth` is `PAIRWISE`, a matching)
    or the cheaper one did (`BY_HUBS`: a group that many small ones hang on takes all of them in at once).
    """
    grew = np.zeros(len(parent), np.bool_)
    num_merged = 0
    for pair in range(len(first)):
        if num_merged >= limit:
            break
        one, other = find(parent, first[pair]), find(parent, second[pair])
        low, high = min(one, other), max(one, other)
        is_late = growth == PAIRWISE and (grew[low] or grew[high])
        is_late |= growth == BY_HUBS and grew[low if cost_s[low] <= cost_s[high] else high]
        is_large = cost_s[low] + cost_s[high] > cap_s or load_bytes[low] + load_bytes[high] > cap_bytes
        is_weak = weight_s[pair] < least_ratio * min(cost_s[low], cost_s[high])
        is_fenced = fence[low] != fence[high]
        if low == high or is_late or is_large or is_weak or is_fenced or not _share_device(allowed, low, high):
            continue
        _join(parent, cost_s, load_bytes, allowed, low, high)
        grew[low] = True
        num_merged += 1
    return num_merged


@kernel
def merge_cheapest(
    parent: Longs, cost_s: Floats, load_bytes: Floats, allowed: Bools, roots: Longs, cap_bytes: float, limit: int
) -> int:
    """How many merges of the two cheapest groups of `roots` were made, edge or not, at most `limit`.

    Where the two may not merge (no common device, or too many bytes), the cheaper one is left as it is.
    """
    heap = [(cost_s[root], root) for root in roots]
    heapq.heapify(heap)
    num_merged = 0
    while num_merged < limit and len(heap) > 1:
        _, one = heapq.heappop(heap)
        _, other = heap[0]
        if load_bytes[one] + load_bytes[other] > cap_bytes or not _share_device(allowed, one, other):
            continue
        heapq.heappop(heap)
        low, high = min(one, other), max(one, other)
        _join(parent, cost_s, load_bytes, allowed, low, high)
        heapq.heappush(heap, (cost_s[low], low))
        num_merged += 1
    return num_merged


@kernel
def mirrored_twins(
    module: Longs,
    is_forward: Bools,
    is_backward: Bools,
    is_source: Bools,
    tensor_op: Ints,
    input_offsets: Ints,
    input_tensors: Ints,
    reader_offsets: Ints,
    readers: Ints,
    num_modules: int,
) -> Longs:
    """(N,) the forward op whose gradient each backward op computes; -1 for other ops, and where a module has none.

    Within a module the backward runs the forward in reverse. Of k forward ops and m backward ones, backward op j
    (0-based) mirrors forward op `(m - 1 - j) k / m`; among the forward ops of its module that share a computed tensor
    with it (they made it, or read it too: the tensor that autograd saved), the nearest to that one is its twin, else
    that one.
    """
    num_ops = len(module)
    num_forward = np.zeros(num_modules + 1, np.int64)
    num_backward = np.zeros(num_modules, np.int64)
    place = np.zeros(num_ops, np.int64)  # of an op among those of its module and phase
    for op in range(num_ops):
        if is_forward[op]:
            place[op] = num_forward[module[op] + 1]
            num_forward[module[op] + 1] += 1
        elif is_backward[op]:
            place[op] = num_backward[module[op]]
            num_backward[module[op]] += 1
    start = np.cumsum(num_forward)
    forward = np.empty(start[-1], np.int64)
    for op in range(num_ops):
        if is_forward[op]:
            forward[start[module[op]] + place[op]] = op
    twin = np.full(num_ops, -1, np.int64)
    for op in range(num_ops):
        home = module[op]
        count = start[home + 1] - start[home]
        if not is_backward[op] or count == 0:
            continue
        wanted = (num_backward[home] - 1 - place[op]) * count // num_backward[home]
        best, best_distance = forward[start[home] + wanted], num_ops
        for edge in range(input_offsets[op], input_offsets[op + 1]):
            tensor = input_tensors[edge]
            if is_source[tensor_op[tensor]]:
                continue
            first = reader_offsets[tensor]
            for position in range(first - 1, reader_offsets[tensor + 1]):  # the producer, then the readers
                other = np.int64(tensor_op[tensor] if position < first else readers[position])
                if is_forward[other] and module[other] == home and abs(place[other] - wanted) < best_distance:
                    best, best_distance = other, abs(place[other] - wanted)
        twin[op] = best
    return twin
