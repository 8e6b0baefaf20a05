"""`Coarsening`: groups of ops that grow by merging, as a union-find over an `OpGraph`, and the rules and rounds of it.

Edges between groups of ops, and the order that they imply: which group runs before which, and which are on a cycle.

A group is known by its first op, its root; `roots` is (N,) int64, the root of each op.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.graphs.grouping import merging
from rlplace.graphs.opgraph import FORWARD, OpGraph
from rlplace.graphs.paths import depth_first_order
from rlplace.jit import Bools, Floats, Longs

PAIRED_ROUNDS = 64
"""Rounds of matching; more are left only where thousands of small groups hang on one."""


class Coarsening:
    """Groups of ops under construction; each is known by its first op, its root.

    `join_...` follow a rule, `merge_...` go by seconds, under caps and down to a number of groups.

    With `is_acyclic`, a merge that would close a cycle among the groups is undone. Edges from a parameter or buffer
    that lives with other ops do not count: it is there before the step, and lives with its update, which comes last.

    Ops of two micro-batches or shards, and those that all share, are only ever in one group as a co-location class:
    data parallelism deals out micro-batches, tensor parallelism shards.

    Args:
        graph: N ops.
        cost_s: (N,) float64.
        allowed: (N, D) bool, devices where each op may be; a group may be where all its ops may, at least one device.
        latency_s: seconds of a transfer of any size ...
        s_per_byte: ... and of each byte: an edge weighs the seconds of sending its tensors.
        cap_bytes: most bytes that stay on a group's device, for merges that are not of a class.
        is_acyclic: keep the graph of groups without cycles.
    """

    def __init__(
        self,
        graph: OpGraph,
        cost_s: Floats,
        allowed: Bools,
        *,
        latency_s: float,
        s_per_byte: float,
        cap_bytes: float = np.inf,
        is_acyclic: bool = False,
    ) -> None:
        self.graph, self.cap_bytes = graph, cap_bytes
        self._op_cost_s, self._op_allowed = cost_s, allowed
        kept = graph.parameter_bytes + graph.gradient_bytes + graph.state_bytes
        self._op_bytes = (kept + np.where(graph.phases == FORWARD, graph.output_bytes, 0)).astype(np.float64)
        self._latency_s, self._s_per_byte = latency_s, s_per_byte
        self._is_acyclic = is_acyclic
        self._parent = np.arange(graph.num_ops, dtype=np.int64)
        slices = (graph.micro_batch.astype(np.int64) + 1) * (graph.num_shards + 1) + graph.shard
        owned = np.where(graph.shard >= 0, -2 - graph.shard, -1)
        self._fence = np.where(graph.colocation >= 0, owned, slices).astype(np.int64)
        self._add_up()

    @property
    def total_s(self) -> float:
        """Cost of all ops, rounded up."""
        return float(self._op_cost_s.sum()) * (1 + 1e-9)

    @property
    def num_groups(self) -> int:
        """How many groups there are now."""
        return int(np.count_nonzero(self._parent == np.arange(len(self._parent))))

    def shares(self) -> Floats:
        """(N,) float64: part of all cost, plus part of all bytes, that the group of each root has."""
        total_s, total_bytes = max(self._cost_s.sum(), 1e-300), max(self._load_bytes.sum(), 1e-300)
        return np.asarray(self._cost_s / total_s + self._load_bytes / total_bytes)

    def roots(self) -> Longs:
        """(N,) int64: root of each op."""
        while True:
            grandparent = self._parent[self._parent]
            if np.array_equal(self._parent, grandparent):
                return self._parent.copy()
            self._parent = grandparent

    def op_group(self) -> NDArray[np.int32]:
        """(N,) int32: group of each op, numbered by first op."""
        return np.unique(self.roots(), return_inverse=True)[1].astype(np.int32)

    def edges(self) -> tuple[Longs, Longs, Floats]:
        """Edges between groups by (source, target): their roots, and the seconds that it takes to send their tensors.

        A tensor goes to a group once, however many of its ops read it.
        """
        return group_edges(self.graph, self.roots(), self._latency_s, self._s_per_byte)

    def merge(
        self,
        pairs: Pairs,
        weight_s: Floats | None = None,
        *,
        least_ratio: float = 0.0,
        cap_s: float = np.inf,
        num_groups: int = 1,
        growth: int = merging.FREELY,
        is_rule: bool = False,
    ) -> bool:
        """Merges pairs in order, until `num_groups` groups are left or, with `is_rule`, without this limit; False if
        some merges were undone to avoid a cycle."""
        before = self.roots()
        weight_s = np.zeros(len(pairs[0])) if weight_s is None else weight_s
        merging.merge_along(
            self._parent,
            self._cost_s,
            self._load_bytes,
            self._allowed,
            self._fence,
            pairs[0].astype(np.int64),
            pairs[1].astype(np.int64),
            weight_s,
            least_ratio,
            cap_s,
            self.cap_bytes,
            len(before) if is_rule else max(self.num_groups - num_groups, 0),
            growth,
        )
        return self._undo_cycles(before)

    def _tie(self, labels: Longs) -> None:
        """Merges the ops of each label >= 0, under no cap; a label has whole groups."""
        members = np.flatnonzero(labels >= 0)
        _, leader, inverse = np.unique(labels[members], return_index=True, return_inverse=True)
        self._parent[members] = members[leader][inverse]
        self._add_up()

    def _undo_cycles(self, before: Longs) -> bool:
        """Takes apart the groups on cycles as they were `before`, when there were none; False if there were any."""
        if not self._is_acyclic:
            return True
        roots = self.roots()
        component = components(self.graph, roots)
        is_root = roots == np.arange(len(roots))
        cyclic = np.bincount(component[is_root], minlength=int(component.max(initial=-1)) + 1)[component] > 1
        if not np.any(cyclic):
            return True
        self._parent = np.where(cyclic, before, roots)
        self._add_up()
        return False

    def _add_up(self) -> None:
        """Sets cost, bytes and devices of every group from its ops'."""
        roots, n = self.roots(), self.graph.num_ops
        self._cost_s = np.bincount(roots, weights=self._op_cost_s, minlength=n).astype(np.float64)
        self._load_bytes = np.bincount(roots, weights=self._op_bytes, minlength=n).astype(np.float64)
        self._allowed = self._op_allowed.copy()
        np.logical_and.at(self._allowed, roots, self._op_allowed)

    def join_classes(self) -> None:
        """Merges the ops of each co-location class, at any cost; where cycles matter, the ops between them too.

        Raises:
            InvalidValue: ops that must be together have no device in common.
        """
        self._tie(self.graph.colocation.astype(np.int64))
        if self._is_acyclic:
            self._tie(components(self.graph, self.roots()))
        lost = ~self._allowed[self.roots()].any(axis=1)
        if np.any(lost):
            op = int(np.argmax(lost))
            between = " and what is between them" if self._is_acyclic else ""
            raise InvalidValue(
                "allowed",
                f"no device for op {self.graph.names[op]!r} and what lives with it{between}",
                "a device where all of them may be",
                where="grouping",
                hint="Pins and exclusions contradict each other.",
            )

    def join_alike(self, labels: Longs) -> bool:
        """Merges groups of ops with one label >= 0, of one micro-batch, shard and devices, under the cap of bytes."""
        roots = self.roots()
        rules = np.concatenate((self._allowed[roots], self._fence[roots][:, None]), axis=1)
        rows = np.unique(rules, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
        members = np.flatnonzero(labels >= 0)
        keys = labels[members] * (int(rows.max(initial=0)) + 1) + rows[members]
        _, leader, inverse = np.unique(keys, return_index=True, return_inverse=True)
        return self.merge((members[leader][inverse], members), is_rule=True)

    def join_sources(self) -> None:
        """Merges each source without a class into its first reader; sources without a reader into one group."""
        graph = self.graph
        free = graph.is_source & (graph.colocation < 0)
        producer = graph.tensor_op[graph.input_tensors]
        edges = np.flatnonzero(free[producer])
        first = np.full(graph.num_ops, graph.num_ops, dtype=np.int64)
        np.minimum.at(first, producer[edges], graph.edge_op[edges])
        read = np.flatnonzero(first < graph.num_ops)
        self.merge((read, first[read]))
        self.join_alike(np.where(free & (first == graph.num_ops), 0, -1).astype(np.int64))

    def join_single_consumers(self) -> bool:
        """Merges every group into the only other group that reads it, to a fixpoint; False if a cycle kept some apart.

        The rule of Mirhoseini et al. 2017 (section 3.3, co-location groups), for groups in place of ops.
        """
        is_whole = True
        while True:
            source, target, _ = self.edges()
            nodes, start, count = np.unique(source, return_index=True, return_counts=True)
            single = np.flatnonzero(count == 1)[::-1]
            before = self.num_groups
            is_whole &= self.merge((nodes[single], target[start[single]]))
            if self.num_groups == before:
                return is_whole

    def merge_inseparable(self, least_ratio: float, cap_s: float, num_groups: int = 1) -> None:
        """Merges groups where sending takes `least_ratio` times as long as the cheaper of the two, to a fixpoint.

        The strongest such pair goes first, and a group grows once a round (a matching), until after many rounds small
        groups around large ones are left; no group passes `cap_s`.
        """
        rounds = 0
        while self.num_groups > num_groups:
            first, second, weight_s = self._candidates()
            cheaper_s = np.minimum(self._cost_s[first], self._cost_s[second])
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.where(cheaper_s > 0, weight_s / cheaper_s, np.inf)
            strong = np.flatnonzero(ratio >= least_ratio)
            strong = strong[np.lexsort((strong, -weight_s[strong], -ratio[strong]))]
            before = self.num_groups
            self.merge(
                (first[strong], second[strong]),
                weight_s[strong],
                least_ratio=least_ratio,
                cap_s=cap_s,
                num_groups=num_groups,
                growth=merging.PAIRWISE if rounds < PAIRED_ROUNDS else merging.BY_HUBS,
            )
            if self.num_groups == before:
                return
            rounds += 1

    def merge_heavy_edges(self, cap_s: float, num_groups: int) -> bool:
        """Merges along edges, heaviest first, while no group passes the caps and more than `num_groups` are left."""
        first, second, weight_s = self._candidates()
        order = np.argsort(-weight_s, kind="stable")
        before = self.num_groups
        self.merge(
            (first[order], second[order]),
            weight_s[order],
            cap_s=cap_s,
            num_groups=num_groups,
            growth=merging.PAIRWISE if self._is_acyclic else merging.FREELY,
        )
        return self.num_groups < before

    def merge_leftovers(self, num_groups: int) -> None:
        """Merges groups whether or not an edge joins them, until `num_groups` are left.

        The two cheapest first; where cycles matter, neighbours in a topological order instead.
        """
        if self._is_acyclic:
            self._merge_neighbours(num_groups)
            return
        roots = np.unique(self.roots())
        for side in np.unique(self._fence[roots]):  # every side of a fence is left with its part of the groups
            own = roots[self._fence[roots] == side]
            wanted = -(-num_groups * len(own) // len(roots))
            merging.merge_cheapest(
                self._parent,
                self._cost_s,
                self._load_bytes,
                self._allowed,
                own,
                self.cap_bytes,
                max(len(own) - wanted, 0),
            )

    def lightest_pair_s(self) -> float:
        """Least cost of two groups that an edge joins; the total where there is no edge."""
        first, second, _ = self._candidates()
        return float((self._cost_s[first] + self._cost_s[second]).min(initial=self.total_s))

    def _candidates(self) -> tuple[Longs, Longs, Floats]:
        """Pairs of groups that an edge joins, and its seconds in both directions together.

        Where cycles matter, only pairs one top level apart, as merging one of them closes no cycle (Herrmann et al.
        2019, "Multilevel Algorithms for Acyclic Partitioning of Directed Acyclic Graphs").
        """
        source, target, weight_s = self.edges()
        if self._is_acyclic:
            _, level = topological_order(self.graph, self.roots())
            near = level[target] - level[source] == 1
            source, target, weight_s = source[near], target[near], weight_s[near]
        n = max(self.graph.num_ops, 1)
        pairs, inverse = np.unique(np.minimum(source, target) * n + np.maximum(source, target), return_inverse=True)
        return pairs // n, pairs % n, np.bincount(inverse, weights=weight_s, minlength=len(pairs)).astype(np.float64)

    def _merge_neighbours(self, num_groups: int) -> None:
        cap_s = 2 * self.total_s / num_groups
        while self.num_groups > num_groups:
            order, _ = topological_order(self.graph, self.roots())
            before = self.num_groups
            self.merge((order[:-1], order[1:]), cap_s=cap_s, num_groups=num_groups, growth=merging.PAIRWISE)
            if self.num_groups == before:
                if cap_s >= self.total_s:
                    return
                cap_s *= 2


Pairs = tuple[Longs, Longs]


def group_edges(graph: OpGraph, roots: Longs, latency_s: float, s_per_byte: float) -> tuple[Longs, Longs, Floats]:
    """Edges by (source, target): the roots of two groups, and the seconds that it takes to send their tensors.

    A tensor goes to a group once, however many of its ops read it.

    Args:
        graph: N ops.
        roots: (N,) of each op.
        latency_s: seconds of a transfer of any size ...
        s_per_byte: ... and of each byte.
    """
    n = graph.num_ops
    tensor, reader = np.divmod(distinct(graph.input_tensors.astype(np.int64) * n + roots[graph.edge_op]), max(n, 1))
    producer = roots[graph.tensor_op[tensor]]
    outside = producer != reader
    pairs, inverse = np.unique(producer[outside] * n + reader[outside], return_inverse=True)
    send_s = latency_s + graph.tensor_bytes[tensor[outside]] * s_per_byte
    weight_s = np.bincount(inverse, weights=send_s, minlength=len(pairs))
    return pairs // max(n, 1), pairs % max(n, 1), weight_s.astype(np.float64)


def distinct(keys: Longs) -> Longs:
    """The distinct values of `keys`, ascending: NumPy 2.4 hashes large numbers first, which takes fifty times as long.

    >>> distinct(np.array([7, 3, 7]))
    array([3, 7])
    """
    ordered: Longs = np.sort(keys)
    is_new = np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]
    return ordered.compress(is_new)


def order_edges(graph: OpGraph, roots: Longs) -> Pairs:
    """Distinct edges between groups that say which of two runs first, by (source, target).

    Edges from a parameter or buffer that lives with other ops do not count: it is there before the step.
    """
    n = max(graph.num_ops, 1)
    producer = graph.tensor_op[graph.input_tensors]
    counts = ~(graph.is_resident & (graph.colocation >= 0))[producer]
    source, target = roots[producer[counts]], roots[graph.edge_op[counts]]
    outside = source != target
    pairs = distinct(source[outside] * n + target[outside])
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
    return np.asarray(connected_components(adjacency, connection="strong")[1], dtype=np.int64)[roots]
