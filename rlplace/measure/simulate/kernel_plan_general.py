"""Planning on any host: gangs, transfers that block devices, and jobs that slow each other down.

The same as kernel_plan.py wherever that one applies, to the bit; slower, since transfers wait in queues. That module
says why there are two.
"""

from __future__ import annotations

import numpy as np

from rlplace.jit import Floats, Ints, lowest_bit, part, pointer
from rlplace.measure.simulate.compiled_problem import HANDOVER, QUEUED, Compiled
from rlplace.measure.simulate.kernel_plan import count_updates, drop, forget_ready, peek, push, sort, waiting_updates
from rlplace.measure.simulate.scratch import POSITION, TRANSFERS, EventScratch, Scratch
from rlplace.measure.simulate.transfer_time import transfer_seconds


@part
def plan_general(
    p: Compiled, s: Scratch, v: EventScratch, placement: Ints, ranks: Ints, ops_by_rank: Ints, cutoff_s: float
) -> float:
    """Seconds of the planned step; the plan and its times are left in the scratch. Arguments as of `plan`."""
    n, num_devices, num_slots, most_links = p.num_ops, p.num_devices, p.num_slots, p.max_route_links
    num_links, op_time_s, output_offsets = p.num_links, pointer(p.op_time_s), pointer(p.output_offsets)
    reader_offsets, reader_ops, tensor_op = pointer(p.reader_offsets), pointer(p.reader_ops), pointer(p.tensor_op)
    route_kind, route_offsets = pointer(p.route_kind), pointer(p.route_offsets)
    route_links, route_slot = pointer(p.route_links), pointer(p.route_slot)
    latency_s, s_per_byte = pointer(p.route_latency_s), pointer(p.route_s_per_byte)
    tensor_bytes, is_source, input_counts = pointer(p.tensor_bytes), pointer(p.is_source), pointer(p.input_counts)
    blocks_source, atoms, is_gang = pointer(p.route_blocks_source), pointer(p.atoms), pointer(p.is_gang)
    sequence, start_s, end_s = pointer(s.sequence), pointer(s.start_s), pointer(s.end_s)
    transfer_tensor, transfer_destination = pointer(s.transfer_tensor), pointer(s.transfer_destination)
    waiting, ended, found = pointer(s.waiting), pointer(s.ended), s.found
    leaf, middle, top = pointer(s.ready_leaf), pointer(s.ready_middle), pointer(s.ready_top)
    num_leaf, num_middle, num_top = p.num_leaf, p.num_middle, p.num_top
    slot_end_s, slot_item, corun_slowdown = pointer(s.slot_end_s), pointer(s.slot_item), pointer(p.corun_slowdown)
    queue_next, queue_head = pointer(v.queue_next), pointer(v.queue_head)
    queue_tail, link_busy = pointer(v.queue_tail), pointer(v.link_busy)
    copy_key, copy_next = pointer(v.copy_key), pointer(v.copy_next)
    copy_head, copy_cursor = pointer(v.copy_head), pointer(v.copy_cursor)
    work_s, anchor_s = pointer(v.work_s), pointer(v.anchor_s)
    slowdown, reserved_by = pointer(v.slowdown), pointer(v.reserved)
    has_updates, updates, has_corun = p.has_updates, p.updates, p.has_corun
    concerned, updater_offsets = pointer(updates.concerned), pointer(updates.updater_offsets)
    updater_ops = pointer(updates.updater_ops)
    devices, rank, order = pointer(placement), pointer(ranks), pointer(ops_by_rank)
    path_s, work_left_s = pointer(s.path_s), pointer(s.work_left_s)
    one = 1
    never = np.inf
    s.slot_end_s[:] = never
    v.queue_head[:] = -1
    v.link_busy[:] = False
    v.copy_head[:] = -1
    for i in range(n):
        waiting[i] = input_counts[i]
    if has_updates:
        count_updates(updates, p.reader_offsets, p.reader_ops, s.waiting, placement)
    busy = 0
    ready = 0
    position = num_transfers = num_ended = num_queued = 0
    for i in range(n):
        if is_source[i]:
            sequence[position] = i
            position += 1
            start_s[i] = end_s[i] = 0.0
            ended[num_ended] = i
            num_ended += 1
        elif waiting[i] == 0:
            ready |= push(leaf, middle, top, num_leaf, num_middle, num_top, devices[i], rank[i], one)
    now = 0.0
    while True:
        # Phase 1: ops that have ended; transfers are requested, and wait in the queues of their links
        starters = position
        for a in range(num_ended):
            op = ended[a]
            source = devices[op]
            for t in range(output_offsets[op], output_offsets[op + 1]):
                elsewhere = 0
                for b in range(reader_offsets[t], reader_offsets[t + 1]):
                    reader = reader_ops[b]
                    e = devices[reader]
                    elsewhere |= one << e
                    if e == source or route_kind[source * num_devices + e] == HANDOVER:
                        waiting[reader] -= 1
                        if waiting[reader] == 0:
                            ready |= push(leaf, middle, top, num_leaf, num_middle, num_top, e, rank[reader], one)
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
                        start_s[n + k] = end_s[n + k] = now
                        sequence[position] = n + k
                        position += 1
                    elif route_kind[pair] == QUEUED:
                        num_queued += 1
                        for b in range(route_offsets[pair], route_offsets[pair + 1]):
                            link = route_links[b]
                            place = k * most_links + b - route_offsets[pair]
                            queue_next[place] = -1
                            if queue_head[link] < 0:
                                queue_head[link] = place
                            else:
                                queue_next[queue_tail[link]] = place
                            queue_tail[link] = place
                    else:
                        best = n
                        for b in range(reader_offsets[t], reader_offsets[t + 1]):
                            if devices[reader_ops[b]] == e:
                                best = min(best, rank[reader_ops[b]])
                        copy_key[k] = (int(2 * best) << 31) | t
                        before = -1
                        after = copy_head[e]
                        while after >= 0 and copy_key[after] < copy_key[k]:
                            before = after
                            after = copy_next[after]
                        copy_next[k] = after
                        if before < 0:
                            copy_head[e] = k
                        else:
                            copy_next[before] = k
            if has_updates and concerned[op]:
                for b in range(waiting_updates(updates, placement, op, found)):
                    reader = found[b]
                    waiting[reader] -= 1
                    if waiting[reader] == 0:
                        ready |= push(
                            leaf, middle, top, num_leaf, num_middle, num_top, devices[reader], rank[reader], one
                        )
        # Phase 2: transfers that have ended, and those that start in turn, until none of no duration is left
        again = True
        while again:
            again = False
            for slot in range(num_slots):
                if slot_end_s[slot] == now:
                    slot_end_s[slot] = never
                    k = slot_item[slot] - n
                    t, destination = transfer_tensor[k], transfer_destination[k]
                    source = devices[tensor_op[t]]
                    pair = source * num_devices + destination
                    for b in range(route_offsets[pair], route_offsets[pair + 1]):
                        link_busy[route_links[b]] = False
                    if slot < num_devices:
                        busy &= ~atoms[slot]
                        end_s[n + k] = now
                    if blocks_source[pair]:
                        busy &= ~atoms[source]
                    for b in range(reader_offsets[t], reader_offsets[t + 1]):
                        reader = reader_ops[b]
                        if devices[reader] == destination:
                            waiting[reader] -= 1
                            if waiting[reader] == 0:
                                ready |= push(
                                    leaf, middle, top, num_leaf, num_middle, num_top, destination, rank[reader], one
                                )
                    if has_updates:
                        for b in range(updater_offsets[t], updater_offsets[t + 1]):
                            reader = updater_ops[b]
                            waiting[reader] -= 1
                            if waiting[reader] == 0:
                                ready |= push(
                                    leaf, middle, top, num_leaf, num_middle, num_top, devices[reader], rank[reader], one
                                )
            first = 0
            while num_queued and first >= 0:
                first = -1
                for link in range(num_links):
                    if queue_head[link] < 0 or link_busy[link]:
                        continue
                    k = queue_head[link] // most_links
                    if 0 <= first <= k:
                        continue
                    source = devices[tensor_op[transfer_tensor[k]]]
                    pair = source * num_devices + transfer_destination[k]
                    can = not blocks_source[pair] or (atoms[source] & busy) == 0
                    for b in range(route_offsets[pair], route_offsets[pair + 1]):
                        place = k * most_links + b - route_offsets[pair]
                        can = can and not link_busy[route_links[b]] and queue_head[route_links[b]] == place
                    if can:
                        first = k
                if first >= 0:
                    num_queued -= 1
                    t = transfer_tensor[first]
                    source = devices[tensor_op[t]]
                    pair = source * num_devices + transfer_destination[first]
                    for b in range(route_offsets[pair], route_offsets[pair + 1]):
                        link_busy[route_links[b]] = True
                        queue_head[route_links[b]] = queue_next[first * most_links + b - route_offsets[pair]]
                    if blocks_source[pair]:
                        busy |= atoms[source]
                    end = now + transfer_seconds(latency_s, s_per_byte, pair, tensor_bytes[t])
                    start_s[n + first] = now
                    end_s[n + first] = end
                    slot_item[route_slot[pair]] = n + first
                    slot_end_s[route_slot[pair]] = end
                    again = again or end == now
                    sequence[position] = n + first
                    position += 1
        sort(sequence, starters, position)
        # Phase 3: jobs (ops, and copies that a device makes itself), best first; gangs keep their idle members
        for d in range(num_devices):
            copy_cursor[d] = copy_head[d]
            reserved_by[d] = 0
        reserved = 0
        closed = 0
        late = 0
        while True:
            d = -1
            best_key = 0x7FFFFFFFFFFFFFFF
            for e in range(num_devices):
                if (closed >> e) & 1:
                    continue
                if (ready >> e) & 1:
                    key = (2 * peek(leaf, middle, top, num_leaf, num_middle, num_top, e) + 1) << 31
                    if key < best_key:
                        d, best_key = e, key
                if copy_cursor[e] >= 0 and copy_key[copy_cursor[e]] < best_key:
                    d, best_key = e, copy_key[copy_cursor[e]]
            if d < 0:
                break
            taken = busy | (reserved & ~reserved_by[d])
            is_free = (atoms[d] & taken) == 0
            item = -1
            duration = 0.0
            if (best_key >> 31) & 1:
                closed |= one << d
                if is_free:
                    best = best_key >> 32
                    ready &= ~(drop(leaf, middle, top, num_leaf, num_middle, num_top, d, best) << d)
                    item = order[best]
                    duration = op_time_s[item * num_devices + d]
                    late |= int(now + path_s[item] > cutoff_s) | int(now + work_left_s[d] > cutoff_s)
                    work_left_s[d] -= duration
            else:
                k = copy_cursor[d]
                copy_cursor[d] = copy_next[k]
                t = transfer_tensor[k]
                source = devices[tensor_op[t]]
                pair = source * num_devices + d
                can = is_free and not (blocks_source[pair] and (atoms[source] & taken) != 0)
                for b in range(route_offsets[pair], route_offsets[pair + 1]):
                    can = can and not link_busy[route_links[b]]
                if can:
                    closed |= one << d
                    if copy_head[d] == k:
                        copy_head[d] = copy_next[k]
                    else:
                        before = copy_head[d]
                        while copy_next[before] != k:
                            before = copy_next[before]
                        copy_next[before] = copy_next[k]
                    for b in range(route_offsets[pair], route_offsets[pair + 1]):
                        link_busy[route_links[b]] = True
                    if blocks_source[pair]:
                        busy |= atoms[source]
                    item = n + k
                    duration = transfer_seconds(latency_s, s_per_byte, pair, tensor_bytes[t])
                elif not is_free and not is_gang[d]:
                    closed |= one << d
            if item >= 0:
                busy |= atoms[d]
                sequence[position] = item
                position += 1
                start_s[item] = now
                end_s[item] = now + duration
                slot_item[d] = item
                slot_end_s[d] = now + duration
                work_s[d] = duration
                anchor_s[d] = now
                slowdown[d] = 1.0
            if is_gang[d]:
                reserved_by[d] |= atoms[d] & ~(busy | reserved)
                reserved |= reserved_by[d]
        if late:
            forget_ready(s)
            return never
        # Phase 4: the next instant, after slowdowns of jobs that now run together
        soonest = earliest(slot_end_s, num_slots)
        if has_corun and soonest > now:
            slow_down(corun_slowdown, slot_end_s, slowdown, work_s, anchor_s, num_devices, now)
            soonest = earliest(slot_end_s, num_slots)
        if soonest == never:
            break
        now = soonest
        num_ended = 0
        for d in range(num_devices):
            if slot_end_s[d] == now and slot_item[d] < n:
                slot_end_s[d] = never
                busy &= ~atoms[d]
                op = slot_item[d]
                end_s[op] = now
                b = num_ended
                while b > 0 and ended[b - 1] > op:
                    ended[b] = ended[b - 1]
                    b -= 1
                ended[b] = op
                num_ended += 1
    s.state[POSITION] = position
    s.state[TRANSFERS] = num_transfers
    return now


@part
def earliest(times_s: Floats, count: int) -> float:
    """The least of the first `count` times."""
    least = np.inf
    for place in range(count):
        least = min(least, times_s[place])
    return least


@part
def slow_down(
    corun_slowdown: Floats,
    slot_end_s: Floats,
    slowdown: Floats,
    work_s: Floats,
    anchor_s: Floats,
    num_devices: int,
    now: float,
) -> None:
    """Re-time the running jobs whose slowdown changes, when nothing more happens at the instant `now`."""
    for d in range(num_devices):
        if slot_end_s[d] < np.inf:
            factor = 1.0
            for e in range(num_devices):
                if slot_end_s[e] < np.inf:
                    factor += corun_slowdown[d * num_devices + e]
            if factor != slowdown[d]:
                work_s[d] = max(0.0, work_s[d] - (now - anchor_s[d]) / slowdown[d])
                anchor_s[d] = now
                slowdown[d] = factor
                slot_end_s[d] = now + work_s[d] * factor
