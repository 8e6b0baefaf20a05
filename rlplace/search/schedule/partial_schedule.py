"""The schedule that grows while groups are placed one after the other: one at a time, or many episodes in step.

Ops are list-scheduled in the order of the problem. A pointer goes over them while their groups are decided, and stops
at the first op whose group is not. Where groups are decided in another order the pointer waits, then goes further at
once: the finished schedule depends on the placement alone.

`ScheduleBounds`: what is known of every schedule of a problem's groups before it begins.

`GroupLayout`: a problem and a grouping as the arrays that groups are scheduled over.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import UnknownName
from rlplace.graphs.grouping.groups import Grouping
from rlplace.graphs.opgraph import BACKWARD
from rlplace.graphs.paths import longest_after, longest_before
from rlplace.jit import Bools, Floats, Ints, Longs, inlined, kernel
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.compiled_problem import account_names, list_order, upward_ranks
from rlplace.search.groupings import allowed_devices, held_bytes, main_labels, main_modules, room_bytes
from rlplace.search.schedule.eft import device_rules
from rlplace.search.schedule.units import resident_bytes


class Decided(NamedTuple):
    """What one schedule knows of the groups decided so far and of the ops that ran.

    Attributes:
        placed: (G,) int32, -1 undecided.
        home: (G,) int32, where a group is as ops see it: -1 until the first of its ops is scheduled. Sources that are
            read before that are where their reader is.
        there_s: (T, D) float64, when a copy of a tensor is on a device; -1 where there is none.
        end_s: (N,) float64.
        free_s: (D,) float64, when a device is free again.
        load_s: (D,) float64, time of the groups decided for a device.
        used: (D,) float64, bytes of the groups decided for a device.
        module_s: (M, 2, D) float64, mean time of decided groups by module, phase and device.
        latest_end_s: (D,) float64, when the first op of the group decided last, or an op that ran after it, would end
            or ended on a device: what is said of groups of sources. Kept where there are any.
    """

    placed: Ints
    home: Ints
    there_s: Floats
    end_s: Floats
    free_s: Floats
    load_s: Floats
    used: Floats
    module_s: Floats
    latest_end_s: Floats


@inlined
def end_on(g: GroupLayout, s: Decided, op: int, device: int) -> float:
    """When `op` would end on `device`, after its inputs are there and the device is free."""
    start, busy = 0.0, 0.0
    for other in range(len(s.free_s)):
        if g.occupies[device, other] or g.occupies[other, device]:
            start = max(start, s.free_s[other])
    for edge in range(g.input_offsets[op], g.input_offsets[op + 1]):
        tensor = g.input_tensors[edge]
        producer = g.tensor_op[tensor]
        source = s.home[g.op_group[producer]]
        if source < 0 or source == device:
            start = max(start, s.end_s[producer])
        elif s.there_s[tensor, device] >= 0.0:
            start = max(start, s.there_s[tensor, device])
        else:
            cost = g.latency_s[source, device] + g.tensor_bytes[tensor] * g.s_per_byte[source, device]
            if g.blocks[source, device]:
                busy += cost
                cost = 0.0
            start = max(start, s.end_s[producer] + cost)
    end: float = start + busy + g.op_time_s[op, device]
    return end


@inlined
def run_op(g: GroupLayout, s: Decided, op: int, device: int, end_s: float) -> None:
    """`op` runs on `device` until `end_s`; copies that it needed are there from now on."""
    s.end_s[op] = end_s
    for other in range(len(s.free_s)):
        if g.occupies[device, other]:
            s.free_s[other] = end_s
    for edge in range(g.input_offsets[op], g.input_offsets[op + 1]):
        tensor = g.input_tensors[edge]
        source = s.home[g.op_group[g.tensor_op[tensor]]]
        if source >= 0 and source != device and s.there_s[tensor, device] < 0.0:
            transfer_s = g.latency_s[source, device] + g.tensor_bytes[tensor] * g.s_per_byte[source, device]
            s.there_s[tensor, device] = s.end_s[g.tensor_op[tensor]] + transfer_s


@inlined
def place_group(g: GroupLayout, s: Decided, group: int, device: int) -> None:
    """`group` is decided for `device`; none of its ops runs yet."""
    s.placed[group] = device
    s.used[device] += g.held[group]
    s.module_s[g.module[group], int(g.is_backward[group]), device] += g.group_time_s[group].mean()
    for other in range(len(s.free_s)):
        if g.occupies[device, other]:
            s.load_s[other] += g.group_time_s[group, device]


@inlined
def add_cuts(g: GroupLayout, s: Decided, group: int, cut_s: Floats) -> None:
    """Sets `cut_s` (2, D): seconds of tensors from decided groups that `group` reads, and to those that read it."""
    cut_s[:] = 0.0
    for edge in range(g.joined_offsets[group], g.joined_offsets[group + 1]):
        home = s.placed[g.joined_group[edge]]
        if home >= 0:
            for d in range(len(s.free_s)):
                if d != home and g.joined_is_in[edge]:
                    cut_s[0, d] += g.latency_s[home, d] + g.joined_bytes[edge] * g.s_per_byte[home, d]
                elif d != home:
                    cut_s[1, d] += g.latency_s[d, home] + g.joined_bytes[edge] * g.s_per_byte[d, home]


class PartialSchedules(NamedTuple):
    """B schedules under construction: `Decided` with one more axis in front, and what only learners look at.

    Attributes:
        filled: (B, A) float64, bytes in each memory.
        busy_s: (B, D) float64, time of the ops that ran.
        micro_s: (B, K + 1, D) float64, mean time of decided groups by micro-batch and device.
        position: (B,) int64, ops scheduled; past them, J and the group of sources that is next.
        latest: (B,) int64, the device decided last, -1 at the start.
        num_decided: (B,) int64.
        finish_s: (B,) float64, when the ops that ran end.
        bound_s: (B,) float64, when the step can end at the earliest: the ends of ops and the least time after them.
    """

    placed: Ints
    home: Ints
    there_s: Floats
    end_s: Floats
    free_s: Floats
    load_s: Floats
    used: Floats
    module_s: Floats
    latest_end_s: Floats
    filled: Floats
    busy_s: Floats
    micro_s: Floats
    position: Longs
    latest: Longs
    num_decided: Longs
    finish_s: Floats
    bound_s: Floats


def new_schedules(layout: GroupLayout, bounds: ScheduleBounds, num_episodes: int) -> PartialSchedules:
    """Schedules in which nothing is decided."""
    num_ops, num_devices = layout.op_time_s.shape
    num_groups, num_tensors = len(layout.group_time_s), len(layout.tensor_op)
    num_modules, num_slices = int(layout.module.max(initial=0)) + 1, int(bounds.micro_batch.max(initial=0)) + 1
    b = num_episodes
    schedules = PartialSchedules(
        placed=np.empty((b, num_groups), dtype=np.int32),
        home=np.empty((b, num_groups), dtype=np.int32),
        there_s=np.empty((b, num_tensors, num_devices)),
        end_s=np.empty((b, num_ops)),
        free_s=np.empty((b, num_devices)),
        load_s=np.empty((b, num_devices)),
        used=np.empty((b, num_devices)),
        module_s=np.empty((b, num_modules, 2, num_devices)),
        latest_end_s=np.empty((b, num_devices)),
        filled=np.empty((b, len(bounds.account_room))),
        busy_s=np.empty((b, num_devices)),
        micro_s=np.empty((b, num_slices, num_devices)),
        position=np.empty(b, dtype=np.int64),
        latest=np.empty(b, dtype=np.int64),
        num_decided=np.empty(b, dtype=np.int64),
        finish_s=np.empty(b),
        bound_s=np.empty(b),
    )
    clear(bounds, schedules)
    return schedules


def clear(bounds: ScheduleBounds, schedules: PartialSchedules) -> None:
    """Takes every decision back."""
    begin: dict[str, float | Floats] = dict.fromkeys(schedules._fields, 0.0)
    begin |= {"placed": -1.0, "home": -1.0, "latest": -1.0, "there_s": -1.0}
    begin |= {"end_s": bounds.least_end_s, "bound_s": bounds.least_s}
    for name, array in schedules._asdict().items():
        array[:] = begin[name]


@inlined
def schedule_of(s: PartialSchedules, b: int) -> Decided:
    """Schedule `b` alone."""
    return Decided(
        s.placed[b],
        s.home[b],
        s.there_s[b],
        s.end_s[b],
        s.free_s[b],
        s.load_s[b],
        s.used[b],
        s.module_s[b],
        s.latest_end_s[b],
    )


@kernel
def decide(g: GroupLayout, f: ScheduleBounds, s: PartialSchedules, groups: Longs, devices: Longs) -> None:
    """Group `groups[b]` of schedule b goes to `devices[b]`, and what can run now runs.

    Args:
        g: the problem.
        f: its bounds.
        s: B schedules.
        groups: (B,) int64, undecided ones.
        devices: (B,) int64.
    """
    num_groups, num_devices = g.group_time_s.shape
    num_jobs = len(g.order)
    for b in range(len(groups)):
        one = schedule_of(s, b)
        group, device, position = groups[b], devices[b], s.position[b]
        if f.has_source_groups and position < num_jobs and g.order[position] == f.first_op[group]:
            for d in range(num_devices):
                if g.allowed[group, d]:
                    one.latest_end_s[d] = end_on(g, one, g.order[position], d)
        place_group(g, one, group, device)
        s.filled[b, f.account[device]] += f.group_bytes[group]
        s.micro_s[b, f.micro_batch[group], device] += g.group_time_s[group].mean()
        s.latest[b] = device
        s.num_decided[b] += 1
        finish_s, bound_s = s.finish_s[b], s.bound_s[b]
        while position < num_jobs:
            op = g.order[position]
            group = g.op_group[op]
            device = one.placed[group]
            if device < 0:
                break
            one.home[group] = device
            end_s = end_on(g, one, op, device)
            one.latest_end_s[device] = end_s
            run_op(g, one, op, device, end_s)
            for other in range(num_devices):
                if g.occupies[device, other]:
                    s.busy_s[b, other] += g.op_time_s[op, device]
            finish_s = max(finish_s, end_s)
            bound_s = max(bound_s, end_s + f.least_after_s[op])
            position += 1
        while position >= num_jobs and position < num_jobs + num_groups and one.placed[position - num_jobs] >= 0:
            position += 1
        s.position[b], s.finish_s[b], s.bound_s[b] = position, finish_s, bound_s


@kernel
def next_groups(g: GroupLayout, s: PartialSchedules, groups: Longs) -> None:
    """Sets `groups` (B,) to the group that each schedule waits for: that of the op at its pointer; -1 at the end."""
    num_jobs = len(g.order)
    for b in range(len(groups)):
        position = s.position[b]
        if position < num_jobs:
            groups[b] = g.op_group[g.order[position]]
        elif position < num_jobs + len(g.group_time_s):
            groups[b] = position - num_jobs
        else:
            groups[b] = -1


MEMORY_MASKS = ("resident", "held", "none")
"""What of a group has to fit on a device: `resident`, the parameters, inputs and optimizer state that are there when a
step starts, without which no placement runs; `held`, the estimate of the list scheduler: gradients and all forward
outputs, too, which may bar what would run; or nothing."""


class ScheduleBounds(NamedTuple):
    """Of N ops, G groups, D devices and A memories (of one device, or of a pool of several).

    Attributes:
        first_op: (G,) int64, of each group the op that is scheduled first; -1 for groups of sources.
        has_source_groups: whether there are any.
        least_end_s: (N,) float64, before which no op can end: its longest path of least times, copies aside.
        least_after_s: (N,) float64, the least time from the end of each op to the end of the step.
        least_s: the longest path of least times.
        account: (D,) int64, the memory of each device.
        account_room: (A,) float64, bytes beside contexts.
        group_bytes: (G,) float64, what each group takes of them.
        micro_batch: (G,) int64, 1 + the micro-batch that most of a group's time is in; 0 for what all share.
        num_micro_batches: of the step, 1 where it is not cut.
        rank: (G,) float64, longest path of mean times from a group's first op to the end, over the longest of all.
        speed: (D,) float64, time of all ops on the fastest device over that on each.
    """

    first_op: Longs
    has_source_groups: bool
    least_end_s: Floats
    least_after_s: Floats
    least_s: float
    account: Longs
    account_room: Floats
    group_bytes: Floats
    micro_batch: Longs
    num_micro_batches: int
    rank: Floats
    speed: Floats


def schedule_bounds(
    problem: Problem, grouping: Grouping, layout: GroupLayout, memory_mask: str = "resident"
) -> ScheduleBounds:
    """The bounds of schedules of `grouping`'s groups, whose `layout` it is.

    Args:
        problem: what is scheduled.
        grouping: what is placed together.
        layout: both as arrays.
        memory_mask: one of `MEMORY_MASKS`.

    Raises:
        UnknownName: no mask has that name.
    """
    if memory_mask not in MEMORY_MASKS:
        raise UnknownName("memory mask", memory_mask, MEMORY_MASKS)
    graph = problem.graph
    first_op = np.full(grouping.num_groups, -1, dtype=np.int64)
    first_op[layout.op_group[layout.order[::-1]]] = layout.order[::-1]  # the last write is the first op
    may = layout.allowed[layout.op_group]
    least_op_s = np.where(graph.is_source, 0.0, np.where(may, layout.op_time_s, np.inf).min(axis=1))
    producers = graph.tensor_op[graph.input_tensors]
    edges = graph.input_offsets, producers, np.zeros(len(producers))
    least_end_s = least_op_s + longest_before(least_op_s, *edges)
    account, room = memory_accounts(problem)
    ranks = upward_ranks(problem)
    total_s = layout.group_time_s.sum(axis=0)
    return ScheduleBounds(
        first_op=first_op,
        has_source_groups=bool(np.any(first_op < 0)),
        least_end_s=least_end_s,
        least_after_s=longest_after(least_op_s, *edges),
        least_s=float(least_end_s.max(initial=0.0)),
        account=account,
        account_room=room,
        group_bytes=_group_bytes(problem, grouping, layout, memory_mask),
        micro_batch=main_labels(problem, grouping, graph.micro_batch.astype(np.int64) + 1),
        num_micro_batches=graph.num_micro_batches,
        rank=np.where(first_op >= 0, ranks[first_op], 0.0) / max(float(ranks.max(initial=0.0)), 1e-30),
        speed=np.where(total_s > 0.0, total_s.min() / np.maximum(total_s, 1e-30), 1.0),
    )


def _group_bytes(problem: Problem, grouping: Grouping, layout: GroupLayout, memory_mask: str) -> Floats:
    if memory_mask == "held":
        return layout.held
    if memory_mask == "none":
        return np.full(grouping.num_groups, -np.inf)  # contexts alone may leave less than no room
    return np.bincount(grouping.op_group, weights=resident_bytes(problem)).astype(np.float64)


def memory_accounts(problem: Problem) -> tuple[Longs, Floats]:
    """(D,) int64 the memory of each device, and (A,) float64 the bytes that each has beside contexts."""
    devices = problem.host.devices
    names = account_names(problem.host)
    pools = names[len(devices) :]
    account = [
        len(devices) + pools.index(device.memory_pool) if device.memory_pool in pools else index
        for index, device in enumerate(devices)
    ]
    room = np.full(len(names), np.inf)
    for at, device in zip(account, devices, strict=True):
        room[at] = min(room[at], float(device.memory_bytes))
    for at, device in zip(account, devices, strict=True):
        room[at] -= float(device.context_bytes)
    return np.array(account, dtype=np.int64), room


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
