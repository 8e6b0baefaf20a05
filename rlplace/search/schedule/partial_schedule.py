"""The schedule that grows while groups are placed one after the other: one at a time, or many episodes in step.

Ops are list-scheduled in the order of the problem. A pointer goes over them while their groups are decided, and stops
at the first op whose group is not. Where groups are decided in another order the pointer waits, then goes further at
once: the finished schedule depends on the placement alone.

`ScheduleBounds`: the facts of a problem's groups that hold for every schedule.

`GroupLayout`: a problem and a grouping as the arrays that groups are scheduled over.

`observe`: features of each device when a group is about to be placed, and where the group may go.

`Greedy`: a list scheduler over groups that weighs some of these features; one placement for every row of weights.

`estimates`: figures of a placement that need no simulation: when its list schedule ends, and totals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import check_known
from rlplace.graphs import BACKWARD, Grouping
from rlplace.graphs.paths import longest_after, longest_before
from rlplace.jit import Block, Bools, Floats, FloatTable, Ints, IntTable, Longs, inlined, kernel
from rlplace.measure import Problem, upward_ranks
from rlplace.measure.simulate.compiled_problem import list_order
from rlplace.measure.simulate.transfer_time import transfer_seconds
from rlplace.search.groupings import (
    edges_between_groups,
    group_time_s,
    held_bytes,
    joined_groups,
    main_labels,
    main_modules,
    room_bytes,
)
from rlplace.search.schedule.list_schedule import (
    HostResources,
    Schedule,
    Units,
    add_busy,
    append,
    end_on,
    host_resources,
    new_schedule,
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
    add_busy(g.host, s.load_s, device, g.group_time_s[group, device])


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
    schedules = PartialSchedules(
        placed=np.empty((num_episodes, num_groups), dtype=np.int32),
        home=np.empty((num_episodes, num_groups), dtype=np.int32),
        there_s=np.empty((num_episodes, num_tensors, num_devices)),
        end_s=np.empty((num_episodes, num_ops)),
        free_s=np.empty((num_episodes, num_devices)),
        load_s=np.empty((num_episodes, num_devices)),
        used=np.empty((num_episodes, num_devices)),
        module_s=np.empty((num_episodes, num_modules, 2, num_devices)),
        latest_end_s=np.empty((num_episodes, num_devices)),
        filled=np.empty((num_episodes, len(layout.host.room_bytes))),
        busy_s=np.empty((num_episodes, num_devices)),
        micro_s=np.empty((num_episodes, num_slices, num_devices)),
        position=np.empty(num_episodes, dtype=np.int64),
        latest=np.empty(num_episodes, dtype=np.int64),
        num_decided=np.empty(num_episodes, dtype=np.int64),
        finish_s=np.empty(num_episodes),
        bound_s=np.empty(num_episodes),
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
            add_busy(g.host, s.busy_s[b], device, g.units.time_s[op, device])
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
        else:
            groups[b] = position - num_jobs if position < num_jobs + len(g.group_time_s) else -1


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
    offsets, joined, num_bytes, is_in = joined_groups(*edges_between_groups(problem, grouping)[:3], grouping.num_groups)
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


FEATURE_NOTES = {
    "finish": "when the group's first op would end there, copies included, after the earliest end on any device",
    "cost": "the group's time there",
    "load": "time of all that is there, the group included, over an even share of the mean time of all groups",
    "cut_in": "time that tensors take from placed groups that the group reads",
    "cut_out": "time that tensors take to placed groups that read the group",
    "memory": "fullness: bytes held over room, the group included",
    "twin": "share of the time of its module's other phase (the backward twin) that is placed elsewhere",
    "module": "share of the time of its module's own phase that is placed elsewhere",
    "order": "1 unless the group decided just before is there",
    "micro": "share of the time of its micro-batch that is placed elsewhere",
    "wait": "how long the device would wait for inputs of the first op, and copy them itself",
    "delay": "how much later the step could end at the earliest: its bound moves on by this",
    "slowness": "the group's time there over its mean time on the devices where it may be",
    "speed": "time of all groups on the fastest device over that on this one",
    "busy": "share of the time so far that the device was busy",
    "rank": "longest path of mean times from the group's first op to the end, over the longest of all",
    "backward": "1 where most of the group's time is in the backward pass or the update",
    "micro_batch": "k/K for a group of the k-th of K micro-batches, k from 1; 0 where it is shared",
    "decided": "share of groups that are decided",
    "exact": "1 where the group's first op is next; 0 where `finish`, `wait` and `delay` are lower bounds",
    "allowed": "1 where the group may be: pins allow it, and it fits into memory beside what is there",
}
"""The meaning of each feature of a device, in this order. Times are in mean costs of a group.

The first nine are those of the list scheduler `Greedy`. All are 0 for a device that the group's pins bar.
"""
DECISION_FEATURES = tuple(FEATURE_NOTES)


@kernel
def observe(
    g: GroupLayout,
    f: ScheduleBounds,
    s: PartialSchedules,
    episodes: Longs,
    groups: Longs,
    features: NDArray[np.floating],
    mask: Bools,
) -> None:
    """Sets `features` (R, D, F) and `mask` (R, D) of group `groups[r]` in schedule `episodes[r]`, for each row r.

    Where no device that pins allow has room, the mask has the one that lacks least: it is never all False.

    Args:
        g: the problem.
        f: its bounds.
        s: B schedules.
        episodes: (R,) int64.
        groups: (R,) int64, undecided; a row of -1 gets zeros, and True everywhere.
        features: (R, D, F) float32 or float64, by `DECISION_FEATURES`.
        mask: (R, D) bool.
    """
    num_devices = g.group_time_s.shape[1]
    end_s, cut_s = np.zeros(num_devices), np.zeros((2, num_devices))
    for row in range(len(groups)):
        features[row] = 0.0
        if groups[row] < 0:
            mask[row] = True
            continue
        one = schedule_of(s, episodes[row])
        _mask(g, f, s, episodes[row], groups[row], mask[row])
        add_cuts(g, one, groups[row], cut_s)
        _write(g, f, s, one, episodes[row], groups[row], end_s, cut_s, mask[row], features[row])


@inlined
def load_on(h: HostResources, load_s: Floats, device: int) -> float:
    """The largest load (D,) of the devices that `device` keeps busy."""
    most_s = 0.0
    for other in range(len(load_s)):
        if h.occupies[device, other]:
            most_s = max(most_s, load_s[other])
    return most_s


@inlined
def _mask(g: GroupLayout, f: ScheduleBounds, s: PartialSchedules, episode: int, group: int, mask: Bools) -> None:
    fits, best, least = False, -1, np.inf
    for d in range(len(mask)):
        mask[d] = False
        if g.units.label_allowed[group, d]:
            account = g.host.account[d]
            shortage = s.filled[episode, account] + f.group_bytes[group] - g.host.room_bytes[account]
            mask[d] = shortage <= 0.0
            fits = fits or mask[d]
            if shortage < least:
                best, least = d, shortage
    if not fits:
        mask[max(best, 0)] = True


@inlined
def _write(
    g: GroupLayout,
    f: ScheduleBounds,
    s: PartialSchedules,
    one: Decided,
    episode: int,
    group: int,
    end_s: Floats,
    cut_s: Floats,
    mask: Bools,
    features: NDArray[np.floating],
) -> None:
    """Sets `features` (D, F) of a group by `DECISION_FEATURES`.

    `end_s` (D,) is set to when the group's first op would end, at least, and exactly where that op is next. A group of
    sources has no such op: it gets the values of the op before it.
    """
    num_devices = len(end_s)
    op, phase, slice_ = f.first_op[group], int(g.is_backward[group]), f.micro_batch[group]
    position = s.position[episode]
    is_exact = position >= len(g.order) or g.order[position] == op
    earliest_s, mean_s, count = np.inf, 0.0, 0
    for d in range(num_devices):
        if g.units.label_allowed[group, d]:
            end_s[d] = one.latest_end_s[d] if op < 0 else end_on(g.units, g.host, one.ops, None, op, d, False)
            earliest_s = min(earliest_s, end_s[d])
            mean_s += g.group_time_s[group, d]
            count += 1
    mean_s /= max(count, 1)
    own, twin = one.module_s[g.module[group], phase], one.module_s[g.module[group], 1 - phase]
    micro = s.micro_s[episode, slice_]
    own_s, twin_s, micro_s = total(own), total(twin), total(micro)
    for d in range(num_devices):
        if not g.units.label_allowed[group, d]:
            continue
        row = features[d]
        row[0] = (end_s[d] - earliest_s) / g.unit_s
        row[1] = g.group_time_s[group, d] / g.unit_s
        row[2] = (load_on(g.host, one.load_s, d) + g.group_time_s[group, d]) / g.share_s
        row[3] = cut_s[0, d] / g.unit_s
        row[4] = cut_s[1, d] / g.unit_s
        row[5] = (one.used[d] + g.held[group]) / g.room[d]
        if twin_s > 0.0:
            row[6] = 1.0 - twin[d] / twin_s
        if own_s > 0.0:
            row[7] = 1.0 - own[d] / own_s
        if s.latest[episode] >= 0 and d != s.latest[episode]:
            row[8] = 1.0
        if micro_s > 0.0:
            row[9] = 1.0 - micro[d] / micro_s
        if op >= 0:
            row[10] = max(0.0, end_s[d] - g.units.time_s[op, d] - one.ops.free_s[d]) / g.unit_s
            row[11] = max(0.0, end_s[d] + f.least_after_s[op] - s.bound_s[episode]) / g.unit_s
        row[12] = g.group_time_s[group, d] / mean_s if mean_s > 0.0 else 1.0
        row[13] = f.speed[d]
        if s.finish_s[episode] > 0.0:
            row[14] = s.busy_s[episode, d] / s.finish_s[episode]
        row[15] = f.rank[group]
        row[16] = float(phase)
        row[17] = slice_ / f.num_micro_batches
        row[18] = s.num_decided[episode] / len(g.group_time_s)
        row[19] = 1.0 if is_exact else 0.0
        row[20] = 1.0 if mask[d] else 0.0


FEATURES = DECISION_FEATURES[:9]
"""The costs of a group on a device, `finish` to `order` of `FEATURE_NOTES`."""


@dataclass(frozen=True, eq=False)
class Greedy:
    """A problem and a grouping laid out for the scheduler."""

    grouping: Grouping
    layout: GroupLayout

    @classmethod
    def of(cls, problem: Problem, grouping: Grouping | None = None) -> Greedy:
        """The scheduler of `grouping`'s groups; of the problem's own by default."""
        grouping = problem.grouping if grouping is None else grouping
        return cls(grouping, group_layout(problem, grouping))

    def place(self, weights: NDArray[np.float64]) -> NDArray[np.int32]:
        """(B, G) int32 devices of groups, one row for each row of weights (B, 9) of `FEATURES`.

        Ops are taken in the order of the problem. The first op of a group decides for the group: it goes where the
        weighted sum of features is least (ties: the first such device). Its other ops follow.
        """
        weights = np.atleast_2d(np.asarray(weights, dtype=np.float64))
        placed = np.empty((len(weights), self.grouping.num_groups), dtype=np.int32)
        for row in range(len(weights)):
            _place(placed[row], weights[row], self.layout)
        return placed


@kernel
def _place(placed: Ints, weights: Floats, g: GroupLayout) -> None:
    num_groups, num_devices = g.group_time_s.shape
    num_jobs = len(g.order)
    placed[:] = -1
    num_modules = 0
    for group in range(num_groups):
        num_modules = max(num_modules, g.module[group] + 1)
    there_s = np.empty((len(g.units.tensor_unit), num_devices))
    there_s[:] = -1.0
    ops = Schedule(placed, np.zeros(len(g.units.label)), np.zeros(num_devices), there_s)
    module_s = np.zeros((num_modules, 2, num_devices))
    s = Decided(ops, placed, np.zeros(num_devices), np.zeros(num_devices), module_s, np.zeros(num_devices))
    end, cut = s.latest_end_s, np.zeros((2, num_devices))
    latest = -1
    for position in range(num_jobs + num_groups):
        # after the last op come groups of sources that no op decided for
        op = g.order[position] if position < num_jobs else -1
        group = g.units.label[op] if op >= 0 else position - num_jobs
        device = int(np.int64(placed[group]))
        if op < 0 and device >= 0:
            continue
        if op >= 0:
            for d in range(num_devices):
                if d == device or (device < 0 and g.units.label_allowed[group, d]):
                    end[d] = end_on(g.units, g.host, s.ops, None, op, d, False)
        if device < 0:
            earliest = np.inf
            for d in range(num_devices):
                if g.units.label_allowed[group, d]:
                    earliest = min(earliest, end[d])
            add_cuts(g, s, group, cut)
            phase = int(g.is_backward[group])
            own, twin = s.module_s[g.module[group], phase], s.module_s[g.module[group], 1 - phase]
            own_s, twin_s = total(own), total(twin)
            least = np.inf
            for d in range(num_devices):
                if not g.units.label_allowed[group, d]:
                    continue
                value = (
                    weights[0] * (end[d] - earliest) / g.unit_s
                    + weights[1] * g.group_time_s[group, d] / g.unit_s
                    + weights[2] * (load_on(g.host, s.load_s, d) + g.group_time_s[group, d]) / g.share_s
                    + weights[3] * cut[0, d] / g.unit_s
                    + weights[4] * cut[1, d] / g.unit_s
                    + weights[5] * (s.used[d] + g.held[group]) / g.room[d]
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
                device = 0
                while device < num_devices - 1 and not g.units.label_allowed[group, device]:
                    device += 1
            place_group(g, s, group, device)
            latest = device
        if op >= 0:
            append(g.units, g.host, s.ops, op, device, end[device])


ESTIMATES = ("finish", "load", "link", "cut", "copies", "memory")
"""Figures of a placement:

- `finish`: seconds until the last op of its list schedule ends: ops in the order of the problem, copies sent as soon as
  their tensors exist, links without queues, launches without cost (the model of `Greedy`);
- `load`: seconds that the busiest device computes;
- `link`: seconds that the busiest link sends;
- `cut`: seconds that all copies take;
- `copies`: how many there are;
- `memory`: bytes kept over room, on the fullest device.
"""


def estimates(g: GroupLayout, placements: NDArray[np.int32]) -> NDArray[np.float64]:
    """(B, 6) `ESTIMATES` of placements (B, N), by a layout in which every op is a group of its own."""
    found = np.zeros((len(placements), len(ESTIMATES)))
    for row, devices in enumerate(placements):
        schedule = new_schedule(g.units)._replace(home=np.array(devices, dtype=np.int32))
        _estimate(found[row], g.units, g.host, schedule, g.order)
        found[row, 5] = (np.bincount(devices, weights=g.held, minlength=len(g.room)) / g.room).max()
    return found


@kernel
def _estimate(found: Floats, u: Units, h: HostResources, s: Schedule, order: Longs) -> None:
    load_s, link_s = np.zeros(len(h.occupies)), np.zeros(h.num_resources - len(h.occupies) + 1)
    cut_s, copies = 0.0, 0
    for unit in order:
        device = int(np.int64(s.home[unit]))
        for edge in range(u.input_offsets[unit], u.input_offsets[unit + 1]):
            tensor = u.input_tensors[edge]
            home = s.home[u.tensor_unit[tensor]]
            if home != device and s.there_s[tensor, device] < 0.0:
                transfer_s = transfer_seconds(h.latency_s, h.s_per_byte, (home, device), u.tensor_bytes[tensor])
                cut_s += transfer_s
                copies += 1
                pair = home * len(h.occupies) + device
                for k in range(h.route_offsets[pair], h.route_offsets[pair + 1]):
                    if h.route_holds[k] >= len(h.occupies):  # a link, not a device that the copy blocks
                        link_s[h.route_holds[k] - len(h.occupies)] += transfer_s
        append(u, h, s, unit, device, end_on(u, h, s, None, unit, device, False))
        add_busy(h, load_s, device, u.time_s[unit, device])
    found[0], found[1], found[2] = s.end_s.max(), load_s.max(), link_s.max()
    found[3], found[4] = cut_s, copies
