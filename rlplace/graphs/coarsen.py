"""`Coarsening`: groups of ops that grow by merging, as a union-find over an `OpGraph`."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.opgraph import OpGraph


class Coarsening:
    """Groups of ops under construction; each is known by its first op."""

    def __init__(self, graph: OpGraph, cost_s: NDArray[np.float64]) -> None:
        self.graph = graph
        self.num_groups = graph.num_ops
        self.total_s = float(cost_s.sum()) * (1 + 1e-9)
        self._cost_s: list[float] = cost_s.tolist()
        self._parent: list[int] = list(range(graph.num_ops))

    def op_group(self) -> NDArray[np.int32]:
        """(N,) int32: group of each op, numbered by first op."""
        return np.unique(self._roots(), return_inverse=True)[1].astype(np.int32)

    def join_classes(self) -> None:
        """Merges the ops of each co-location class, whatever they cost."""
        first: dict[int, int] = {}
        for op, label in enumerate(self.graph.colocation.tolist()):
            if label >= 0:
                self._merge(first.setdefault(label, op), op)

    def join_sources(self) -> None:
        """Merges each source without a class into its first reader; those that nobody reads into one group."""
        graph = self.graph
        offsets, readers = graph.readers
        unread = -1
        for op in np.flatnonzero(graph.is_source & (graph.colocation < 0)).tolist():
            first, last = offsets[graph.output_offsets[op]], offsets[graph.output_offsets[op + 1]]
            if first < last:
                self._merge(op, int(readers[first:last].min()))
            else:
                unread = op if unread < 0 else unread
                self._merge(op, unread)

    def join_single_consumers(self, cap_s: float) -> None:
        """Merges every group into the only other group that reads it, while no group passes `cap_s`, to a fixpoint."""
        merged = True
        while merged:
            merged = False
            source, target, _ = self._edges()
            nodes, start = np.unique(source, return_index=True)
            ends = np.append(start, len(source))[1:].tolist()
            targets = target.tolist()
            grown: set[int] = set()
            for node, begin, end in zip(nodes.tolist()[::-1], start.tolist()[::-1], ends[::-1], strict=True):
                if node in grown:  # its edges of this round are no longer all of its edges
                    continue
                consumers = {self._find(reader) for reader in targets[begin:end]}
                if len(consumers) == 1 and self._merge_under(node, consumer := consumers.pop(), cap_s):
                    grown.update((consumer, self._find(consumer)))
                    merged = True

    def merge_heavy_edges(self, cap_s: float, num_groups: int) -> bool:
        """Merges along edges, most bytes first, while no group passes `cap_s` and more than `num_groups` are left."""
        source, target, edge_bytes = self._edges()
        low, high = np.minimum(source, target), np.maximum(source, target)
        pairs, inverse = np.unique(low * self.graph.num_ops + high, return_inverse=True)
        weight = np.bincount(inverse, weights=edge_bytes, minlength=len(pairs))
        before = self.num_groups
        for pair in pairs[np.argsort(-weight, kind="stable")].tolist():
            if self.num_groups <= num_groups:
                break
            first, second = divmod(pair, self.graph.num_ops)
            self._merge_under(first, second, cap_s)
        return self.num_groups < before

    def merge_cheapest(self, num_groups: int) -> None:
        """Merges the two cheapest groups until `num_groups` are left, whether or not an edge joins them."""
        heap = [(self._cost_s[root], root) for root in sorted(set(self._roots().tolist()))]
        heapq.heapify(heap)
        while self.num_groups > num_groups:
            (_, first), (_, second) = heapq.heappop(heap), heapq.heappop(heap)
            self._merge(first, second)
            root = min(first, second)
            heapq.heappush(heap, (self._cost_s[root], root))

    def lightest_pair_s(self) -> float:
        """Least cost of two groups that an edge joins; the total where there is no edge."""
        source, target, _ = self._edges()
        cost_s = np.asarray(self._cost_s)
        return float((cost_s[source] + cost_s[target]).min(initial=self.total_s))

    def _edges(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Edges between groups, by (source, target): their first ops and the bytes that go along each.

        A tensor goes to a group once, however many of its ops read it.
        """
        graph, roots, n = self.graph, self._roots(), self.graph.num_ops
        tensor, reader = np.divmod(np.unique(graph.input_tensors.astype(np.int64) * n + roots[graph.edge_op]), n)
        producer = roots[graph.tensor_op[tensor]]
        outside = producer != reader
        pairs, inverse = np.unique(producer[outside] * n + reader[outside], return_inverse=True)
        edge_bytes = np.bincount(inverse, weights=graph.tensor_bytes[tensor[outside]], minlength=len(pairs))
        return pairs // n, pairs % n, edge_bytes.astype(np.float64)

    def _roots(self) -> NDArray[np.int64]:
        parent = np.asarray(self._parent, dtype=np.int64)
        while True:
            grandparent = parent[parent]
            if np.array_equal(parent, grandparent):
                return parent
            parent = grandparent

    def _find(self, op: int) -> int:
        parent = self._parent
        while parent[op] != op:
            parent[op] = parent[parent[op]]
            op = parent[op]
        return op

    def _merge(self, op: int, other: int) -> None:
        first, second = sorted((self._find(op), self._find(other)))
        if first != second:
            self._parent[second] = first
            self._cost_s[first] += self._cost_s[second]
            self.num_groups -= 1

    def _merge_under(self, op: int, other: int, cap_s: float) -> bool:
        first, second = self._find(op), self._find(other)
        if first == second or self._cost_s[first] + self._cost_s[second] > cap_s:
            return False
        self._merge(first, second)
        return True
