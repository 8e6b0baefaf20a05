"""Planning where devices and transfers do not block each other: the fast path of docs/step-time-model.md.

Since transfers that share a link are served in order of request, each one's start is known when it is requested: the
latest end of the transfer before it on each of its links. Ready ops wait in one bitmap a device, by priority.
A branch that would be predicted wrong half of the time is replaced by arithmetic on a flag of 0 or 1.

There are two planners. Searches spend most of their time in this one; kernel_general.py plans on any host, where a
copy may have to wait for a device and so has no start that is known at its request. The general planner could plan here
too, but its queues would make the common case slower. Where both apply, tests hold them equal to the bit. They share
the bitmaps and `sort` below; lines that look alike in the two loops differ, as the general planner branches on a
condition where this one computes with its flag.

`count_updates` and `waiting_updates` follow in-place updates, which wait for the other readers, the transfers and the
earlier updates of their tensor. `least_seconds` is a lower bound on a step, by which slow placements are left before
they are simulated to their end.
"""

from __future__ import annotations

import numpy as np

from rlplace.jit import Floats, Ints, Longs, inlined, lowest_bit, part, pointer
from rlplace.measure.simulate.compiled_problem import (
    HANDOVER,
    POSITION,
    TRANSFERS,
    Compiled,
    FastScratch,
    Scratch,
)
from rlplace.measure.simulate.transfer_time import transfer_seconds


@part
def plan(
    p: Compiled, s: Scratch, f: FastScratch, placement: Ints, ranks: Ints, ops_by_rank: Ints, cutoff_s: float
) -> float:
    """Seconds of the planned step; the plan and its times are left in the scratch.

    Args:
        p: the problem: no gangs, no blocking transfers, no co-run slowdown, no relays.
        s, f: working memory.
        placement: (N,) int32, device of each op.
        ranks: (N,) int32, place of each op in order of priority.
        ops_by_rank: (N,) int32, op at each place.
        cutoff_s: a step that cannot end by then is left at once, infinite; where finite, after `least_seconds`.
    """
    n, num_devices, num_slots, most_links = p.num_ops, p.num_devices, p.num_slots, p.max_route_links
    op_time_s, output_offsets = pointer(p.op_time_s), pointer(p.output_offsets)
    reader_offsets, reader_ops = pointer(p.reader_offsets), pointer(p.reader_ops)
    route_kind, route_links, route_slot = pointer(p.route_kind), pointer(p.route_padded), pointer(p.route_slot)
    latency_s, s_per_byte = pointer(p.route_latency_s), pointer(p.route_s_per_byte)
    tensor_bytes = pointer(p.tensor_bytes)
    sequence, start_s, end_s = pointer(s.sequence), pointer(s.start_s), pointer(s.end_s)
    transfer_tensor, transfer_destination = pointer(s.transfer_tensor), pointer(s.transfer_destination)
    transfer_source = pointer(s.transfer_source)
    waiting, ended, arrived, found = pointer(s.waiting), pointer(s.ended), pointer(f.arrived), s.found
    leaf, middle, top = pointer(s.ready_leaf), pointer(s.ready_middle), pointer(s.ready_top)
    num_leaf, num_middle, num_top = p.num_leaf, p.num_middle, p.num_top
    slot_end_s, slot_bits = pointer(s.slot_end_s), pointer(s.slot_end_bits)
    slot_item, slot_tail, slot_next = pointer(s.slot_item), pointer(f.slot_tail), pointer(f.slot_next)
    follower, link_free_s, link_last = pointer(f.follower), pointer(s.link_free_s), pointer(f.link_last)
    has_handovers, has_updates = p.has_handovers, p.has_updates
    concerned, path_s, work_left_s = pointer(p.concerned), pointer(s.path_s), pointer(s.work_left_s)
    devices, rank, by_rank = pointer(placement), pointer(ranks), pointer(ops_by_rank)
    one = 1
    never = np.inf
    # The earliest end is looked for among integers, where `min` has no NaN to mind: read as int64, the bits of floats
    # that are not negative are in the same order as the floats. `never_bits` is infinity; the -1.0 behind the last
    # slot has its sign bit set, reads as a negative integer, and ends the loop over slots.
    never_bits = 0x7FF0000000000000
    s.slot_end_s[:] = never
    slot_end_s[num_slots] = -1.0
    f.slot_tail[:] = p.max_transfers
    s.link_free_s[:] = 0.0
    no_follower = p.max_transfers * most_links
    all_devices = (one << num_devices) - one
    idle = all_devices
    ready, num_ended = begin(p, s, placement, ranks)
    position = num_ended
    num_transfers = due = 0
    now = 0.0
    # One round per instant `now`. The state between rounds: bit d of `idle` and `ready` are devices that run no op and
    # that have a ready op; bit s of `due` are slots (devices, then first links) whose running item ends now.
    while True:
        starters = position
        num_arrived = 0
        # Phase 1: ops that have ended. Their readers on the same device come one input nearer; for each other device
        # that reads an output, one transfer is requested and, as links serve in order of request, fully timed.
        for a in range(num_ended):
            op = ended[a]
            source = devices[op]
            for t in range(output_offsets[op], output_offsets[op + 1]):
                elsewhere = 0
                for b in range(reader_offsets[t], reader_offsets[t + 1]):
                    reader = reader_ops[b]
                    e = devices[reader]
                    elsewhere |= one << e
                    here = int(e == source)
                    if has_handovers:
                        here |= int(route_kind[source * num_devices + e] == HANDOVER)
                    ready |= come_nearer(
                        leaf, middle, top, num_leaf, num_middle, num_top, waiting, rank, reader, e, here
                    )
                elsewhere &= ~(one << source)
                while elsewhere:
                    e = lowest_bit(elsewhere)
                    elsewhere &= elsewhere - 1
                    k = num_transfers
                    num_transfers += 1
                    transfer_tensor[k] = t
                    transfer_source[k] = source
                    transfer_destination[k] = e
                    pair = source * num_devices + e
                    if has_handovers and route_kind[pair] == HANDOVER:
                        start_s[n + k] = end_s[n + k] = now
                        sequence[position] = n + k
                        position += 1
                        continue
                    start = now
                    before = no_follower
                    for b in range(most_links):
                        link = route_links[pair * most_links + b]
                        free = link_free_s[link]
                        before = link_last[link] if free > start else before
                        start = free if free > start else start
                    end = start + transfer_seconds(latency_s, s_per_byte, pair, tensor_bytes[t])
                    for b in range(most_links):
                        place = k * most_links + b
                        link = route_links[pair * most_links + b]
                        link_free_s[link] = end
                        link_last[link] = place
                        follower[place] = -1
                    start_s[n + k] = start
                    end_s[n + k] = end
                    follower[before] = k
                    sequence[position] = n + k
                    position += before == no_follower
                    slot = route_slot[pair]
                    slot_next[k] = -1
                    slot_next[slot_tail[slot]] = k
                    slot_tail[slot] = k
                    slot_item[slot] = k if slot_end_s[slot] == never else slot_item[slot]
                    slot_end_s[slot] = min(slot_end_s[slot], end)
                    due |= int(end == now) << slot
        # Phase 2: transfers that end now, also those of no duration that phase 1 has just requested. The next one of
        # the slot takes its place, readers at the destination come nearer, and followers on its links start.
        due &= ~all_devices
        while due:
            slot = lowest_bit(due)
            k = slot_item[slot]
            following = slot_next[k]
            slot_item[slot] = following
            end = end_s[n + following] if following >= 0 else never
            slot_end_s[slot] = end
            due &= ~(int(end != now) << slot)
            t = transfer_tensor[k]
            destination = transfer_destination[k]
            arrived[num_arrived] = t
            num_arrived += 1
            for b in range(reader_offsets[t], reader_offsets[t + 1]):
                reader = reader_ops[b]
                here = int(devices[reader] == destination)
                ready |= come_nearer(
                    leaf, middle, top, num_leaf, num_middle, num_top, waiting, rank, reader, destination, here
                )
            for place in range(k * most_links, (k + 1) * most_links):
                following = follower[place]
                sequence[position] = n + following
                position += following >= 0
        # transfers that start at one instant stand in the plan by number
        if position > starters + 1:
            sort(sequence, starters, position)
        # Phase 3: in-place updates, which wait for the other readers and the transfers of their tensor.
        if has_updates:
            for a in range(num_ended):
                if not concerned[ended[a]]:
                    continue
                for b in range(waiting_updates(p, placement, ended[a], found)):
                    op = found[b]
                    ready |= come_nearer(
                        leaf, middle, top, num_leaf, num_middle, num_top, waiting, rank, op, devices[op], one
                    )
            for a in range(num_arrived):
                t = arrived[a]
                for b in range(p.updater_offsets[t], p.updater_offsets[t + 1]):
                    op = p.updater_ops[b]
                    ready |= come_nearer(
                        leaf, middle, top, num_leaf, num_middle, num_top, waiting, rank, op, devices[op], one
                    )
        # Phase 4: idle devices take ready ops, the best priority of all of them first. `late` is set where an op shows
        # that the step cannot end by the cutoff: by the path that follows it, or by the work left on its device.
        startable = idle & ready
        late = 0
        while startable:
            d = lowest_bit(startable)
            others = startable & (startable - 1)
            best = peek(leaf, middle, top, num_leaf, num_middle, num_top, d)
            while others:
                e = lowest_bit(others)
                others &= others - 1
                other = peek(leaf, middle, top, num_leaf, num_middle, num_top, e)
                if other < best:
                    best, d = other, e
            ready &= ~(drop(leaf, middle, top, num_leaf, num_middle, num_top, d, best) << d)
            idle &= ~(one << d)
            startable &= ~(one << d)
            op = by_rank[best]
            sequence[position] = op
            position += 1
            seconds = op_seconds(p, op_time_s, devices, op, d)
            end = now + seconds
            late |= int(now + path_s[op] > cutoff_s) | int(now + work_left_s[d] > cutoff_s)
            work_left_s[d] -= seconds
            start_s[op] = now
            end_s[op] = end
            slot_end_s[d] = end
            slot_item[d] = op
        if late:
            forget_ready(s)
            return never
        # Phase 5: the next instant is the earliest end over all slots; `due` collects the slots that end then.
        soonest = never_bits
        due = slot = 0
        while slot_bits[slot] >= 0:
            time = slot_bits[slot]
            due &= int(time < soonest) - 1
            due |= int(time <= soonest) << slot
            soonest = min(soonest, time)
            slot += 1
        if soonest == never_bits:
            break
        now = slot_end_s[lowest_bit(due)]
        num_ended = 0
        ending = due & all_devices
        idle |= ending
        while ending:
            d = lowest_bit(ending)
            ending &= ending - 1
            slot_end_s[d] = never
            ended[num_ended] = slot_item[d]
            num_ended += 1
        if num_ended > 1:
            sort(ended, 0, num_ended)
    s.state[POSITION] = position
    s.state[TRANSFERS] = num_transfers
    return now


@part
def begin(p: Compiled, s: Scratch, devices: Ints, rank: Ints) -> tuple[int, int]:
    """Begin a plan: sources have ended, and lead the sequence; every other op waits for its inputs.

    Returns:
        A bit for each device that has a ready op, and the number of sources.
    """
    one = 1
    ready = num_ended = 0
    for i in range(p.num_ops):
        s.waiting[i] = p.input_offsets[i + 1] - p.input_offsets[i]
    if p.has_updates:
        count_updates(p, s.waiting, devices)
    for i in range(p.num_ops):
        if p.is_source[i]:
            s.sequence[num_ended] = s.ended[num_ended] = i
            s.start_s[i] = s.end_s[i] = 0.0
            num_ended += 1
        elif s.waiting[i] == 0:
            ready |= push(
                s.ready_leaf, s.ready_middle, s.ready_top, p.num_leaf, p.num_middle, p.num_top, devices[i], rank[i], one
            )
    return ready, num_ended


@inlined
def op_seconds(p: Compiled, op_time_s: Floats, devices: Ints, op: int, device: int) -> float:
    """Seconds of an op on its device, under the placement `devices` (N,)."""
    seconds: float = op_time_s[op * p.num_devices + device]
    if p.has_moved and devices[p.main_producer[op]] != device:
        seconds *= p.moved_factor[op]
    return seconds


@inlined
def sort(values: Ints, first: int, last: int) -> None:
    """Sort a few values in place."""
    for a in range(first + 1, last):
        value = values[a]
        b = a
        while b > first and values[b - 1] > value:
            values[b] = values[b - 1]
            b -= 1
        values[b] = value


@inlined
def push(
    leaf: Longs,
    middle: Longs,
    top: Longs,
    num_leaf: int,
    num_middle: int,
    num_top: int,
    device: int,
    place: int,
    really: int,
) -> int:
    """Make the op at `place` in order of priority ready on the device, if `really` is 1; then the device's bit."""
    word = place >> 6
    leaf[device * num_leaf + word] |= really << (place & 63)
    middle[device * num_middle + (word >> 6)] |= really << (word & 63)
    top[device * num_top + (word >> 12)] |= really << ((word >> 6) & 63)
    return really << device


@inlined
def come_nearer(
    leaf: Longs,
    middle: Longs,
    top: Longs,
    num_leaf: int,
    num_middle: int,
    num_top: int,
    waiting: Ints,
    rank: Ints,
    op: int,
    device: int,
    met: int,
) -> int:
    """Remove one dependency of the op, if `met` is 1. If none is left, push the op and return its device's bit."""
    left = waiting[op] - met
    waiting[op] = left
    return push(leaf, middle, top, num_leaf, num_middle, num_top, device, rank[op], met & int(left == 0))


@inlined
def peek(leaf: Longs, middle: Longs, top: Longs, num_leaf: int, num_middle: int, num_top: int, device: int) -> int:
    """Place in order of priority of the best ready op of a device that has one."""
    at = 0
    while top[device * num_top + at] == 0:
        at += 1
    at = (at << 6) + lowest_bit(top[device * num_top + at])
    at = (at << 6) + lowest_bit(middle[device * num_middle + at])
    return (at << 6) + lowest_bit(leaf[device * num_leaf + at])


@inlined
def drop(
    leaf: Longs, middle: Longs, top: Longs, num_leaf: int, num_middle: int, num_top: int, device: int, place: int
) -> int:
    """Take out the op at `place`; 1 if the device then has no ready op, else 0."""
    one = 1
    word = place >> 6
    left = leaf[device * num_leaf + word] & ~(one << (place & 63))
    leaf[device * num_leaf + word] = left
    empty = int(left == 0)
    left = middle[device * num_middle + (word >> 6)] & ~(empty << (word & 63))
    middle[device * num_middle + (word >> 6)] = left
    empty &= int(left == 0)
    left = top[device * num_top + (word >> 12)] & ~(empty << ((word >> 6) & 63))
    top[device * num_top + (word >> 12)] = left
    for at in range(num_top):
        left |= top[device * num_top + at]
    return int(left == 0)


@inlined
def is_updater(p: Compiled, op: int, tensor: int) -> bool:
    """Whether the op updates the tensor in place."""
    updates = False
    for a in range(p.updater_offsets[tensor], p.updater_offsets[tensor + 1]):
        updates = updates or p.updater_ops[a] == op
    return updates


@inlined
def shares_memory(p: Compiled, source: int, device: int) -> bool:
    """Whether ops on `device` read the tensors of `source` where they are."""
    return source == device or p.route_kind[source * p.num_devices + device] == HANDOVER


@inlined
def count_updates(p: Compiled, waiting: Ints, devices: Ints) -> None:
    """Add to `waiting` (N,) the waits of in-place updates."""
    for t in range(len(p.updater_offsets) - 1):
        first, last = p.updater_offsets[t], p.updater_offsets[t + 1]
        if first == last:
            continue
        source = devices[p.tensor_op[t]]
        waits = 0
        sent = 0
        for a in range(p.reader_offsets[t], p.reader_offsets[t + 1]):
            reader = p.reader_ops[a]
            e = devices[reader]
            if shares_memory(p, source, e):
                waits += not is_updater(p, reader, t)
            elif not (sent >> e) & 1:
                sent |= 1 << e
                waits += 1
        for a in range(first, last):
            waiting[p.updater_ops[a]] += waits + (a - first)


@inlined
def waiting_updates(p: Compiled, devices: Ints, op: int, found: Ints) -> int:
    """Number of updates that the end of `op` brings nearer, left in `found`, once for each tensor they wait on."""
    device = devices[op]
    count = 0
    for a in range(p.input_offsets[op], p.input_offsets[op + 1]):
        t = p.input_tensors[a]
        first, last = p.updater_offsets[t], p.updater_offsets[t + 1]
        if first < last and not is_updater(p, op, t) and shares_memory(p, devices[p.tensor_op[t]], device):
            for b in range(first, last):
                found[count] = p.updater_ops[b]
                count += 1
    for a in range(p.updated_offsets[op], p.updated_offsets[op + 1]):
        t = p.updated_tensors[a]
        for b in range(p.updater_offsets[t], p.updater_offsets[t + 1]):
            if p.updater_ops[b] > op:
                found[count] = p.updater_ops[b]
                count += 1
    return count


SLACK = 1e-9
"""Share by which a bound must be above a cutoff: sums in another order round differently."""


@part
def least_seconds(p: Compiled, s: Scratch, placement: Ints, throughput: bool) -> float:
    """A lower bound on the step time; the work of each device and the path from each op are left in the scratch.

    A device does its ops one after the other, and no path through the graph is shorter than its ops and the transfers
    between their devices; queues, launches and co-run slowdown only add to both. In a full pipeline only work counts.
    """
    n, num_devices = p.num_ops, p.num_devices
    op_time_s, is_source, output_offsets = pointer(p.op_time_s), pointer(p.is_source), pointer(p.output_offsets)
    reader_offsets, reader_ops = pointer(p.reader_offsets), pointer(p.reader_ops)
    route_kind, latency_s, s_per_byte = pointer(p.route_kind), pointer(p.least_latency_s), pointer(p.least_s_per_byte)
    tensor_bytes, devices = pointer(p.tensor_bytes), pointer(placement)
    path_s, work_s = pointer(s.path_s), pointer(s.work_left_s)
    s.work_left_s[:] = 0.0
    longest_path = 0.0
    for i in range(n - 1, -1, -1):
        device = devices[i]
        longest = 0.0
        for t in range(output_offsets[i], output_offsets[i + 1]):
            for b in range(reader_offsets[t], reader_offsets[t + 1]):
                reader = reader_ops[b]
                pair = device * num_devices + devices[reader]
                after = path_s[reader]
                if route_kind[pair] > HANDOVER:
                    after += transfer_seconds(latency_s, s_per_byte, pair, tensor_bytes[t])
                longest = max(longest, after)
        if not is_source[i]:
            seconds = op_seconds(p, op_time_s, devices, i, device)
            longest += seconds
            work_s[device] += seconds
        path_s[i] = longest
        longest_path = max(longest_path, longest)
    least = 0.0 if throughput else longest_path
    for d in range(num_devices):
        least = max(least, work_s[d])
    return least


@part
def forget_ready(s: Scratch) -> None:
    """Leave no op ready, after a plan that was not followed to its end."""
    s.ready_leaf[:] = np.int64(0)
    s.ready_middle[:] = np.int64(0)
    s.ready_top[:] = np.int64(0)
