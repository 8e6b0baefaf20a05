"""The schedule that grows while groups are placed one after the other: one at a time, or many episodes in step.

Ops are list-scheduled in the order of the problem. A pointer goes over them while their groups are decided, and stops
at the first op whose group is not. Where groups are decided in another order the pointer waits, then goes further at
once: the finished schedule depends on the placement alone.

`ScheduleBounds`: the facts of a problem's groups that hold for every schedule.

`GroupLayout`: a problem and a grouping as the arrays that groups are scheduled over.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import check_known
from rlplace.graphs import BACKWARD, Grouping
from rlplace.graphs.paths import longest_after, longest_before
from rlplace.jit import Block, Bools, Floats, FloatTable, Ints, IntTable, Longs, inlined, kernel
from rlplace.measure import Problem, upward_ranks
from rlplace.measure.simulate.compiled_problem import list_order
from rlplace.search.groupings import group_time_s, held_bytes, main_labels, main_modules, room_bytes
from rlplace.search.schedule.list_schedule import (
    HostResources,
    Schedule,
    Units,
    append,
    end_on,
    host_resources,
    op_units,
    total,
)


class Decided(NamedTuple):
    """The state of one schedule: the groups decided so far and the ops that ran.

    Attributes:
        ops: the ops that ran. The home of a group is -1 until the first of its ops is scheduled: sources that are read
            before that are where their reader is.
        placed: (G,) int32, -1 undecided.
        load_s: (D,) float64, time of the groups decided for a device.
        used: (D,) float64, bytes of the groups decided for a device.
        module_s: (M, 2, D) float64, mean time of decided groups by module, phase and device.
        latest_end_s: (D,) float64, when the first op of the group decided last, or an op that ran after it, would end
            or ended on a device: the features of groups of sources. Kept where there are any.
    """

    ops: Schedule
    placed: Ints
    load_s: Floats
    used: Floats
    module_s: Floats
    latest_end_s: Floats


@inlined
def place_group(g: GroupLayout, s: Decided, group: int, device: int) -> None:
    """`group` is decided for `device`; none of its ops runs yet."""
    s.placed[group] = device
    s.used[device] += g.held[group]
    s.module_s[g.module[group], int(g.is_backward[group]), device] += total(g.group_time_s[group]) / len(s.load_s)
    for other in range(len(s.load_s)):
        if g.host.occupies[device, other]:
            s.load_s[other] += g.group_time_s[group, device]


@inlined
def add_cuts(g: GroupLayout, s: Decided, group: int, cut_s: Floats) -> None:
    """Sets `cut_s` (2, D): seconds of tensors from decided groups that `group` reads, and to those that read it."""
    cut_s[:] = 0.0
    for edge in range(g.joined_offsets[group], g.joined_offsets[group + 1]):
        home = s.placed[g.joined_group[edge]]
        if home >= 0:
            for d in range(len(s.load_s)):
                if d != home and g.joined_is_in[edge]:
                    cut_s[0, d] += g.host.latency_s[home, d] + g.joined_bytes[edge] * g.host.s_per_byte[home, d]
                elif d != home:
                    cut_s[1, d] += g.host.latency_s[d, home] + g.joined_bytes[edge] * g.host.s_per_byte[d, home]


class PartialSchedules(Block):
    """B schedules under construction: `Decided` with one more axis in front, and arrays that only learners use.

    Attributes:
        home, end_s, free_s, there_s: of `Decided.ops`.
        filled: (B, A) float64, bytes in each memory.
        busy_s: (B, D) float64, time of the ops that ran.
        micro_s: (B, K + 1, D) float64, mean time of decided groups by micro-batch and device.
        position: (B,) int64, ops scheduled; past them, J and the group of sources that is next.
        latest: (B,) int64, the device decided last, -1 at the start.
        num_decided: (B,) int64.
        finish_s: (B,) float64, when the ops that ran end.
        bound_s: (B,) float64, when the step can end at the earliest: the ends of ops and the least time after them.
    """

    placed: IntTable
    home: IntTable
    there_s: Annotated[Floats, 3]
    end_s: FloatTable
    free_s: FloatTable
    load_s: FloatTable
    used: FloatTable
    module_s: Annotated[Floats, 4]
    latest_end_s: FloatTable
    filled: FloatTable
    busy_s: FloatTable
    micro_s: Annotated[Floats, 3]
    position: Longs
    latest: Longs
    num_decided: Longs
    finish_s: Floats
    bound_s: Floats


def new_schedules(layout: GroupLayout, bounds: ScheduleBounds, num_episodes: int) -> PartialSchedules:
    """Schedules in which nothing is decided."""
    num_ops, num_devices = layout.units.time_s.shape
    num_groups, num_tensors = len(layout.group_time_s), len(layout.units.tensor_unit)
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
        filled=np.empty((b, len(layout.host.room_bytes))),
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
    begin = dict.fromkeys(("placed", "home", "latest", "there_s"), -1.0)
    for name, array in schedules.to_dict().items():
        array[:] = begin.get(name, 0.0)
    schedules.end_s[:] = bounds.least_end_s
    schedules.bound_s[:] = bounds.least_s


@inlined
def schedule_of(s: PartialSchedules, b: int) -> Decided:
    """Schedule `b` alone."""
    ops = Schedule(s.home[b], s.end_s[b], s.free_s[b], s.there_s[b])
    return Decided(ops, s.placed[b], s.load_s[b], s.used[b], s.module_s[b], s.latest_end_s[b])


@kernel
def decide(g: GroupLayout, f: ScheduleBounds, s: PartialSchedules, groups: Longs, devices: Longs) -> None:
    """Group `groups[b]` of schedule b goes to `devices[b]`, and ops that can run now run.

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
                if g.units.label_allowed[group, d]:
                    one.latest_end_s[d] = end_on(g.units, g.host, one.ops, None, g.order[position], d, False)
        place_group(g, one, group, device)
        s.filled[b, g.host.account[device]] += f.group_bytes[group]
        s.micro_s[b, f.micro_batch[group], device] += total(g.group_time_s[group]) / num_devices
        s.latest[b] = device
        s.num_decided[b] += 1
        finish_s, bound_s = s.finish_s[b], s.bound_s[b]
        while position < num_jobs:
            op = g.order[position]
            group = g.units.label[op]
            device = int(np.int64(one.placed[group]))
            if device < 0:
                break
            one.ops.home[group] = device
            end_s = end_on(g.units, g.host, one.ops, None, op, device, False)
            one.latest_end_s[device] = end_s
            append(g.units, g.host, one.ops, op, device, end_s)
            for other in range(num_devices):
                if g.host.occupies[device, other]:
                    s.busy_s[b, other] += g.units.time_s[op, device]
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
            groups[b] = g.units.label[g.order[position]]
        elif position < num_jobs + len(g.group_time_s):
            groups[b] = position - num_jobs
        else:
            groups[b] = -1


MEMORY_MASKS = ("resident", "held", "none")
"""The memory of a group that has to fit on a device: `resident`, the parameters, inputs and optimizer state that are
there when a step starts, without which no placement runs; `held`, the estimate of the list scheduler: gradients and all
forward outputs, too, which may exclude placements that would run; or nothing."""


class ScheduleBounds(Block):
    """Of N ops, G groups, D devices and A memories (of one device, or of a pool of several).

    Attributes:
        first_op: (G,) int64, of each group the op that is scheduled first; -1 for groups of sources.
        has_source_groups: whether there are any.
        least_end_s: (N,) float64, before which no op can end: its longest path of least times, copies aside.
        least_after_s: (N,) float64, the least time from the end of each op to the end of the step.
        least_s: the longest path of least times.
        group_bytes: (G,) float64, the bytes of each group.
        micro_batch: (G,) int64, 1 + the micro-batch that most of a group's time is in; 0 for bytes that all share.
        num_micro_batches: of the step, 1 where it is not cut.
        rank: (G,) float64, longest path of mean times from a group's first op to the end, over the longest of all.
        speed: (D,) float64, time of all ops on the fastest device over that on each.
    """

    first_op: Longs
    has_source_groups: bool
    least_end_s: Floats
    least_after_s: Floats
    least_s: float
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
        problem: the problem to schedule.
        grouping: the ops that are placed together.
        layout: both as arrays.
        memory_mask: one of `MEMORY_MASKS`.

    Raises:
        UnknownName: no mask has that name.
    """
    check_known("memory mask", memory_mask, MEMORY_MASKS)
    graph, units = problem.graph, layout.units
    first_op = np.full(grouping.num_groups, -1, dtype=np.int64)
    first_op[units.label[layout.order[::-1]]] = layout.order[::-1]  # the last write is the first op
    may = units.label_allowed[units.label]
    least_op_s = np.where(graph.is_source, 0.0, np.where(may, units.time_s, np.inf).min(axis=1))
    producers = graph.tensor_op[graph.input_tensors]
    edges = graph.input_offsets, producers, np.zeros(len(producers))
    least_end_s = least_op_s + longest_before(least_op_s, *edges)
    ranks = upward_ranks(problem)
    total_s = layout.group_time_s.sum(axis=0)
    return ScheduleBounds(
        first_op=first_op,
        has_source_groups=bool(np.any(first_op < 0)),
        least_end_s=least_end_s,
        least_after_s=longest_after(least_op_s, *edges),
        least_s=float(least_end_s.max(initial=0.0)),
        group_bytes={
            "resident": units.label_resident_bytes,
            "held": layout.held,
            "none": np.full(grouping.num_groups, -np.inf),  # contexts alone may leave less than no room
        }[memory_mask],
        micro_batch=main_labels(problem, grouping, graph.micro_batch.astype(np.int64) + 1),
        num_micro_batches=graph.num_micro_batches,
        rank=np.where(first_op >= 0, ranks[first_op], 0.0) / max(float(ranks.max(initial=0.0)), 1e-30),
        speed=np.where(total_s > 0.0, total_s.min() / np.maximum(total_s, 1e-30), 1.0),
    )


class GroupLayout(Block):
    """N ops in G groups on D devices.

    Attributes:
        units: the ops, labelled by group.
        host: the devices.
        order: (J,) int64, ops that are not sources, each after its inputs.
        group_time_s: (G, D) float64, summed over ops.
        held: (G,) float64, bytes that a group keeps where it is.
        room: (D,) float64, bytes.
        joined_offsets: (G + 1,) int32, CSR over groups: the groups that each reads, or that read it.
        joined_group: int32, those groups.
        joined_bytes: float64, the bytes between the two; a tensor once.
        joined_is_in: bool, whether the group reads it.
        module: (G,) int64, the module that most of a group's time is in.
        is_backward: (G,) bool, whether most of a group's time is in the backward pass or the update.
        unit_s: mean seconds of a group.
        share_s: an even share of the mean time of all groups, one of D; the unit of loads.
    """

    units: Units
    host: HostResources
    order: Longs
    group_time_s: FloatTable
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
    graph, op_group, op_time_s = problem.graph, grouping.op_group, problem.costs.op_time_s
    time_s, is_late = group_time_s(problem, grouping), (graph.phases >= BACKWARD).astype(np.int64)
    phase_s = np.bincount(2 * op_group + is_late, weights=op_time_s.mean(axis=1), minlength=2 * grouping.num_groups)
    offsets, joined, num_bytes, is_in = _joined(problem, grouping)
    order = list_order(problem)
    total_s = float(np.cumsum(np.append(0.0, time_s))[-1])  # one after the other: `sum` rounds otherwise
    return GroupLayout(
        units=op_units(problem, grouping),
        host=host_resources(problem),
        order=order[~graph.is_source[order]],
        group_time_s=time_s,
        held=held_bytes(problem, grouping),
        room=room_bytes(problem),
        joined_offsets=offsets,
        joined_group=joined,
        joined_bytes=num_bytes,
        joined_is_in=is_in,
        module=main_modules(problem, grouping),
        is_backward=phase_s[1::2] > phase_s[::2],
        unit_s=max(total_s / max(time_s.size, 1), 1e-30),
        share_s=max(total_s / time_s.shape[1] / time_s.shape[1], 1e-30),
    )


def _joined(problem: Problem, grouping: Grouping) -> tuple[Ints, Ints, Floats, NDArray[np.bool_]]:
    """CSR over groups: each group it reads or that reads it, bytes (a tensor once a reading group), and which."""
    graph, op_group = problem.graph, grouping.op_group
    source, reader = op_group[graph.tensor_op[graph.input_tensors]], op_group[graph.edge_op]
    tensors = np.unique(np.stack((graph.input_tensors, reader), axis=1)[source != reader], axis=0)
    producer, reader = op_group[graph.tensor_op[tensors[:, 0]]].astype(np.int64), tensors[:, 1].astype(np.int64)
    keys, place = np.unique(producer * grouping.num_groups + reader, return_inverse=True)
    num_bytes = np.bincount(place, graph.tensor_bytes[tensors[:, 0]], len(keys)).astype(np.float64)
    a, b = keys // max(grouping.num_groups, 1), keys % max(grouping.num_groups, 1)
    this, other = np.concatenate((b, a)), np.concatenate((a, b))
    is_in = np.arange(2 * len(keys)) < len(keys)
    order = np.lexsort((other, this))
    offsets = np.searchsorted(this[order], np.arange(grouping.num_groups + 1)).astype(np.int32)
    return offsets, other[order].astype(np.int32), np.concatenate((num_bytes, num_bytes))[order], is_in[order]
