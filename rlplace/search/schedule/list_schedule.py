"""The arithmetic of list scheduling, once: the end of a unit on a device, and the resources that it holds when it is
placed.

`Units` (ops, or groups of ops) are placed on the devices of `HostResources`, one after the other, in a `Schedule`.
Every list scheduler, `Greedy`, the estimates of a placement and the schedules that learners step through call `end_on`.

Devices are read from int32 arrays and passed as int64 (`int(np.int64(...))`): numba compiles a kernel for each type.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs import Grouping
from rlplace.jit import Block, Bools, BoolTable, Floats, FloatTable, Ints, Longs, inlined, kernel
from rlplace.measure import Host, Problem
from rlplace.measure.simulate.compiled_problem import JOB, Compiled, compile_problem, offsets_of, turns
from rlplace.measure.simulate.transfer_time import transfer_seconds
from rlplace.search.groupings import allowed_devices


class Units(Block):
    """A DAG of U units to place; indices are a topological order.

    Attributes:
        time_s: (U, D) float64.
        is_source: (U,) bool: there at time 0, placed with its first reader.
        label: (U,) int32: units of one label share a device; labels are 0..C-1 and every unit has one.
        label_allowed: (C, D) bool.
        label_resident_bytes: (C,) float64, parameters, inputs and optimizer state.
        label_output_bytes: (C,) float64, all that its ops produce.
        tensor_unit: (T,) int32, the producer of each tensor, ascending.
        tensor_bytes: (T,) float64.
        input_offsets: (U + 1,) int32.
        input_tensors: (E,) int32.
        output_offsets: (U + 1,) int32, tensors of each unit.
        reader_offsets: (T + 1,) int32.
        readers: (E,) int32, units that read each tensor.
        turn: (U,) float64, how much earlier than its priority each comes, in multiples of the largest (`turns`).
    """

    time_s: FloatTable
    is_source: Bools
    label: Ints
    label_allowed: BoolTable
    label_resident_bytes: Floats
    label_output_bytes: Floats
    tensor_unit: Ints
    tensor_bytes: Floats
    input_offsets: Ints
    input_tensors: Ints
    output_offsets: Ints
    reader_offsets: Ints
    readers: Ints
    turn: Floats


class HostResources(Block):
    """Resources that ops and transfers hold while they run. Resources are devices 0..D-1, then links.

    Attributes:
        latency_s, s_per_byte: (D, D) float64, of each route.
        blocks: (D, D) bool, where a copy from a device keeps the other busy.
        occupies: (D, D) bool, which devices a device keeps busy: itself and, of a gang, its members.
        device_offsets, device_holds: CSR over devices: the devices that an op on it holds (a gang: its members).
        route_offsets, route_holds: CSR over source * D + destination: links, and the devices that a copy blocks.
        num_resources: devices and links.
        account: (D,) int32, the memory of each device (its own, or its pool's).
        room_bytes: (accounts,) float64, capacity without contexts.
    """

    latency_s: FloatTable
    s_per_byte: FloatTable
    blocks: BoolTable
    occupies: BoolTable
    device_offsets: Ints
    device_holds: Ints
    route_offsets: Ints
    route_holds: Ints
    num_resources: int
    account: Ints
    room_bytes: Floats


class Schedule(NamedTuple):
    """A schedule under construction.

    Attributes:
        home: (C,) int32, the device of each label; -1 undecided: the output of such a unit is on every reader's device.
        end_s: (U,) float64.
        free_s: (D,) float64, when the last op that occupies a device ends; kept where ops are appended.
        there_s: (T, D) float64, when a copy of a tensor is on a device; -1 where there is none.
    """

    home: Ints
    end_s: Floats
    free_s: Floats
    there_s: FloatTable


class Gaps(Block):
    """Busy intervals of every resource, so that ops and transfers can be inserted between others.

    Attributes:
        starts, ends: (resources, capacity) float64, in order of time; touching ones are merged.
        counts: (resources,) int64.
        held, held_start, held_end: the links that transfers of the present unit would hold.
    """

    starts: FloatTable
    ends: FloatTable
    counts: Longs
    held: Ints
    held_start: Floats
    held_end: Floats


def new_schedule(units: Units) -> Schedule:
    """Nothing placed yet."""
    num_units, num_devices = units.time_s.shape
    return Schedule(
        home=np.full(len(units.label_allowed), -1, dtype=np.int32),
        end_s=np.zeros(num_units),
        free_s=np.zeros(num_devices),
        there_s=np.full((len(units.tensor_unit), num_devices), -1.0),
    )


def new_gaps(units: Units, resources: HostResources) -> Gaps:
    """Nothing busy yet."""
    num_units, num_devices = units.time_s.shape
    fanout = np.minimum(np.diff(units.reader_offsets), num_devices - 1)
    capacity = num_units + int(fanout.sum()) + 2
    widest = int(np.diff(units.input_offsets).max(initial=1)) * int(np.diff(resources.route_offsets).max(initial=1)) + 1
    return Gaps(
        starts=np.empty((resources.num_resources, capacity)),  # pages that are never written cost nothing
        ends=np.empty((resources.num_resources, capacity)),
        counts=np.zeros(resources.num_resources, dtype=np.int64),
        held=np.zeros(widest, dtype=np.int32),
        held_start=np.zeros(widest),
        held_end=np.zeros(widest),
    )


@inlined
def total(row: Floats) -> float:
    """The sum of a row, from the first to the last; numba takes a second to compile `row.sum()`."""
    found = 0.0
    for value in row:
        found += value
    return found


@inlined
def end_on(
    u: Units, h: HostResources, s: Schedule, insert: Gaps | None, unit: int, device: int, is_placed: bool
) -> float:
    """When `unit` would end on `device`, after its inputs have been sent there.

    Without `insert` everything is appended (Topcuoglu, Hariri, Wu 2002, without insertion): an op starts when its
    device is free, a copy as soon as its tensor exists, links have no queues, and a copy that blocks its destination
    takes the device's time. With `insert`, its transfers, one after the other, and then the unit take the first gap
    that is long enough on all that they hold (on links: Sinnen and Sousa, "Communication contention in task
    scheduling", 2005); with `is_placed` they take their places.
    """
    num_devices = len(h.occupies)
    ready_s, copying_s, num_held = 0.0, 0.0, 0
    if insert is None:
        for other in range(num_devices):
            if h.occupies[device, other] or h.occupies[other, device]:
                ready_s = max(ready_s, s.free_s[other])
    for edge in range(u.input_offsets[unit], u.input_offsets[unit + 1]):
        tensor = u.input_tensors[edge]
        producer = u.tensor_unit[tensor]
        home = s.home[u.label[producer]]
        if home < 0 or home == device:
            ready_s = max(ready_s, s.end_s[producer])
            continue
        if s.there_s[tensor, device] >= 0.0:
            ready_s = max(ready_s, s.there_s[tensor, device])
            continue
        start_s = s.end_s[producer]
        transfer_s = transfer_seconds(h.latency_s, h.s_per_byte, (home, device), u.tensor_bytes[tensor])
        if insert is None:
            if h.blocks[home, device]:
                copying_s += transfer_s
                transfer_s = 0.0
        else:
            pair = home * num_devices + device
            first, last = h.route_offsets[pair], h.route_offsets[pair + 1]
            start_s = _first_gap(insert, h.route_holds, first, last, start_s, transfer_s, num_held)
            if is_placed:
                s.there_s[tensor, device] = start_s + transfer_s
                _occupy(insert, h.route_holds, first, last, start_s, start_s + transfer_s)
            else:
                for k in range(first, last):
                    insert.held[num_held] = h.route_holds[k]
                    insert.held_start[num_held] = start_s
                    insert.held_end[num_held] = start_s + transfer_s
                    num_held += 1
        ready_s = max(ready_s, start_s + transfer_s)
    if insert is None:
        ready_s += copying_s
    else:
        first, last = h.device_offsets[device], h.device_offsets[device + 1]
        ready_s = _first_gap(insert, h.device_holds, first, last, ready_s, u.time_s[unit, device], num_held)
        if is_placed:
            _occupy(insert, h.device_holds, first, last, ready_s, ready_s + u.time_s[unit, device])
    end_s: float = ready_s + u.time_s[unit, device]
    return end_s


@inlined
def append(u: Units, h: HostResources, s: Schedule, unit: int, device: int, end_s: float) -> None:
    """`unit` runs on `device` until `end_s`, as `end_on` without insertion has it."""
    s.end_s[unit] = end_s
    for other in range(len(h.occupies)):
        if h.occupies[device, other]:
            s.free_s[other] = end_s
    for edge in range(u.input_offsets[unit], u.input_offsets[unit + 1]):
        tensor = u.input_tensors[edge]
        home = s.home[u.label[u.tensor_unit[tensor]]]
        if home >= 0 and home != device and s.there_s[tensor, device] < 0.0:
            s.there_s[tensor, device] = end_s  # or earlier: until then the device is busy in any case


@inlined
def add_busy(h: HostResources, busy_s: Floats, device: int, seconds: float) -> None:
    """Adds `seconds` to `busy_s` (D,) of every device that `device` keeps busy."""
    for other in range(len(busy_s)):
        if h.occupies[device, other]:
            busy_s[other] += seconds


@inlined
def _first_gap(
    gaps: Gaps, holds: Ints, first: int, last: int, ready_s: float, duration_s: float, num_held: int
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
            low, high = 0, gaps.counts[resource]
            while low < high:
                middle = (low + high) // 2
                if gaps.ends[resource, middle] > time_s:
                    high = middle
                else:
                    low = middle + 1
            while low < gaps.counts[resource] and gaps.starts[resource, low] < time_s + duration_s:
                time_s = gaps.ends[resource, low]
                low += 1
                moved = True
            for held in range(num_held):
                is_hit = gaps.held_start[held] < time_s + duration_s and gaps.held_end[held] > time_s
                if gaps.held[held] == resource and is_hit:
                    time_s = gaps.held_end[held]
                    moved = True
    return time_s


@inlined
def _occupy(gaps: Gaps, holds: Ints, first: int, last: int, start_s: float, end_s: float) -> None:
    """Adds a busy interval to each of `holds[first:last]`, merged with those that it touches."""
    if end_s <= start_s:
        return
    for k in range(first, last):
        starts, ends, count = gaps.starts[holds[k]], gaps.ends[holds[k]], gaps.counts[holds[k]]
        at = count
        while at > 0 and starts[at - 1] > start_s:
            at -= 1
        joins_left = at > 0 and ends[at - 1] >= start_s
        joins_right = at < count and starts[at] <= end_s
        if joins_left and joins_right:
            ends[at - 1] = ends[at]
            for place in range(at, count - 1):
                starts[place], ends[place] = starts[place + 1], ends[place + 1]
            gaps.counts[holds[k]] = count - 1
        elif joins_left:
            ends[at - 1] = end_s
        elif joins_right:
            starts[at] = start_s
        else:
            for place in range(count, at, -1):
                starts[place], ends[place] = starts[place - 1], ends[place - 1]
            starts[at], ends[at] = start_s, end_s
            gaps.counts[holds[k]] = count + 1


class Memory(Block):
    """The bytes that each device holds.

    Attributes:
        used_bytes: (accounts,) float64.
        need_bytes: (C,) float64, the bytes of each label where it is placed.
    """

    used_bytes: Floats
    need_bytes: Floats


def new_memory(units: Units, resources: HostResources, output_share: float) -> Memory:
    """Nothing held yet; `output_share` of all outputs counts as held at once."""
    need_bytes = units.label_resident_bytes + output_share * units.label_output_bytes
    return Memory(np.zeros(len(resources.room_bytes)), need_bytes)


@inlined
def may_use(u: Units, h: HostResources, s: Schedule, m: Memory, unit: int, usable: Bools) -> None:
    """Sets `usable` (D,): where `unit` may go and fits; where it fits nowhere, the device with the least shortage.

    Undecided sources that the unit reads come with it.
    """
    label = u.label[unit]
    if s.home[label] >= 0:
        usable[:] = False
        usable[s.home[label]] = True
        return
    best, least = 0, np.inf
    for device in range(len(usable)):
        usable[device] = False
        if not u.label_allowed[label, device]:
            continue
        need: float = m.need_bytes[label]
        for edge in range(u.input_offsets[unit], u.input_offsets[unit + 1]):
            source = u.label[u.tensor_unit[u.input_tensors[edge]]]
            if s.home[source] < 0 and source != label and u.label_allowed[source, device]:
                need += m.need_bytes[source]
        account = h.account[device]
        shortage = max(0.0, m.used_bytes[account] + need - h.room_bytes[account])
        usable[device] = shortage == 0.0
        if shortage < least:
            best, least = device, shortage
    usable[best] = True


@inlined
def _decide(u: Units, h: HostResources, s: Schedule, m: Memory, label: int, device: int) -> None:
    """Puts a label on `device`, or on the first one where it may be."""
    if s.home[label] < 0:
        if not u.label_allowed[label, device]:
            for other in range(u.label_allowed.shape[1]):
                if u.label_allowed[label, other]:
                    device = other
                    break
        s.home[label] = device
        m.used_bytes[h.account[device]] += m.need_bytes[label]


@inlined
def place_unit(u: Units, h: HostResources, s: Schedule, m: Memory, insert: Gaps | None, unit: int, device: int) -> None:
    """Puts `unit` on `device`, with the undecided sources that it reads."""
    end_s = 0.0
    if insert is None:
        end_s = end_on(u, h, s, insert, unit, device, False)
    _decide(u, h, s, m, u.label[unit], device)
    for edge in range(u.input_offsets[unit], u.input_offsets[unit + 1]):
        _decide(u, h, s, m, u.label[u.tensor_unit[u.input_tensors[edge]]], device)
    if insert is None:
        append(u, h, s, unit, device, end_s)
    else:
        s.end_s[unit] = end_on(u, h, s, insert, unit, int(np.int64(s.home[u.label[unit]])), True)


@kernel
def schedule_in_order(
    u: Units, h: HostResources, s: Schedule, m: Memory, insert: Gaps | None, order: Longs, bias_s: Floats, wanted: Ints
) -> None:
    """Every unit in turn goes where its end plus `bias_s[unit, device]` is least, or where it is `wanted`.

    Args:
        u: the units.
        h: the host.
        s: a new schedule.
        m: the held bytes; nothing yet.
        insert: the gaps of all resources, or None to append.
        order: (U,) units, each after those that it reads; sources are passed over.
        bias_s: (U, D) added to the end of a unit on a device.
        wanted: (U,) the device of units that have no choice, if they may and fit; else -1.
    """
    num_devices = u.time_s.shape[1]
    usable = np.zeros(num_devices, dtype=np.bool_)
    for unit in order:
        if u.is_source[unit]:
            continue
        may_use(u, h, s, m, unit, usable)
        best, best_s = -1, np.inf
        for device in range(num_devices):
            if usable[device]:
                value_s = end_on(u, h, s, insert, unit, device, False) + bias_s[unit, device]
                if device == wanted[unit]:
                    value_s = -1.0
                if value_s < best_s:
                    best, best_s = device, value_s
        place_unit(u, h, s, m, insert, unit, best)


def op_units(problem: Problem, labels: Grouping | None = None) -> Units:
    """Every op is a unit; ops of one group of `labels` share a label, by default those that live together."""
    graph = problem.graph
    if labels is None:
        alone = int(graph.colocation.max(initial=-1)) + 1 + np.arange(graph.num_ops)
        place = np.unique(np.where(graph.colocation >= 0, graph.colocation, alone), return_inverse=True)[1]
        labels = Grouping(place.astype(np.int32))
    label = labels.op_group
    reader_offsets, readers = graph.readers
    return Units(
        time_s=np.where(graph.is_source[:, None], 0.0, problem.costs.op_time_s),
        is_source=graph.is_source,
        label=label,
        label_allowed=allowed_devices(problem, labels),
        label_resident_bytes=_sums(label, resident_bytes(problem)),
        label_output_bytes=_sums(label, np.where(graph.is_source, 0, graph.output_bytes)),
        tensor_unit=graph.tensor_op,
        tensor_bytes=graph.tensor_bytes.astype(np.float64),
        input_offsets=graph.input_offsets,
        input_tensors=graph.input_tensors,
        output_offsets=graph.output_offsets,
        reader_offsets=reader_offsets,
        readers=readers,
        turn=turns(problem),
    )


def group_units(problem: Problem) -> Units:
    """Every group is a unit that takes the time of its ops.

    Groups may read each other both ways. A tensor that goes from a later group to an earlier one is turned round, so
    that the two still pay for being apart and the graph has no cycle: the schedule of groups is a guide, the step time
    comes from the ops.
    """
    graph, group, count = problem.graph, problem.grouping.op_group, problem.grouping.num_groups
    time_s = np.zeros((count, problem.host.num_devices))
    np.add.at(time_s, group, np.where(graph.is_source[:, None], 0.0, problem.costs.op_time_s))
    pairs = np.unique(np.stack((graph.input_tensors, group[graph.edge_op]), axis=1).astype(np.int64), axis=0)
    producer = group[graph.tensor_op[pairs[:, 0]]].astype(np.int64)
    tensor, reader = pairs[producer != pairs[:, 1]].T
    producer = producer[producer != pairs[:, 1]]
    turned = producer > reader
    # a tensor read by several later groups stays one; each turned one is a tensor of its own
    key = np.where(turned, graph.num_tensors + np.arange(len(tensor)), tensor)
    low, high = np.minimum(producer, reader), np.maximum(producer, reader)
    keys, first, which = np.unique(key, return_index=True, return_inverse=True)
    by_producer = np.argsort(low[first], kind="stable")
    edges = np.unique(np.stack((high, np.argsort(by_producer)[which]), axis=1), axis=0)
    tensor_unit = low[first][by_producer].astype(np.int32)
    tensor_bytes = graph.tensor_bytes[tensor[first][by_producer]].astype(np.float64)
    by_tensor = np.lexsort((edges[:, 0], edges[:, 1]))
    turn = np.full(count, -np.inf)
    np.maximum.at(turn, group, turns(problem))  # that of the op which comes first
    return Units(
        time_s=time_s,
        is_source=~np.isin(np.arange(count), group[~graph.is_source]),
        label=np.arange(count, dtype=np.int32),
        label_allowed=np.asarray(problem.group_allowed),
        label_resident_bytes=_sums(group, resident_bytes(problem)),
        label_output_bytes=_sums(group, np.where(graph.is_source, 0, graph.output_bytes)),
        tensor_unit=tensor_unit,
        tensor_bytes=tensor_bytes,
        input_offsets=offsets_of(edges[:, 0], count),
        input_tensors=edges[:, 1].astype(np.int32),
        output_offsets=offsets_of(tensor_unit, count),
        reader_offsets=offsets_of(edges[:, 1], len(keys)),
        readers=edges[by_tensor, 0].astype(np.int32),
        turn=turn,
    )


def unit_levels(problem: Problem) -> list[Units]:
    """Ops as units, then groups as units where they are fewer."""
    is_coarser = problem.grouping.num_groups < problem.graph.num_ops
    return [op_units(problem), *([group_units(problem)] if is_coarser else ())]


def next_allowed(units: Units, wanted: NDArray[np.int32]) -> NDArray[np.int32]:
    """(C,) int32: for every label the device that is `wanted`, or the next one where it may be."""
    num_devices = units.time_s.shape[1]
    turns = (wanted[:, None] + np.arange(num_devices)) % num_devices
    step = np.take_along_axis(units.label_allowed, turns, axis=1).argmax(axis=1)
    return np.asarray(turns[np.arange(len(wanted)), step], dtype=np.int32)


def resident_bytes(problem: Problem) -> NDArray[np.int64]:
    """(N,) int64: bytes that an op keeps where it is when a step starts: its outputs if it is a source, its state."""
    graph = problem.graph
    return np.asarray(np.where(graph.is_source, graph.output_bytes, 0) + graph.state_bytes)


def _sums(label: Ints, weights: NDArray[np.int64]) -> Floats:
    return np.bincount(label, weights=weights).astype(np.float64)


def busy_devices(host: Host) -> NDArray[np.bool_]:
    """(D, D) bool: the devices that each device keeps busy, itself and, of a gang, its members."""
    occupies = np.eye(host.num_devices, dtype=np.bool_)
    for index, device in enumerate(host.devices):
        occupies[index, [host.device_index[member] for member in device.members]] = True
    return occupies


def host_resources(problem: Problem) -> HostResources:
    """The host's devices and routes as resources that are held.

    Raises:
        InvalidValue: a host that cannot be simulated.
    """
    compiled = compile_problem(problem)
    num_devices = compiled.num_devices
    atoms = [[a for a in range(num_devices) if int(mask) >> a & 1] for mask in compiled.atoms]
    holds = [_route_holds(compiled, atoms, pair) for pair in range(num_devices * num_devices)]
    account = np.where(compiled.pool >= 0, compiled.pool, np.arange(num_devices)).astype(np.int32)
    room = compiled.capacity_bytes.astype(np.float64)
    np.subtract.at(room, account, compiled.context_bytes)
    return HostResources(
        latency_s=problem.transfer_latency_s,
        s_per_byte=problem.transfer_s_per_byte,
        blocks=(compiled.route_kind == JOB).reshape(num_devices, num_devices),
        occupies=busy_devices(problem.host),
        device_offsets=np.cumsum([0, *map(len, atoms)]).astype(np.int32),
        device_holds=np.array([a for device in atoms for a in device], dtype=np.int32),
        route_offsets=np.cumsum([0, *map(len, holds)]).astype(np.int32),
        route_holds=np.array([resource for route in holds for resource in route], dtype=np.int32),
        num_resources=num_devices + compiled.num_links,
        account=account,
        room_bytes=room,
    )


def _route_holds(compiled: Compiled, atoms: list[list[int]], pair: int) -> list[int]:
    source, destination = divmod(pair, compiled.num_devices)
    links = compiled.route_links[compiled.route_offsets[pair] : compiled.route_offsets[pair + 1]]
    held = {compiled.num_devices + link for link in links.tolist()}
    if compiled.route_kind[pair] == JOB:
        held |= set(atoms[destination])
    if compiled.route_blocks_source[pair]:
        held |= set(atoms[source])
    return sorted(held)
