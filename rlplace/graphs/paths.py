"""Orders and longest paths of a DAG: Kahn's algorithm (1962), and the recurrences that ranks and bounds are made of."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np

from rlplace.jit import Floats, Ints, Longs, kernel


def topological_order(num_ops: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """Numbers below `num_ops`, each after all that has an edge to it, and otherwise ascending.

    Args:
        num_ops: how many there are.
        edges: (source, reader) pairs.

    Returns:
        The order; nodes on a cycle or behind one are left out.

    >>> topological_order(4, [(3, 0), (0, 1)])
    [2, 3, 0, 1]
    >>> topological_order(3, [(1, 2), (2, 1)])
    [0]
    """
    readers: list[list[int]] = [[] for _ in range(num_ops)]
    waiting = [0] * num_ops
    for source, reader in edges:
        readers[source].append(reader)
        waiting[reader] += 1
    ready = [op for op in range(num_ops) if not waiting[op]]
    order = []
    while ready:
        op = heapq.heappop(ready)
        order.append(op)
        for reader in readers[op]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, reader)
    return order


@kernel
def depth_first_order(num_nodes: int, offsets: Longs, targets: Longs) -> tuple[Longs, Longs]:
    """A topological order in which neighbours are neighbours in the graph too, and the top level of each node.

    Among ready nodes the last made ready goes first. Nodes on a cycle, and behind one, are missing from the order.

    Args:
        num_nodes: how many there are.
        offsets: (num_nodes + 1,) int64, CSR of the edges out of each node.
        targets: (E,) int64, the node that each edge goes to.

    Returns:
        The order, and (num_nodes,) int64 edges of the longest path to each node.
    """
    waiting = np.zeros(num_nodes, np.int64)
    for target in targets:
        waiting[target] += 1
    level = np.zeros(num_nodes, np.int64)
    ready = np.empty(num_nodes, np.int64)
    num_ready = 0
    for node in range(num_nodes - 1, -1, -1):
        if waiting[node] == 0:
            ready[num_ready] = node
            num_ready += 1
    order = np.empty(num_nodes, np.int64)
    count = 0
    while num_ready > 0:
        num_ready -= 1
        node = ready[num_ready]
        order[count] = node
        count += 1
        for edge in range(offsets[node], offsets[node + 1]):
            target = targets[edge]
            level[target] = max(level[target], level[node] + 1)
            waiting[target] -= 1
            if waiting[target] == 0:
                ready[num_ready] = target
                num_ready += 1
    return order[:count], level


@kernel
def longest_before(node_s: Floats, input_offsets: Ints, producers: Ints, edge_s: Floats) -> Floats:
    """(N,) float64: the longest path to the start of each node; 0 where it reads nothing.

    Args:
        node_s: (N,) float64, the length of each node; indices are a topological order.
        input_offsets: (N + 1,) int32, CSR of the edges into each node.
        producers: (E,) int32, the node that each edge comes from.
        edge_s: (E,) float64, the length of each edge.
    """
    before = np.zeros(len(node_s))
    for node in range(len(node_s)):
        for edge in range(input_offsets[node], input_offsets[node + 1]):
            before[node] = max(before[node], before[producers[edge]] + node_s[producers[edge]] + edge_s[edge])
    return before


@kernel
def longest_after(node_s: Floats, input_offsets: Ints, producers: Ints, edge_s: Floats) -> Floats:
    """(N,) float64: the longest path from the end of each node; 0 where nothing reads it. Arguments as above.

    `node_s + longest_after(...)` is the upward rank of list scheduling (HEFT: Topcuoglu, Hariri, Wu 2002, equation 6).
    """
    after = np.zeros(len(node_s))
    for node in range(len(node_s) - 1, -1, -1):
        for edge in range(input_offsets[node], input_offsets[node + 1]):
            after[producers[edge]] = max(after[producers[edge]], after[node] + node_s[node] + edge_s[edge])
    return after


def ready_order(priority: Floats, input_offsets: Ints, reader_offsets: Ints, readers: Ints) -> Longs:
    """(N,) int64: a topological order that takes the ready node of highest priority next, ties by index.

    Args:
        priority: (N,) float64.
        input_offsets: (N + 1,) int32, CSR of the edges into each node.
        reader_offsets: (N + 1,) int32, CSR of the edges out of each node.
        readers: (E,) int32, the node that each edge goes to.
    """
    by_rank = np.argsort(-priority, kind="stable")
    rank = np.argsort(by_rank)
    ranks, starts, following = rank.tolist(), reader_offsets.tolist(), readers.tolist()
    missing = np.diff(input_offsets).tolist()
    ready = rank[np.diff(input_offsets) == 0].tolist()
    heapq.heapify(ready)
    nodes, order = by_rank.tolist(), []
    while ready:
        node = nodes[heapq.heappop(ready)]
        order.append(node)
        for reader in following[starts[node] : starts[node + 1]]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, ranks[reader])
    return np.array(order, dtype=np.int64)
