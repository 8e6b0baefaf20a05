"""`Grouping`: sets of ops that move together, and the rules that make them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.graphs.coarsen import Coarsening
from rlplace.graphs.opgraph import OpGraph

CAP_SLACK = 1.5
"""A group may cost this many times an even share before the cap has to be relaxed."""
CAP_GROWTH = 1.25
"""Factor by which the cap is relaxed when nothing more can be merged under it."""


@dataclass(frozen=True)
class Grouping:
    """Maps N ops to G groups; every group has at least one op.

    Attributes:
        op_group: (N,) int32, group of each op, in 0..G-1.
        rule: what made it, e.g. `heavy-edge:256`.
    """

    op_group: NDArray[np.int32]
    rule: str = ""

    def __post_init__(self) -> None:
        op_group = np.ascontiguousarray(self.op_group, dtype=np.int32)
        op_group.flags.writeable = False
        object.__setattr__(self, "op_group", op_group)
        if len(op_group) and (op_group.min() < 0 or len(np.unique(op_group)) != op_group.max() + 1):
            raise InvalidValue(
                "op_group", "gaps or negative groups", "groups numbered 0..G-1 without gaps", where="grouping"
            )

    @cached_property
    def num_groups(self) -> int:
        return int(self.op_group.max()) + 1 if len(self.op_group) else 0

    def expand(self, group_devices: NDArray[np.int32]) -> NDArray[np.int32]:
        """Devices of ops (..., N) from devices of groups (..., G)."""
        return np.ascontiguousarray(np.asarray(group_devices, dtype=np.int32)[..., self.op_group])


def group_ops(graph: OpGraph, cost_s: NDArray[np.float64], num_groups: int = 256) -> Grouping:
    """At most `num_groups` groups, numbered by their first op; the same graph and costs give the same groups.

    1. Ops of one co-location class are one group.
    2. A source (parameter, input, constant) without a class joins its first reader.
    3. A group whose outputs are read by one other group joins it, to a fixpoint.
    4. The groups joined by the most bytes are merged first, until `num_groups` are left (heavy-edge coarsening,
       Karypis and Kumar 1998, over all edges in order of weight instead of a matching).

    Rules 3 and 4 keep a group's cost under a cap of 1.5 even shares (total cost / `num_groups`); a class may exceed it
    by itself. Where no edge can be merged under the cap and too many groups are left, the cap grows by a quarter; where
    no edge is left at all, the two cheapest groups are merged.

    Args:
        graph: N ops.
        cost_s: (N,) float64, seconds of each op (the mean over devices, say).
        num_groups: most groups to return, >= 1.

    Raises:
        InvalidValue: `cost_s` has another length or a negative entry, or `num_groups` is less than 1.
    """
    cost_s = np.asarray(cost_s, dtype=np.float64)
    if cost_s.shape != (graph.num_ops,):
        raise InvalidValue("cost_s", cost_s.shape, f"shape {(graph.num_ops,)}", where="group_ops")
    if not np.all(np.isfinite(cost_s)) or np.any(cost_s < 0):
        raise InvalidValue("cost_s", "a negative or non-finite entry", "finite seconds >= 0", where="group_ops")
    if num_groups < 1:
        raise InvalidValue("num_groups", num_groups, "at least 1", where="group_ops")

    groups = Coarsening(graph, cost_s)
    groups.join_classes()
    groups.join_sources()
    cap_s = CAP_SLACK * float(cost_s.sum()) / num_groups
    groups.join_single_consumers(cap_s)
    while groups.num_groups > num_groups:
        merged = groups.merge_heavy_edges(cap_s, num_groups)
        if not merged and cap_s >= groups.total_s:
            groups.merge_cheapest(num_groups)
        elif not merged:
            cap_s = max(cap_s * CAP_GROWTH, groups.lightest_pair_s())
    return Grouping(groups.op_group(), rule=f"heavy-edge:{num_groups}")
