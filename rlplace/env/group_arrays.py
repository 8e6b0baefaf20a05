"""`GroupArrays`: a problem in terms of its groups, as arrays in SI units."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.env.features import group_edges
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.ranks import list_order
from rlplace.search.improve.warm_starts import held_bytes, room_bytes
from rlplace.search.schedule.eft import device_rules

FloatArray = NDArray[np.float64]
LongArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class GroupArrays:
    """G groups, K edges between them, and D devices.

    Attributes:
        cost_s: (G, D) seconds of all ops of each group on each device.
        held_bytes: (G,) bytes that each group keeps where it is.
        room_bytes: (D,) bytes of each device.
        allowed: (G, D) bool, devices where each group may be.
        edge_source, edge_target: (K,) int64, groups of each edge, by source, then target.
        edge_bytes: (K,) bytes that go over each edge where its ends are on different devices.
        edge_tensors: (K,) tensors that do.
        latency_s: (D, D) of each route, 0 on the diagonal.
        s_per_byte: (D, D) of each route, 0 on the diagonal.
        occupies: (D, D) bool, the devices that each device keeps busy: itself, and a gang its members.
        order: (G,) int64, groups by their first op in list order; groups of sources alone come last.
        unit_s: the mean cost of a group on a device.
        share_s: the mean cost of all groups, over D: what each device has to do where all have the same.
    """

    cost_s: FloatArray
    held_bytes: FloatArray
    room_bytes: FloatArray
    allowed: NDArray[np.bool_]
    edge_source: LongArray
    edge_target: LongArray
    edge_bytes: FloatArray
    edge_tensors: FloatArray
    latency_s: FloatArray
    s_per_byte: FloatArray
    occupies: NDArray[np.bool_]
    order: LongArray
    unit_s: float
    share_s: float

    @classmethod
    def of(cls, problem: Problem) -> GroupArrays:
        """Those of the problem's own grouping."""
        grouping = problem.grouping
        cost_s = np.zeros((grouping.num_groups, problem.host.num_devices))
        np.add.at(cost_s, grouping.op_group, problem.costs.op_time_s)
        source, target, edge_bytes, edge_tensors = group_edges(problem)
        return cls(
            cost_s=cost_s,
            held_bytes=held_bytes(problem, grouping),
            room_bytes=room_bytes(problem),
            allowed=problem.group_allowed,
            edge_source=source,
            edge_target=target,
            edge_bytes=edge_bytes,
            edge_tensors=edge_tensors,
            latency_s=problem.transfer_latency_s,
            s_per_byte=problem.transfer_s_per_byte,
            occupies=device_rules(problem.host)[1],
            order=_group_order(problem),
            unit_s=float(cost_s.mean()) or 1.0,
            share_s=float(cost_s.mean(axis=1).sum()) / problem.host.num_devices or 1.0,
        )

    @property
    def num_groups(self) -> int:
        return len(self.cost_s)

    @property
    def num_devices(self) -> int:
        return int(self.cost_s.shape[1])

    def edge_s(self) -> FloatArray:
        """(K,) seconds that each edge takes on the mean route; 0 on a host of one device."""
        pairs = max(self.num_devices * (self.num_devices - 1), 1)
        latency_s, s_per_byte = float(self.latency_s.sum()) / pairs, float(self.s_per_byte.sum()) / pairs
        return self.edge_tensors * latency_s + self.edge_bytes * s_per_byte


def _group_order(problem: Problem) -> LongArray:
    graph, grouping = problem.graph, problem.grouping
    place = np.empty(graph.num_ops, dtype=np.int64)
    place[list_order(problem)] = np.arange(graph.num_ops)
    place += np.where(graph.is_source, graph.num_ops, 0)  # sources are there from the start, wherever they are listed
    first = np.full(grouping.num_groups, 2 * graph.num_ops)
    np.minimum.at(first, grouping.op_group, place)
    return np.argsort(first, kind="stable").astype(np.int64)
