"""`Greedy`: a list scheduler over groups that weighs several features of a device; one placement for every weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.grouping.groups import Grouping
from rlplace.graphs.opgraph import BACKWARD
from rlplace.jit import Floats, Ints, Longs, inlined, kernel
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.ranks import list_order
from rlplace.search.groups import allowed_devices
from rlplace.search.improve.moves import main_modules
from rlplace.search.improve.warm_starts import held_bytes, room_bytes
from rlplace.search.schedule.eft import device_rules

FEATURES = ("finish", "cost", "load", "cut_in", "cut_out", "memory", "twin", "module", "order")
"""What a device costs a group, each in mean costs of a group unless it says otherwise:

- `finish`: when the group's first op would end there, copies included, after the earliest end on any device;
- `cost`: the group's time there;
- `load`: time of all that is there, the group included, over the mean load that devices end up with (no unit);
- `cut_in`, `cut_out`: seconds that tensors take from placed groups that the group reads, and to those that read it;
- `memory`: fullness, bytes held over room, the group included (no unit);
- `twin`: the share of the time of its module's other phase (the backward twin) that is placed elsewhere;
- `module`: the same for its own phase;
- `order`: 1 unless the group decided just before is there.
"""


@dataclass(frozen=True, eq=False)
class Greedy:
    """A problem and a grouping laid out for the scheduler."""

    grouping: Grouping
    order: Longs
    is_source: NDArray[np.bool_]
    tensor_op: Ints
    tensor_bytes: Floats
    input_offsets: Ints
    input_tensors: Ints
    op_time_s: Floats
    latency_s: Floats
    s_per_byte: Floats
    blocks: NDArray[np.bool_]
    occupies: NDArray[np.bool_]
    allowed: NDArray[np.bool_]
    group_time_s: Floats
    held: Floats
    room: Floats
    joined_offsets: Ints
    joined_group: Ints
    joined_bytes: Floats
    joined_is_in: NDArray[np.bool_]
    module: Longs
    is_backward: NDArray[np.bool_]

    @classmethod
    def of(cls, problem: Problem, grouping: Grouping | None = None) -> Greedy:
        """The scheduler of `grouping`'s groups; of the problem's own by default."""
        grouping = problem.grouping if grouping is None else grouping
        graph, host, op_group = problem.graph, problem.host, grouping.op_group
        num_groups, num_devices = grouping.num_groups, host.num_devices
        blocks, occupies = device_rules(host)
        group_time_s = np.zeros((num_groups, num_devices))
        np.add.at(group_time_s, op_group, problem.costs.op_time_s)
        phase_s = np.zeros((num_groups, 2))
        np.add.at(
            phase_s, (op_group, (graph.phases >= BACKWARD).astype(np.int64)), problem.costs.op_time_s.mean(axis=1)
        )
        offsets, joined, num_bytes, is_in = _joined(problem, grouping)
        return cls(
            grouping=grouping,
            order=list_order(problem),
            is_source=graph.is_source,
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
        )

    def place(self, weights: NDArray[np.float64]) -> NDArray[np.int32]:
        """(B, G) int32 devices of groups, one row for each row of weights (B, 9) of `FEATURES`.

        Ops are taken in the order of the problem. The first op of a group decides for the group: it goes where the
        weighted sum of features is least (ties: the first such device). Its other ops follow.
        """
        weights = np.atleast_2d(np.asarray(weights, dtype=np.float64))
        placed = np.empty((len(weights), self.grouping.num_groups), dtype=np.int32)
        for row in range(len(weights)):
            _place(
                placed[row],
                weights[row],
                self.grouping.op_group,
                self.order,
                self.is_source,
                self.tensor_op,
                self.tensor_bytes,
                self.input_offsets,
                self.input_tensors,
                self.op_time_s,
                self.latency_s,
                self.s_per_byte,
                self.blocks,
                self.occupies,
                self.allowed,
                self.group_time_s,
                self.held,
                self.room,
                self.joined_offsets,
                self.joined_group,
                self.joined_bytes,
                self.joined_is_in,
                self.module,
                self.is_backward,
            )
        return placed


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


@kernel
def _place(
    placed: Ints,
    weights: Floats,
    op_group: Ints,
    order: Longs,
    is_source: NDArray[np.bool_],
    tensor_op: Ints,
    tensor_bytes: Floats,
    input_offsets: Ints,
    input_tensors: Ints,
    op_time_s: Floats,
    latency_s: Floats,
    s_per_byte: Floats,
    blocks: NDArray[np.bool_],
    occupies: NDArray[np.bool_],
    allowed: NDArray[np.bool_],
    group_time_s: Floats,
    held: Floats,
    room: Floats,
    joined_offsets: Ints,
    joined_group: Ints,
    joined_bytes: Floats,
    joined_is_in: NDArray[np.bool_],
    module: Longs,
    is_backward: NDArray[np.bool_],
) -> None:
    num_groups, num_devices = group_time_s.shape
    placed[:] = -1
    unit_s = max(group_time_s.sum() / (num_groups * num_devices), 1e-30)
    share_s = max(group_time_s.sum() / num_devices / num_devices, 1e-30)
    ready_s = np.full((len(tensor_op), num_devices), -1.0)  # when a copy is there, -1 where there is none
    end_s = np.zeros(len(order))
    free_s, load_s, used = np.zeros(num_devices), np.zeros(num_devices), np.zeros(num_devices)
    module_s = np.zeros((module.max() + 1, 2, num_devices))
    end, cut = np.zeros(num_devices), np.zeros((2, num_devices))
    latest = -1
    for position in range(len(order) + num_groups):
        op = order[position] if position < len(order) else -1
        if op >= 0 and is_source[op]:
            continue
        # after the last op come groups of sources that no op decided for
        group = op_group[op] if op >= 0 else position - len(order)
        device = placed[group]
        if op < 0 and device >= 0:
            continue
        if op >= 0:
            for d in range(num_devices):
                if d == device or (device < 0 and allowed[group, d]):
                    end[d] = _end(
                        op,
                        d,
                        op_group,
                        placed,
                        tensor_op,
                        tensor_bytes,
                        input_offsets,
                        input_tensors,
                        op_time_s,
                        latency_s,
                        s_per_byte,
                        blocks,
                        occupies,
                        free_s,
                        ready_s,
                        end_s,
                    )
        if device < 0:
            earliest = np.inf
            for d in range(num_devices):
                if allowed[group, d]:
                    earliest = min(earliest, end[d])
            cut[:] = 0.0
            for edge in range(joined_offsets[group], joined_offsets[group + 1]):
                home = placed[joined_group[edge]]
                if home >= 0:
                    for d in range(num_devices):
                        if d != home and joined_is_in[edge]:
                            cut[0, d] += latency_s[home, d] + joined_bytes[edge] * s_per_byte[home, d]
                        elif d != home:
                            cut[1, d] += latency_s[d, home] + joined_bytes[edge] * s_per_byte[d, home]
            phase = int(is_backward[group])
            own, twin = module_s[module[group], phase], module_s[module[group], 1 - phase]
            own_s, twin_s = own.sum(), twin.sum()
            least = np.inf
            for d in range(num_devices):
                if not allowed[group, d]:
                    continue
                there = 0.0
                for other in range(num_devices):
                    if occupies[d, other]:
                        there = max(there, load_s[other])
                value = (
                    weights[0] * (end[d] - earliest) / unit_s
                    + weights[1] * group_time_s[group, d] / unit_s
                    + weights[2] * (there + group_time_s[group, d]) / share_s
                    + weights[3] * cut[0, d] / unit_s
                    + weights[4] * cut[1, d] / unit_s
                    + weights[5] * (used[d] + held[group]) / room[d]
                )
                if twin_s > 0.0:
                    value += weights[6] * (1.0 - twin[d] / twin_s)
                if own_s > 0.0:
                    value += weights[7] * (1.0 - own[d] / own_s)
                if latest >= 0 and d != latest:
                    value += weights[8]
                if value < least:
                    least, device = value, d
            if device < 0:  # weights that are no numbers
                device = int(np.argmax(allowed[group]))
            placed[group] = latest = device
            used[device] += held[group]
            own[device] += group_time_s[group].mean()
            for other in range(num_devices):
                if occupies[device, other]:
                    load_s[other] += group_time_s[group, device]
        if op >= 0:
            end_s[op] = end[device]
            for other in range(num_devices):
                if occupies[device, other]:
                    free_s[other] = end[device]
            for edge in range(input_offsets[op], input_offsets[op + 1]):
                tensor = input_tensors[edge]
                home = placed[op_group[tensor_op[tensor]]]
                if home >= 0 and home != device and ready_s[tensor, device] < 0.0:
                    transfer_s = latency_s[home, device] + tensor_bytes[tensor] * s_per_byte[home, device]
                    ready_s[tensor, device] = end_s[tensor_op[tensor]] + transfer_s


@inlined
def _end(
    op: int,
    device: int,
    op_group: Ints,
    placed: Ints,
    tensor_op: Ints,
    tensor_bytes: Floats,
    input_offsets: Ints,
    input_tensors: Ints,
    op_time_s: Floats,
    latency_s: Floats,
    s_per_byte: Floats,
    blocks: NDArray[np.bool_],
    occupies: NDArray[np.bool_],
    free_s: Floats,
    ready_s: Floats,
    end_s: Floats,
) -> float:
    """When `op` would end on `device`, after its inputs are there and the device is free."""
    start, busy = 0.0, 0.0
    for other in range(len(free_s)):
        if occupies[device, other] or occupies[other, device]:
            start = max(start, free_s[other])
    for edge in range(input_offsets[op], input_offsets[op + 1]):
        tensor = input_tensors[edge]
        producer = tensor_op[tensor]
        home = placed[op_group[producer]]
        if home < 0 or home == device:
            start = max(start, end_s[producer])
        elif ready_s[tensor, device] >= 0.0:
            start = max(start, ready_s[tensor, device])
        else:
            cost = latency_s[home, device] + tensor_bytes[tensor] * s_per_byte[home, device]
            if blocks[home, device]:
                busy += cost
                cost = 0.0
            start = max(start, end_s[producer] + cost)
    end: float = start + busy + op_time_s[op, device]
    return end
