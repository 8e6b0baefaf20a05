"""`MergedGroups`: groups of ops that grow by merging, as a union-find over an `OpGraph`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.grouping import merging
from rlplace.graphs.grouping.group_edges import Pairs, components, group_edges
from rlplace.graphs.opgraph import FORWARD, OpGraph
from rlplace.jit import Bools, Floats, Longs


class MergedGroups:
    """Groups of ops under construction; each is known by its first op, its root.

    With `is_acyclic`, a merge that would close a cycle among the groups is undone. What a parameter or buffer that
    lives with other ops feeds does not count: it is there before the step, and lives with its update, which comes last.

    Ops of two micro-batches, and those that all share, are only ever in one group as a co-location class: micro-batches
    are what data parallelism deals out.

    Args:
        graph: N ops.
        cost_s: (N,) float64.
        allowed: (N, D) bool, devices where each op may be; a group may be where all its ops may, at least one device.
        latency_s: seconds of a transfer, whatever its size ...
        s_per_byte: ... and of each byte: an edge weighs what it takes to send its tensors.
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
        self.graph = graph
        self.cap_bytes = cap_bytes
        self._op_cost_s, self._op_allowed = cost_s, allowed
        kept = graph.parameter_bytes + graph.gradient_bytes + graph.state_bytes
        self._op_bytes = (kept + np.where(graph.phases == FORWARD, graph.output_bytes, 0)).astype(np.float64)
        self._latency_s, self._s_per_byte = latency_s, s_per_byte
        self._is_acyclic = is_acyclic
        self._parent = np.arange(graph.num_ops, dtype=np.int64)
        self._fence = np.where(graph.colocation >= 0, -1, graph.micro_batch).astype(np.int64)
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

    def allowed(self) -> Bools:
        """(N, D) bool: devices where the group of each op may be."""
        return self._allowed[self.roots()]

    def edges(self) -> tuple[Longs, Longs, Floats]:
        """Edges between groups by (source, target): their roots, and the seconds that it takes to send their tensors.

        A tensor goes to a group once, however many of its ops read it.
        """
        return group_edges(self.graph, self.roots(), self._latency_s, self._s_per_byte)

    def _merge(
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
        """Merges pairs in order; False if some were undone to avoid a cycle."""
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
        """Merges the ops of each label >= 0, come what may."""
        members = np.flatnonzero(labels >= 0)
        _, leader, inverse = np.unique(labels[members], return_index=True, return_inverse=True)
        anywhere = np.ones((len(labels), 1), dtype=np.bool_)
        merging.merge_along(
            self._parent,
            self._cost_s,
            self._load_bytes,
            anywhere,
            np.zeros_like(self._fence),
            members[leader][inverse],
            members,
            np.zeros(len(members)),
            0.0,
            np.inf,
            np.inf,
            len(members),
            merging.FREELY,
        )
        self._add_up()

    def _undo_cycles(self, before: Longs) -> bool:
        """Takes apart the groups on cycles as they were `before`, when there were none; False if there were any."""
        if not self._is_acyclic:
            return True
        roots = self.roots()
        component = components(self.graph, self.roots())
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
