"""`GroupLayout`: a problem and a grouping as the arrays that groups are scheduled over."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.grouping.groups import Grouping
from rlplace.graphs.opgraph import BACKWARD
from rlplace.jit import Bools, Floats, Ints, Longs, kernel
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.ranks import list_order
from rlplace.search.groups import allowed_devices
from rlplace.search.improve.moves import main_modules
from rlplace.search.improve.warm_starts import held_bytes, room_bytes
from rlplace.search.schedule.eft import device_rules


class GroupLayout(NamedTuple):
    """N ops, T tensors, E edges and G groups on D devices.

    Attributes:
        op_group: (N,) int32.
        order: (J,) int64, ops that are not sources, each after what it reads.
        tensor_op: (T,) int32, producers.
        tensor_bytes: (T,) float64.
        input_offsets: (N + 1,) int32.
        input_tensors: (E,) int32.
        op_time_s: (N, D) float64.
        latency_s, s_per_byte: (D, D) float64, of each route.
        blocks: (D, D) bool, where a copy from a device keeps the other busy.
        occupies: (D, D) bool, which devices a device keeps busy.
        allowed: (G, D) bool.
        group_time_s: (G, D) float64, summed over ops.
        held: (G,) float64, bytes that a group keeps where it is.
        room: (D,) float64, bytes.
        joined_offsets: (G + 1,) int32, CSR over groups: the groups that each reads, or that read it.
        joined_group: int32, those groups.
        joined_bytes: float64, what goes between the two; a tensor once.
        joined_is_in: bool, whether the group reads it.
        module: (G,) int64, the module that most of a group's time is in.
        is_backward: (G,) bool, whether most of a group's time is in the backward pass or the update.
        unit_s: mean seconds of a group.
        share_s: an even share of the mean time of all groups, one of D; the unit of loads.
    """

    op_group: Ints
    order: Longs
    tensor_op: Ints
    tensor_bytes: Floats
    input_offsets: Ints
    input_tensors: Ints
    op_time_s: Floats
    latency_s: Floats
    s_per_byte: Floats
    blocks: Bools
    occupies: Bools
    allowed: Bools
    group_time_s: Floats
    held: Floats
    room: Floats
    joined_offsets: Ints
    joined_group: Ints
    joined_bytes: Floats
    joined_is_in: Bools
    module: Longs
    is_backward: Bools
    unit_s: float
    share_s: float


def group_layout(problem: Problem, grouping: Grouping) -> GroupLayout:
    """The arrays of `problem` with the groups of `grouping`."""
    graph, host, op_group = problem.graph, problem.host, grouping.op_group
    blocks, occupies = device_rules(host)
    group_time_s = np.zeros((grouping.num_groups, host.num_devices))
    np.add.at(group_time_s, op_group, problem.costs.op_time_s)
    phase_s = np.zeros((grouping.num_groups, 2))
    np.add.at(phase_s, (op_group, (graph.phases >= BACKWARD).astype(np.int64)), problem.costs.op_time_s.mean(axis=1))
    offsets, joined, num_bytes, is_in = _joined(problem, grouping)
    order = list_order(problem)
    unit_s, share_s = _scales(group_time_s)
    return GroupLayout(
        op_group=op_group,
        order=order[~graph.is_source[order]],
        tensor_op=graph.tensor_op,
        tensor_bytes=graph.tensor_bytes.astype(np.float64),
        input_offsets=graph.input_offsets,
        input_tensors=graph.input_tensors,
        op_time_s=problem.costs.op_time_s,
        latency_s=problem.transfer_latency_s,
        s_per_byte=problem.transfer_s_per_byte,
        blocks=blocks,
        occupies=occupies,
        allowed=allowed_devices(problem, grouping),
        group_time_s=group_time_s,
        held=held_bytes(problem, grouping),
        room=room_bytes(problem),
        joined_offsets=offsets,
        joined_group=joined,
        joined_bytes=num_bytes,
        joined_is_in=is_in,
        module=main_modules(problem, grouping),
        is_backward=phase_s[:, 1] > phase_s[:, 0],
        unit_s=unit_s,
        share_s=share_s,
    )


@kernel
def _scales(group_time_s: Floats) -> tuple[float, float]:
    num_groups, num_devices = group_time_s.shape
    total_s = group_time_s.sum()
    return max(total_s / max(num_groups * num_devices, 1), 1e-30), max(total_s / num_devices / num_devices, 1e-30)


def _joined(problem: Problem, grouping: Grouping) -> tuple[Ints, Ints, Floats, NDArray[np.bool_]]:
    """CSR over groups: each group it reads or that reads it, bytes (a tensor once a reading group), and which."""
    graph, op_group = problem.graph, grouping.op_group
    source, reader = op_group[graph.tensor_op[graph.input_tensors]], op_group[graph.edge_op]
    tensors = np.unique(np.stack((graph.input_tensors, reader), axis=1)[source != reader], axis=0)
    producer, reader = op_group[graph.tensor_op[tensors[:, 0]]].astype(np.int64), tensors[:, 1].astype(np.int64)
    keys, place = np.unique(producer * grouping.num_groups + reader, return_inverse=True)
    num_bytes = np.zeros(len(keys))
    np.add.at(num_bytes, place, graph.tensor_bytes[tensors[:, 0]])
    a, b = keys // max(grouping.num_groups, 1), keys % max(grouping.num_groups, 1)
    this, other = np.concatenate((b, a)), np.concatenate((a, b))
    is_in = np.arange(2 * len(keys)) < len(keys)
    order = np.lexsort((other, this))
    offsets = np.searchsorted(this[order], np.arange(grouping.num_groups + 1)).astype(np.int32)
    return offsets, other[order].astype(np.int32), np.concatenate((num_bytes, num_bytes))[order], is_in[order]
