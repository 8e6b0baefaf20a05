"""The schedule that grows while groups are placed one after the other: one at a time, or many episodes in step.

Ops are list-scheduled in the order of the problem. A pointer goes over them while their groups are decided, and stops
at the first op whose group is not. Where groups are decided in another order the pointer waits, then goes further at
once: the finished schedule depends on the placement alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlplace.jit import Floats, Ints, Longs, inlined, kernel
from rlplace.search.schedule.group_layout import GroupLayout
from rlplace.search.schedule.schedule_bounds import ScheduleBounds


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
