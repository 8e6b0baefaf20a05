"""Planning where devices and transfers do not block each other: the fast path of docs/step-time-model.md.

Since transfers that share a link are served in order of request, each one's start is known when it is requested: the
latest end of the transfer before it on each of its links. Ready ops wait in one bitmap a device, by priority.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from rlplace.measure.bits import lowest_bit
from rlplace.measure.compiled import HANDOVER, Compiled
from rlplace.measure.kernel_updates import count_updates, waiting_updates
from rlplace.measure.scratch import POSITION, TRANSFERS, Scratch


@njit(cache=True, nogil=True)
def plan(p: Compiled, s: Scratch, devices, rank, order):  # type: ignore[no-untyped-def]
    """Seconds of the planned step; the plan and its times are left in the scratch.

    Args:
        p: the problem: no gangs, no blocking transfers, no co-run slowdown.
        s: working memory.
        devices: (N,) int32, device of each op.
        rank: (N,) int32, place of each op in order of priority.
        order: (N,) int32, op at each place.
    """
    n, num_devices, most_links = p.num_ops, p.num_devices, p.max_route_links
    op_time_s, output_offsets = p.op_time_s, p.output_offsets
    reader_offsets, reader_ops = p.reader_offsets, p.reader_ops
    route_kind, route_offsets, route_links, route_slot = p.route_kind, p.route_offsets, p.route_links, p.route_slot
    latency_s, s_per_byte, tensor_bytes = p.route_latency_s, p.route_s_per_byte, p.tensor_bytes
    sequence, start_s, end_s = s.sequence, s.start_s, s.end_s
    transfer_tensor, transfer_destination = s.transfer_tensor, s.transfer_destination
    waiting, ended, starters = s.waiting, s.ended, s.starters
    leaf, middle, top = s.ready_leaf, s.ready_middle, s.ready_top
    num_leaf, num_middle, num_top = p.num_leaf, p.num_middle, p.num_top
    slot_end_s, slot_item, slot_tail = s.slot_end_s, s.slot_item, s.slot_tail
    slot_bits = slot_end_s.view(np.int64)
    slot_next, follower, link_free_s, link_last = s.slot_next, s.follower, s.link_free_s, s.link_last
    num_slots = p.num_slots
    updates, found = p.updates, s.found
    one = np.int64(1)
    never = np.float64(np.inf)
    never_bits = np.int64(0x7FF0000000000000)
    slot_end_s[:] = never
    link_free_s[:] = 0.0
    waiting[:n] = p.input_counts
    if p.has_updates:
        count_updates(updates, reader_offsets, reader_ops, waiting, devices)
    idle = (one << num_devices) - one
    ready = np.int64(0)
    position = 0
    num_transfers = 0
    num_ended = 0
    for i in range(n):
        if p.is_source[i]:
            sequence[position] = i
            position += 1
            start_s[i] = end_s[i] = 0.0
            ended[num_ended] = i
            num_ended += 1
        elif waiting[i] == 0:
            ready |= push(leaf, middle, top, num_leaf, num_middle, num_top, devices[i], rank[i])
    now = 0.0
    while True:
        num_starters = 0
        for a in range(num_ended):
            op = ended[a]
            source = devices[op]
            for t in range(output_offsets[op], output_offsets[op + 1]):
                elsewhere = np.int64(0)
                for b in range(reader_offsets[t], reader_offsets[t + 1]):
                    reader = reader_ops[b]
                    e = devices[reader]
                    elsewhere |= one << e
                    if e == source or route_kind[source * num_devices + e] == HANDOVER:
                        waiting[reader] -= 1
                        if waiting[reader] == 0:
                            ready |= push(leaf, middle, top, num_leaf, num_middle, num_top, e, rank[reader])
                elsewhere &= ~(one << source)
                while elsewhere:
                    e = lowest_bit(elsewhere)
                    elsewhere &= elsewhere - 1
                    k = num_transfers
                    num_transfers += 1
                    transfer_tensor[k] = t
                    transfer_destination[k] = e
                    pair = source * num_devices + e
                    if route_kind[pair] == HANDOVER:
                        sequence[position] = n + k
                        position += 1
                        start_s[n + k] = end_s[n + k] = now
                        continue
                    first_link, last_link = route_offsets[pair], route_offsets[pair + 1]
                    start = now
                    before = -1
                    for b in range(first_link, last_link):
                        link = route_links[b]
                        if link_free_s[link] > start:
                            start = link_free_s[link]
                            before = link_last[link]
                    end = start + (latency_s[pair] + tensor_bytes[t] * s_per_byte[pair])
                    for b in range(first_link, last_link):
                        link = route_links[b]
                        link_free_s[link] = end
                        link_last[link] = k * most_links + b - first_link
                    for place in range(k * most_links, (k + 1) * most_links):
                        follower[place] = -1
                    start_s[n + k] = start
                    end_s[n + k] = end
                    if before < 0:
                        starters[num_starters] = k
                        num_starters += 1
                    else:
                        follower[before] = k
                    slot = route_slot[pair]
                    slot_next[k] = -1
                    if slot_end_s[slot] == never:
                        slot_end_s[slot] = end
                        slot_item[slot] = k
                    else:
                        slot_next[slot_tail[slot]] = k
                    slot_tail[slot] = k
            if p.has_updates and updates.concerned[op]:
                for b in range(waiting_updates(updates, devices, op, found)):
                    reader = found[b]
                    waiting[reader] -= 1
                    if waiting[reader] == 0:
                        ready |= push(
                            leaf, middle, top, num_leaf, num_middle, num_top, devices[reader], rank[reader]
                        )
        again = True
        while again:
            again = False
            for slot in range(num_devices, num_slots):
                if slot_end_s[slot] == now:
                    again = True
                    k = slot_item[slot]
                    following = slot_next[k]
                    slot_item[slot] = following
                    slot_end_s[slot] = end_s[n + following] if following >= 0 else never
                    t = transfer_tensor[k]
                    destination = transfer_destination[k]
                    for b in range(reader_offsets[t], reader_offsets[t + 1]):
                        reader = reader_ops[b]
                        if devices[reader] == destination:
                            waiting[reader] -= 1
                            if waiting[reader] == 0:
                                ready |= push(
                                    leaf, middle, top, num_leaf, num_middle, num_top, destination, rank[reader]
                                )
                    if p.has_updates:
                        for b in range(updates.updater_offsets[t], updates.updater_offsets[t + 1]):
                            reader = updates.updater_ops[b]
                            waiting[reader] -= 1
                            if waiting[reader] == 0:
                                ready |= push(
                                    leaf, middle, top, num_leaf, num_middle, num_top, devices[reader], rank[reader]
                                )
                    for place in range(k * most_links, (k + 1) * most_links):
                        if follower[place] >= 0:
                            starters[num_starters] = follower[place]
                            num_starters += 1
        for a in range(num_starters):
            k = starters[a]
            b = a
            while b > 0 and starters[b - 1] > k:
                starters[b] = starters[b - 1]
                b -= 1
            starters[b] = k
        for a in range(num_starters):
            sequence[position] = n + starters[a]
            position += 1
        startable = idle & ready
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
            if drop(leaf, middle, top, num_leaf, num_middle, num_top, d, best):
                ready &= ~(one << d)
            idle &= ~(one << d)
            startable &= ~(one << d)
            op = order[best]
            sequence[position] = op
            position += 1
            end = now + op_time_s[op, d]
            start_s[op] = now
            end_s[op] = end
            slot_end_s[d] = end
            slot_item[d] = op
        soonest = never_bits
        for slot in range(num_slots):
            soonest = min(soonest, slot_bits[slot])
        if soonest == never_bits:
            break
        num_ended = 0
        for d in range(num_devices):
            if slot_bits[d] == soonest:
                now = slot_end_s[d]
                slot_end_s[d] = never
                idle |= one << d
                op = slot_item[d]
                b = num_ended
                while b > 0 and ended[b - 1] > op:
                    ended[b] = ended[b - 1]
                    b -= 1
                ended[b] = op
                num_ended += 1
        if num_ended == 0:
            for slot in range(num_devices, num_slots):
                if slot_bits[slot] == soonest:
                    now = slot_end_s[slot]
    s.state[POSITION] = position
    s.state[TRANSFERS] = num_transfers
    return now


@njit(cache=True, nogil=True)
def push(leaf, middle, top, num_leaf, num_middle, num_top, device, place):  # type: ignore[no-untyped-def]
    """Make the op at `place` in order of priority ready on the device; the device's bit."""
    one = np.int64(1)
    word = place >> 6
    leaf[device * num_leaf + word] |= one << (place & 63)
    middle[device * num_middle + (word >> 6)] |= one << (word & 63)
    top[device * num_top + (word >> 12)] |= one << ((word >> 6) & 63)
    return one << device


@njit(cache=True, nogil=True)
def peek(leaf, middle, top, num_leaf, num_middle, num_top, device):  # type: ignore[no-untyped-def]
    """Place in order of priority of the best ready op of a device that has one."""
    at = np.int64(0)
    while top[device * num_top + at] == 0:
        at += 1
    at = (at << 6) + lowest_bit(top[device * num_top + at])
    at = (at << 6) + lowest_bit(middle[device * num_middle + at])
    return (at << 6) + lowest_bit(leaf[device * num_leaf + at])


@njit(cache=True, nogil=True)
def drop(leaf, middle, top, num_leaf, num_middle, num_top, device, place):  # type: ignore[no-untyped-def]
    """Take out the op at `place`; whether the device has no ready op any more."""
    one = np.int64(1)
    word = place >> 6
    leaf[device * num_leaf + word] &= ~(one << (place & 63))
    if leaf[device * num_leaf + word]:
        return False
    middle[device * num_middle + (word >> 6)] &= ~(one << (word & 63))
    if middle[device * num_middle + (word >> 6)]:
        return False
    top[device * num_top + (word >> 12)] &= ~(one << ((word >> 6) & 63))
    for at in range(num_top):
        if top[device * num_top + at]:
            return False
    return True
