"""List scheduling with insertion on devices and links: where a unit would end, and what it holds once it is placed.

Devices and links are resources with busy intervals. An op holds its device (a gang: its members), a transfer its links
and the devices that it blocks; each takes the first gap that is long enough on all that it holds (insertion: Topcuoglu,
Hariri, Wu 2002; on links: Sinnen and Sousa, "Communication contention in task scheduling", 2005).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.jit import Bools, Floats, Ints, Longs, inlined, kernel
from rlplace.search.schedule.host_resources import HostResources
from rlplace.search.schedule.units import Units


class Schedule(NamedTuple):
    """A schedule under construction.

    Attributes:
        starts, ends: (resources, capacity) float64, busy intervals in order of time; touching ones are merged.
        counts: (resources,) int64.
        label_device: (C,) int32, -1 undecided.
        end_s: (U,) float64.
        there_s: (T, D) float64, when a copy of a tensor is on a device; -1 where there is none.
        used_bytes: (accounts,) float64.
        need_bytes: (C,) float64, what each label takes where it is placed.
        held, held_start, held_end: what the transfers of the unit at hand would hold.
    """

    starts: Floats
    ends: Floats
    counts: Longs
    label_device: Ints
    end_s: Floats
    there_s: Floats
    used_bytes: Floats
    need_bytes: Floats
    held: Ints
    held_start: Floats
    held_end: Floats


def new_schedule(units: Units, resources: HostResources, output_share: float) -> Schedule:
    """Nothing placed yet; `output_share` of all outputs counts as held at once."""
    num_units, num_devices = units.time_s.shape
    fanout = np.minimum(np.diff(units.reader_offsets), num_devices - 1)
    capacity = num_units + int(fanout.sum()) + 2
    widest = int(np.diff(units.input_offsets).max(initial=1)) * int(np.diff(resources.route_offsets).max(initial=1)) + 1
    return Schedule(
        starts=np.empty((resources.num_resources, capacity)),  # pages that are never written cost nothing
        ends=np.empty((resources.num_resources, capacity)),
        counts=np.zeros(resources.num_resources, dtype=np.int64),
        label_device=np.full(len(units.label_allowed), -1, dtype=np.int32),
        end_s=np.zeros(num_units),
        there_s=np.full((len(units.tensor_unit), num_devices), -1.0),
        used_bytes=np.zeros(len(resources.room_bytes)),
        need_bytes=units.label_resident_bytes + output_share * units.label_output_bytes,
        held=np.zeros(widest, dtype=np.int32),
        held_start=np.zeros(widest),
        held_end=np.zeros(widest),
    )


@inlined
def _first_gap(
    s: Schedule, holds: Ints, first: int, last: int, ready_s: float, duration_s: float, num_held: int
) -> float:
    """Earliest time from `ready_s` on at which all of `holds[first:last]` is free for `duration_s`."""
    time_s = ready_s
    if duration_s <= 0.0:
        return time_s
    moved = True
    while moved:
        moved = False
        for k in range(first, last):
            resource = holds[k]
            low, high = 0, s.counts[resource]
            while low < high:
                middle = (low + high) // 2
                if s.ends[resource, middle] > time_s:
                    high = middle
                else:
                    low = middle + 1
            while low < s.counts[resource] and s.starts[resource, low] < time_s + duration_s:
                time_s = s.ends[resource, low]
                low += 1
                moved = True
            for h in range(num_held):
                is_hit = s.held_start[h] < time_s + duration_s and s.held_end[h] > time_s
                if s.held[h] == resource and is_hit:
                    time_s = s.held_end[h]
                    moved = True
    return time_s


@inlined
def _occupy(s: Schedule, resource: int, start_s: float, end_s: float) -> None:
    """Add a busy interval, merged with those that it touches."""
    if end_s <= start_s:
        return
    count = s.counts[resource]
    at = count
    while at > 0 and s.starts[resource, at - 1] > start_s:
        at -= 1
    joins_left = at > 0 and s.ends[resource, at - 1] >= start_s
    joins_right = at < count and s.starts[resource, at] <= end_s
    if joins_left and joins_right:
        s.ends[resource, at - 1] = s.ends[resource, at]
        for k in range(at, count - 1):
            s.starts[resource, k] = s.starts[resource, k + 1]
            s.ends[resource, k] = s.ends[resource, k + 1]
        s.counts[resource] = count - 1
    elif joins_left:
        s.ends[resource, at - 1] = end_s
    elif joins_right:
        s.starts[resource, at] = start_s
    else:
        for k in range(count, at, -1):
            s.starts[resource, k] = s.starts[resource, k - 1]
            s.ends[resource, k] = s.ends[resource, k - 1]
        s.starts[resource, at] = start_s
        s.ends[resource, at] = end_s
        s.counts[resource] = count + 1


@inlined
def end_on(u: Units, h: HostResources, s: Schedule, unit: int, device: int, is_placed: bool) -> float:
    """When `unit` would end on `device`, its missing inputs sent there one after the other.

    With `is_placed` (its label and its inputs' labels are then decided) the unit and its transfers take their places.
    """
    num_devices = u.time_s.shape[1]
    arrival_s, num_held = 0.0, 0
    for edge in range(u.input_offsets[unit], u.input_offsets[unit + 1]):
        tensor = u.input_tensors[edge]
        producer = u.tensor_unit[tensor]
        home = s.label_device[u.label[producer]]
        if home < 0 or home == device:
            arrival_s = max(arrival_s, s.end_s[producer])
        elif s.there_s[tensor, device] >= 0.0:
            arrival_s = max(arrival_s, s.there_s[tensor, device])
        else:
            duration_s = h.latency_s[home, device] + u.tensor_bytes[tensor] * h.s_per_byte[home, device]
            pair = home * num_devices + device
            first, last = h.route_offsets[pair], h.route_offsets[pair + 1]
            start_s = _first_gap(s, h.route_holds, first, last, s.end_s[producer], duration_s, num_held)
            arrival_s = max(arrival_s, start_s + duration_s)
            if is_placed:
                s.there_s[tensor, device] = start_s + duration_s
                for k in range(first, last):
                    _occupy(s, h.route_holds[k], start_s, start_s + duration_s)
            else:
                for k in range(first, last):
                    s.held[num_held] = h.route_holds[k]
                    s.held_start[num_held] = start_s
                    s.held_end[num_held] = start_s + duration_s
                    num_held += 1
    first, last = h.device_offsets[device], h.device_offsets[device + 1]
    start_s = _first_gap(s, h.device_holds, first, last, arrival_s, u.time_s[unit, device], num_held)
    end_s: float = start_s + u.time_s[unit, device]
    if is_placed:
        s.end_s[unit] = end_s
        for k in range(first, last):
            _occupy(s, h.device_holds[k], start_s, end_s)
    return end_s


@inlined
def shortage_bytes(u: Units, h: HostResources, s: Schedule, unit: int, device: int) -> float:
    """Bytes that `device` lacks for `unit`, its label and the undecided sources that come with it; 0 if it fits."""
    if s.label_device[u.label[unit]] >= 0:
        return 0.0
    need: float = s.need_bytes[u.label[unit]]
    for edge in range(u.input_offsets[unit], u.input_offsets[unit + 1]):
        label = u.label[u.tensor_unit[u.input_tensors[edge]]]
        if s.label_device[label] < 0 and label != u.label[unit] and u.label_allowed[label, device]:
            need += s.need_bytes[label]
    account = h.account[device]
    shortage: float = max(0.0, s.used_bytes[account] + need - h.room_bytes[account])
    return shortage


@inlined
def _decide(u: Units, h: HostResources, s: Schedule, label: int, device: int) -> None:
    if s.label_device[label] < 0:
        if not u.label_allowed[label, device]:
            for other in range(u.label_allowed.shape[1]):
                if u.label_allowed[label, other]:
                    device = other
                    break
        s.label_device[label] = device
        s.used_bytes[h.account[device]] += s.need_bytes[label]


@inlined
def place_unit(u: Units, h: HostResources, s: Schedule, unit: int, device: int) -> None:
    """Put `unit` on `device`, with the undecided sources that it reads."""
    _decide(u, h, s, u.label[unit], device)
    for edge in range(u.input_offsets[unit], u.input_offsets[unit + 1]):
        _decide(u, h, s, u.label[u.tensor_unit[u.input_tensors[edge]]], device)
    end_on(u, h, s, unit, s.label_device[u.label[unit]], True)


@inlined
def may_use(u: Units, h: HostResources, s: Schedule, unit: int, usable: Bools) -> None:
    """Sets `usable` (D,): where `unit` may go and fits; where it fits nowhere, the device with the least shortage."""
    label = u.label[unit]
    best, least = -1, np.inf
    fits = False
    for device in range(len(usable)):
        usable[device] = False
        if s.label_device[label] >= 0:
            usable[device] = device == s.label_device[label]
            fits = True
        elif u.label_allowed[label, device]:
            shortage = shortage_bytes(u, h, s, unit, device)
            usable[device] = shortage == 0.0
            fits = fits or usable[device]
            if shortage < least:
                best, least = device, shortage
    if not fits:
        usable[max(best, 0)] = True


@kernel
def schedule_in_order(u: Units, h: HostResources, s: Schedule, order: Longs, bias_s: Floats, wanted: Ints) -> None:
    """Every unit in turn goes where its end plus `bias_s[unit, device]` is least, or where it is `wanted`.

    Args:
        u: the units.
        h: the host.
        s: a new schedule.
        order: (U,) units, each after those that it reads; sources are passed over.
        bias_s: (U, D) added to the end of a unit on a device.
        wanted: (U,) the device of units that have no choice, if they may and fit; else -1.
    """
    num_devices = u.time_s.shape[1]
    usable = np.zeros(num_devices, dtype=np.bool_)
    for unit in order:
        if u.is_source[unit]:
            continue
        may_use(u, h, s, unit, usable)
        best, best_s = -1, np.inf
        for device in range(num_devices):
            if usable[device]:
                value_s = end_on(u, h, s, unit, device, False) + bias_s[unit, device]
                if device == wanted[unit]:
                    value_s = -1.0
                if value_s < best_s:
                    best, best_s = device, value_s
        place_unit(u, h, s, unit, best)


def unit_devices(units: Units, resources: HostResources, schedule: Schedule) -> NDArray[np.int32]:
    """(U,) int32; what no unit reads or follows goes to the allowed device with the most room."""
    for label in np.flatnonzero(schedule.label_device < 0).tolist():
        room = (resources.room_bytes - schedule.used_bytes)[resources.account]
        device = int(np.argmax(np.where(units.label_allowed[label], room, -np.inf)))
        schedule.label_device[label] = device
        schedule.used_bytes[resources.account[device]] += schedule.need_bytes[label]
    return schedule.label_device[units.label]
