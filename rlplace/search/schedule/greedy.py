"""`Greedy`: a list scheduler over groups that weighs several features of a device; one placement for every weights.

Features of each device when a group is about to be placed: features, and where it may go.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs import Grouping
from rlplace.jit import Bools, Floats, Ints, Longs, inlined, kernel
from rlplace.measure import Problem
from rlplace.search.schedule.list_schedule import Schedule, append, end_on, total
from rlplace.search.schedule.partial_schedule import (
    Decided,
    GroupLayout,
    PartialSchedules,
    ScheduleBounds,
    add_cuts,
    group_layout,
    place_group,
    schedule_of,
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
        is_exact = _ends(g, f, s, one, episodes[row], groups[row], end_s)
        add_cuts(g, one, groups[row], cut_s)
        _write(g, f, s, one, episodes[row], groups[row], is_exact, end_s, cut_s, mask[row], features[row])


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
def _ends(
    g: GroupLayout, f: ScheduleBounds, s: PartialSchedules, one: Decided, episode: int, group: int, end_s: Floats
) -> bool:
    """Sets `end_s` (D,): when the group's first op would end, at least; whether these are no bounds but the ends.

    A group of sources has no such op: it gets the values of the op before it.
    """
    op, position = f.first_op[group], s.position[episode]
    is_exact: bool = position >= len(g.order) or g.order[position] == op
    for d in range(len(end_s)):
        if op < 0:
            end_s[d] = one.latest_end_s[d]
        elif g.units.label_allowed[group, d]:
            end_s[d] = end_on(g.units, g.host, one.ops, None, op, d, False)
    return is_exact


@inlined
def _write(
    g: GroupLayout,
    f: ScheduleBounds,
    s: PartialSchedules,
    one: Decided,
    episode: int,
    group: int,
    is_exact: bool,
    end_s: Floats,
    cut_s: Floats,
    mask: Bools,
    features: NDArray[np.floating],
) -> None:
    num_devices = len(end_s)
    earliest_s, mean_s, count = np.inf, 0.0, 0
    for d in range(num_devices):
        if g.units.label_allowed[group, d]:
            earliest_s = min(earliest_s, end_s[d])
            mean_s += g.group_time_s[group, d]
            count += 1
    mean_s /= max(count, 1)
    op, phase, slice_ = f.first_op[group], int(g.is_backward[group]), f.micro_batch[group]
    own, twin = one.module_s[g.module[group], phase], one.module_s[g.module[group], 1 - phase]
    micro = s.micro_s[episode, slice_]
    own_s, twin_s, micro_s = total(own), total(twin), total(micro)
    for d in range(num_devices):
        if not g.units.label_allowed[group, d]:
            continue
        load_s = 0.0
        for other in range(num_devices):
            if g.host.occupies[d, other]:
                load_s = max(load_s, one.load_s[other])
        row = features[d]
        row[0] = (end_s[d] - earliest_s) / g.unit_s
        row[1] = g.group_time_s[group, d] / g.unit_s
        row[2] = (load_s + g.group_time_s[group, d]) / g.share_s
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
                there = 0.0
                for other in range(num_devices):
                    if g.host.occupies[d, other]:
                        there = max(there, s.load_s[other])
                value = (
                    weights[0] * (end[d] - earliest) / g.unit_s
                    + weights[1] * g.group_time_s[group, d] / g.unit_s
                    + weights[2] * (there + g.group_time_s[group, d]) / g.share_s
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
