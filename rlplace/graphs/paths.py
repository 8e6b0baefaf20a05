"""`topological_order`: Kahn's algorithm (1962), ties by number."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


def topological_order(num_ops: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """Numbers below `num_ops`, each after all that has an edge to it, and otherwise ascending.

    Args:
        num_ops: how many there are.
        edges: (source, reader) pairs.

    Returns:
        The order; what is on a cycle or behind one is left out.

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
