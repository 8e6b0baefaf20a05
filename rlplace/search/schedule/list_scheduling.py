"""List scheduling with insertion on devices and links: where a unit would end, and what it holds once it is placed.

Devices and links are resources with busy intervals. An op holds its device (a gang: its members), a transfer its links
and the devices that it blocks; each takes the first gap that is long enough on all that it holds (insertion: Topcuoglu,
Hariri, Wu 2002; on links: Sinnen and Sousa, "Communication contention in task scheduling", 2005).

`heft`: heterogeneous earliest finish time, with insertion (Topcuoglu, Hariri, Wu 2002), on contended links.

`peft`: predict earliest finish time, a list scheduler that looks ahead by a table of optimistic costs.

`critical-path`: the critical path on one device, everything else where it ends first (CPOP).

`score_both`: what a list scheduler makes of ops and of groups, scored.

Ranks of units: the longest paths ahead of them and behind them, and the orders that follow.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.paths import longest_after, longest_before
from rlplace.jit import Bools, Floats, Ints, Longs, inlined, kernel
from rlplace.search.schedule.units import HostResources, Units, group_units, host_resources, op_units
from rlplace.search.task import Task


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


def solve_heft(task: Task) -> None:
    """Scores `heft` of ops and of groups."""
    score_both(task, lambda units, resources, output_share: heft(units, resources, output_share)[0])


def heft(units: Units, resources: HostResources, output_share: float = 0.0) -> tuple[NDArray[np.int32], float]:
    """(U,) int32 devices, and the makespan of the schedule: units by upward rank, each where it ends first.

    The paper has a link of its own for every pair of processors and lets transfers overlap freely; here they wait for
    the links of their route, in gaps where there are any.

    Args:
        units: what is placed.
        resources: where.
        output_share: share of all outputs that counts as held at once.
    """
    schedule = new_schedule(units, resources, output_share)
    order = ready_order(units, upward(units, resources))
    nobody = np.full(len(order), -1, dtype=np.int32)
    schedule_in_order(units, resources, schedule, order, np.zeros_like(units.time_s), nobody)
    return unit_devices(units, resources, schedule), float(schedule.end_s.max(initial=0.0))


def solve_peft(task: Task) -> None:
    """Scores `peft` of ops and of groups."""
    score_both(task, lambda units, resources, output_share: peft(units, resources, output_share)[0])


def peft(units: Units, resources: HostResources, output_share: float = 0.0) -> tuple[NDArray[np.int32], float]:
    """(U,) int32 devices, and the makespan of the schedule (Arabnejad and Barbosa 2014).

    Units by the mean of their row of the table, each where its end plus its optimistic cost is least.

    Args:
        units: what is placed.
        resources: where.
        output_share: share of all outputs that counts as held at once.
    """
    table_s = optimistic_cost_s(units, resources)
    schedule = new_schedule(units, resources, output_share)
    order = ready_order(units, np.asarray(table_s.mean(axis=1)))
    schedule_in_order(units, resources, schedule, order, table_s, np.full(len(order), -1, dtype=np.int32))
    return unit_devices(units, resources, schedule), float(schedule.end_s.max(initial=0.0))


def optimistic_cost_s(units: Units, resources: HostResources) -> NDArray[np.float64]:
    """(U, D) float64: shortest way from the end of a unit on a device to the end, every reader on its best device.

    Equation 2 of the paper: the largest over readers j of the least over devices q of the cost of j on q, its time
    there, and the mean transfer unless q is the unit's device.
    """
    return _optimistic(units, mean_transfer_s(units, resources))


@kernel
def _optimistic(u: Units, transfer_s: Floats) -> Floats:
    num_units, num_devices = u.time_s.shape
    table_s = np.zeros((num_units, num_devices))
    for unit in range(num_units - 1, -1, -1):
        for tensor in range(u.output_offsets[unit], u.output_offsets[unit + 1]):
            for place in range(u.reader_offsets[tensor], u.reader_offsets[tensor + 1]):
                reader = u.readers[place]
                elsewhere_s = np.inf
                for q in range(num_devices):
                    if u.label_allowed[u.label[reader], q]:
                        elsewhere_s = min(elsewhere_s, table_s[reader, q] + u.time_s[reader, q] + transfer_s[tensor])
                for p in range(num_devices):
                    here_s = elsewhere_s
                    if u.label_allowed[u.label[reader], p]:
                        here_s = min(here_s, table_s[reader, p] + u.time_s[reader, p])
                    table_s[unit, p] = max(table_s[unit, p], here_s)
    return table_s


def solve_critical_path(task: Task) -> None:
    """Scores `critical_path` of ops and of groups."""
    score_both(task, lambda units, resources, output_share: critical_path(units, resources, output_share)[0])


def critical_path(units: Units, resources: HostResources, output_share: float = 0.0) -> tuple[NDArray[np.int32], float]:
    """(U,) int32 devices, and the makespan of the schedule (CPOP: Topcuoglu, Hariri, Wu 2002, section 4.2).

    Units are given out as they become ready, the longest path through them first. Those on the critical path go to the
    device that runs all of it fastest among those where all of it may run, as far as they fit.

    Args:
        units: what is placed.
        resources: where.
        output_share: share of all outputs that counts as held at once.
    """
    above_s, below_s = downward(units, resources), upward(units, resources)
    path = longest_path(units, above_s, below_s, mean_transfer_s(units, resources))
    wanted = np.full(len(units.label), -1, dtype=np.int32)
    may_run = units.label_allowed[units.label[path]].all(axis=0)
    if len(path) and may_run.any():
        wanted[path] = int(np.argmin(np.where(may_run, units.time_s[path].sum(axis=0), np.inf)))
    schedule = new_schedule(units, resources, output_share)
    order = ready_order(units, above_s + below_s)
    schedule_in_order(units, resources, schedule, order, np.zeros_like(units.time_s), wanted)
    return unit_devices(units, resources, schedule), float(schedule.end_s.max(initial=0.0))


def longest_path(
    units: Units, above_s: NDArray[np.float64], below_s: NDArray[np.float64], transfer_s: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Units of one critical path, from its first to its last; sources left out.

    Args:
        units: the DAG.
        above_s: (U,) longest path to the start of each unit.
        below_s: (U,) longest path from its start.
        transfer_s: (T,) mean transfer times.
    """
    jobs = np.flatnonzero(~units.is_source)
    if not len(jobs):
        return jobs
    unit = int(jobs[np.argmax((above_s + below_s)[jobs])])
    path = [unit]
    while (before := _before(units, path[0], above_s, transfer_s)) >= 0:
        path.insert(0, before)
    while (after := _after(units, path[-1], below_s, transfer_s)) >= 0:
        path.append(after)
    units_on_path = np.array(path, dtype=np.int64)
    return units_on_path[~units.is_source[units_on_path]]


def _before(units: Units, unit: int, above_s: NDArray[np.float64], transfer_s: NDArray[np.float64]) -> int:
    tensors = units.input_tensors[units.input_offsets[unit] : units.input_offsets[unit + 1]]
    if not len(tensors):
        return -1
    producers = units.tensor_unit[tensors]
    return int(producers[np.argmax(above_s[producers] + units.time_s[producers].mean(axis=1) + transfer_s[tensors])])


def _after(units: Units, unit: int, below_s: NDArray[np.float64], transfer_s: NDArray[np.float64]) -> int:
    best, best_s = -1, -1.0
    for tensor in range(units.output_offsets[unit], units.output_offsets[unit + 1]):
        readers = units.readers[units.reader_offsets[tensor] : units.reader_offsets[tensor + 1]]
        if len(readers) and transfer_s[tensor] + below_s[readers].max() > best_s:
            best, best_s = int(readers[np.argmax(below_s[readers])]), float(transfer_s[tensor] + below_s[readers].max())
    return best


OUTPUT_SHARES = (0.0, 0.25, 0.5, 1.0)
"""How much of all outputs a scheduler counts as held at once, from hopeful to safe; the simulator knows the truth."""

Place = Callable[[Units, HostResources, float], NDArray[np.int32]]
"""From units, resources and the share of outputs held at once to the device of each unit, (U,) int32."""


def score_both(task: Task, place: Place) -> None:
    """Scores what `place` makes of ops and of groups, for every share of `OUTPUT_SHARES`; equal answers count once."""
    problem = task.problem
    resources = host_resources(problem)
    ops = op_units(problem)
    found = [place(ops, resources, share) for share in OUTPUT_SHARES]
    if problem.grouping.num_groups < problem.graph.num_ops:
        groups = group_units(problem)
        found += [problem.grouping.expand(place(groups, resources, share)) for share in OUTPUT_SHARES]
    rows = np.stack(found).astype(np.int32)
    first = np.sort(np.unique(rows, axis=0, return_index=True)[1])
    task.score(rows[first])


def mean_transfer_s(units: Units, resources: HostResources) -> NDArray[np.float64]:
    """(T,) float64: transfer time of each tensor, the mean over ordered pairs of distinct devices."""
    num_devices = units.time_s.shape[1]
    pairs = max(num_devices * (num_devices - 1), 1)
    latency_s, s_per_byte = float(resources.latency_s.sum()) / pairs, float(resources.s_per_byte.sum()) / pairs
    return np.asarray(latency_s + units.tensor_bytes * s_per_byte)


def upward(units: Units, resources: HostResources) -> NDArray[np.float64]:
    """(U,) float64: longest path from the start of each unit to the end (HEFT, equation 6), with mean times."""
    mean_s = np.asarray(units.time_s.mean(axis=1))
    return mean_s + longest_after(mean_s, *_edges(units, resources))


def downward(units: Units, resources: HostResources) -> NDArray[np.float64]:
    """(U,) float64: longest path from the start of the step to the start of each unit (HEFT, equation 8)."""
    return longest_before(np.asarray(units.time_s.mean(axis=1)), *_edges(units, resources))


def in_turn(units: Units, priority: NDArray[np.float64]) -> NDArray[np.float64]:
    """(U,) float64: `priority` with the op order of the problem in it; the same where the step is not cut."""
    return np.asarray(priority + units.turn * priority.max(initial=0.0))


def ready_order(units: Units, priority: NDArray[np.float64]) -> NDArray[np.int64]:
    """(U,) int64: units as a queue of ready ones gives them out, by `in_turn` of priorities, ties by index."""
    missing = np.diff(units.input_offsets).tolist()
    offsets, reader_offsets, readers = units.output_offsets.tolist(), units.reader_offsets.tolist(), units.readers
    keys = (-in_turn(units, priority)).tolist()
    ready = [(keys[unit], unit) for unit, count in enumerate(missing) if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, unit = heapq.heappop(ready)
        order.append(unit)
        for reader in readers[reader_offsets[offsets[unit]] : reader_offsets[offsets[unit + 1]]].tolist():
            missing[reader] -= 1
            if missing[reader] == 0:
                heapq.heappush(ready, (keys[reader], reader))
    return np.array(order, dtype=np.int64)


def _edges(units: Units, resources: HostResources) -> tuple[Ints, Ints, NDArray[np.float64]]:
    """Offsets, producers and mean transfer time of the edges into each unit."""
    tensors = units.input_tensors
    return units.input_offsets, units.tensor_unit[tensors], mean_transfer_s(units, resources)[tensors]
