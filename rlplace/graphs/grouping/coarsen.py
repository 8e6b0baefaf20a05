"""`Coarsening`: the rules and rounds by which groups of ops are merged."""

from __future__ import annotations

import numpy as np

from rlplace.errors import InvalidValue
from rlplace.graphs.grouping import merging
from rlplace.graphs.grouping.group_edges import Pairs, components, topological_order
from rlplace.graphs.grouping.merged_groups import MergedGroups
from rlplace.jit import Floats, Longs

PAIRED_ROUNDS = 64
"""Rounds of matching; more are left only where thousands of small groups hang on one."""


class Coarsening(MergedGroups):
    """Groups of ops under construction: what belongs together is joined, what is dear to keep apart is merged.

    `join_...` follow a rule, `merge_...` go by seconds, under caps and down to a number of groups.
    """

    def join_classes(self) -> None:
        """Merges the ops of each co-location class, whatever they cost; where cycles matter, what is between them too.

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
        """Merges groups of ops with one label >= 0, of one micro-batch and the same devices, under the cap of bytes."""
        roots = self.roots()
        rules = np.concatenate((self._allowed[roots], self._fence[roots][:, None]), axis=1)
        rows = np.unique(rules, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
        members = np.flatnonzero(labels >= 0)
        keys = labels[members] * (int(rows.max(initial=0)) + 1) + rows[members]
        _, leader, inverse = np.unique(keys, return_index=True, return_inverse=True)
        return self._merge((members[leader][inverse], members), is_rule=True)

    def join_pairs(self, pairs: Pairs) -> bool:
        """Merges each pair of ops that may share a device; False if a cycle kept some apart."""
        return self._merge(pairs, is_rule=True)

    def join_sources(self) -> None:
        """Merges each source without a class into its first reader; those that nobody reads into one group."""
        graph = self.graph
        free = graph.is_source & (graph.colocation < 0)
        producer = graph.tensor_op[graph.input_tensors]
        edges = np.flatnonzero(free[producer])
        first = np.full(graph.num_ops, graph.num_ops, dtype=np.int64)
        np.minimum.at(first, producer[edges], graph.edge_op[edges])
        read = np.flatnonzero(first < graph.num_ops)
        self._merge((read, first[read]))
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
            is_whole &= self._merge((nodes[single], target[start[single]]))
            if self.num_groups == before:
                return is_whole

    def merge_inseparable(self, least_ratio: float, cap_s: float, num_groups: int = 1) -> None:
        """Merges groups where sending takes `least_ratio` times as long as the cheaper of the two, to a fixpoint.

        The strongest such pair goes first, and a group grows once a round (a matching), until after many rounds what is
        left are small groups around large ones; no group passes `cap_s`.
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
            self._merge(
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
        self._merge(
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
        sides, side = np.unique(self._fence[roots], return_inverse=True)
        for number in range(len(sides)):  # every side of a fence is left with its part of the groups
            own = roots[side == number]
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
            self._merge((order[:-1], order[1:]), cap_s=cap_s, num_groups=num_groups, growth=merging.PAIRWISE)
            if self.num_groups == before:
                if cap_s >= self.total_s:
                    return
                cap_s *= 2
