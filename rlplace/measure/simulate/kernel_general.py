"""Planning and timing on any host: gangs, transfers that block devices, and jobs that slow each other down.

`plan_general` plans the same as kernel_plan.py wherever that one applies, to the bit; slower, since transfers wait in
queues. That module says why there are two. `retime_events` times a given plan event by event, for hosts with
`corun_slowdown`, or whose launches queue by request; items take turns in the lanes of `EventScratch`.
"""

from __future__ import annotations

import numpy as np

from rlplace.jit import Floats, Ints, Longs, lowest_bit, part, pointer
from rlplace.measure.simulate.compiled_problem import (
    HANDOVER,
    JOB,
    POSITION,
    QUEUED,
    TRANSFERS,
    Compiled,
    EventScratch,
    Scratch,
)
from rlplace.measure.simulate.kernel_plan import (
    begin,
    come_nearer,
    count_updates,
    drop,
    forget_ready,
    op_seconds,
    peek,
    sort,
    waiting_updates,
)
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
    tensor_bytes = pointer(p.tensor_bytes)
    blocks_source, atoms, is_gang = pointer(p.route_blocks_source), pointer(p.atoms), pointer(p.is_gang)
    peers, has_relays, transfer_source = pointer(p.peers), p.has_relays, pointer(s.transfer_source)
    sequence, start_s, end_s = pointer(s.sequence), pointer(s.start_s), pointer(s.end_s)
    transfer_tensor, transfer_destination = pointer(s.transfer_tensor), pointer(s.transfer_destination)
    waiting, ended, found = pointer(s.waiting), pointer(s.ended), s.found
    leaf, middle, top = pointer(s.ready_leaf), pointer(s.ready_middle), pointer(s.ready_top)
    num_leaf, num_middle, num_top = p.num_leaf, p.num_middle, p.num_top
    slot_end_s, slot_item, corun_slowdown = pointer(s.slot_end_s), pointer(s.slot_item), pointer(p.corun_slowdown)
    queue_next, queue_head = pointer(v.queue_next), pointer(v.queue_head)
    link_busy = pointer(v.link_busy)
    copy_key, copy_next = pointer(v.copy_key), pointer(v.copy_next)
    copy_head, copy_cursor = pointer(v.copy_head), pointer(v.copy_cursor)
    work_s, anchor_s = pointer(v.work_s), pointer(v.anchor_s)
    slowdown, reserved_by = pointer(v.slowdown), pointer(v.reserved)
    has_updates, has_corun = p.has_updates, p.has_corun
    concerned, updater_offsets = pointer(p.concerned), pointer(p.updater_offsets)
    updater_ops = pointer(p.updater_ops)
    devices, rank, order = pointer(placement), pointer(ranks), pointer(ops_by_rank)
    path_s, work_left_s = pointer(s.path_s), pointer(s.work_left_s)
    one = 1
    never = np.inf
    s.slot_end_s[:] = never
    v.queue_head[:] = -1
    v.link_busy[:] = False
    v.copy_head[:] = -1
    ready, num_ended = begin(p, s, placement, ranks)
    position = num_ended
    busy = num_transfers = num_queued = 0
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
                        ready |= come_nearer(
                            leaf, middle, top, num_leaf, num_middle, num_top, waiting, rank, reader, e, one
                        )
                elsewhere &= ~(one << source)
                while elsewhere:
                    e = lowest_bit(elsewhere)
                    elsewhere &= elsewhere - 1
                    elsewhere &= ~(peers[e] & ~peers[source])  # device e is their relay
                    k = num_transfers
                    num_transfers += 1
                    if route_kind[source * num_devices + e] == HANDOVER:
                        transfer_tensor[k] = t
                        transfer_source[k] = source
                        transfer_destination[k] = e
                        start_s[n + k] = end_s[n + k] = now
                        sequence[position] = n + k
                        position += 1
                    else:
                        num_queued += request(p, s, v, placement, ranks, k, t, source, e)
            if has_updates and concerned[op]:
                for b in range(waiting_updates(p, placement, op, found)):
                    e = devices[found[b]]
                    ready |= come_nearer(
                        leaf, middle, top, num_leaf, num_middle, num_top, waiting, rank, found[b], e, one
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
                    source = transfer_source[k]
                    pair = source * num_devices + destination
                    for b in range(route_offsets[pair], route_offsets[pair + 1]):
                        link_busy[route_links[b]] = False
                    if slot < num_devices:
                        busy &= ~atoms[slot]
                        end_s[n + k] = now
                    if blocks_source[pair]:
                        busy &= ~atoms[source]
                    elsewhere = 0
                    for b in range(reader_offsets[t], reader_offsets[t + 1]):
                        reader = reader_ops[b]
                        elsewhere |= one << devices[reader]
                        here = int(devices[reader] == destination)
                        ready |= come_nearer(
                            leaf, middle, top, num_leaf, num_middle, num_top, waiting, rank, reader, destination, here
                        )
                    if has_relays and source == devices[tensor_op[t]]:
                        elsewhere &= peers[destination] & ~peers[source] & ~(one << destination)
                        while elsewhere:
                            e = lowest_bit(elsewhere)
                            elsewhere &= elsewhere - 1
                            num_queued += request(p, s, v, placement, ranks, num_transfers, t, destination, e)
                            num_transfers += 1
                    if has_updates:
                        for b in range(updater_offsets[t], updater_offsets[t + 1]):
                            op = updater_ops[b]
                            ready |= come_nearer(
                                leaf, middle, top, num_leaf, num_middle, num_top, waiting, rank, op, devices[op], one
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
                    source = transfer_source[k]
                    pair = source * num_devices + transfer_destination[k]
                    is_idle = (atoms[source] & busy) == 0
                    can = is_idle or not (blocks_source[pair] or source != devices[tensor_op[transfer_tensor[k]]])
                    for b in range(route_offsets[pair], route_offsets[pair + 1]):
                        place = k * most_links + b - route_offsets[pair]
                        can = can and not link_busy[route_links[b]] and queue_head[route_links[b]] == place
                    if can:
                        first = k
                if first >= 0:
                    num_queued -= 1
                    t = transfer_tensor[first]
                    source = transfer_source[first]
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
                    duration = op_seconds(p, op_time_s, devices, item, d)
                    late |= int(now + path_s[item] > cutoff_s) | int(now + work_left_s[d] > cutoff_s)
                    work_left_s[d] -= duration
            else:
                k = copy_cursor[d]
                copy_cursor[d] = copy_next[k]
                t = transfer_tensor[k]
                source = transfer_source[k]
                pair = source * num_devices + d
                is_held = blocks_source[pair] or source != devices[tensor_op[t]]
                can = is_free and not (is_held and (atoms[source] & taken) != 0)
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
                end_s[slot_item[d]] = now
                ended[num_ended] = slot_item[d]
                num_ended += 1
        sort(ended, 0, num_ended)
    s.state[POSITION] = position
    s.state[TRANSFERS] = num_transfers
    return now


@part
def request(
    p: Compiled, s: Scratch, v: EventScratch, placement: Ints, ranks: Ints, k: int, tensor: int, source: int, to: int
) -> int:
    """Request copy `k`: it waits in the queues of its links, or until device `to` makes it; 1 in the first case."""
    most_links, route_links = p.max_route_links, pointer(p.route_links)
    queue_next, queue_head, queue_tail = pointer(v.queue_next), pointer(v.queue_head), pointer(v.queue_tail)
    copy_key, copy_next, copy_head = pointer(v.copy_key), pointer(v.copy_next), pointer(v.copy_head)
    s.transfer_tensor[k] = tensor
    s.transfer_source[k] = source
    s.transfer_destination[k] = to
    pair = source * p.num_devices + to
    if p.route_kind[pair] == QUEUED:
        for b in range(p.route_offsets[pair], p.route_offsets[pair + 1]):
            link = route_links[b]
            place = k * most_links + b - p.route_offsets[pair]
            queue_next[place] = -1
            if queue_head[link] < 0:
                queue_head[link] = place
            else:
                queue_next[queue_tail[link]] = place
            queue_tail[link] = place
        return 1
    best = p.num_ops
    for b in range(p.reader_offsets[tensor], p.reader_offsets[tensor + 1]):
        if placement[p.reader_ops[b]] == to:
            best = min(best, ranks[p.reader_ops[b]])
    copy_key[k] = (int(2 * best) << 31) | tensor
    before = -1
    after = copy_head[to]
    while after >= 0 and copy_key[after] < copy_key[k]:
        before = after
        after = copy_next[after]
    copy_next[k] = after
    if before < 0:
        copy_head[to] = k
    else:
        copy_next[before] = k
    return 0


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


@part
def retime_events(p: Compiled, s: Scratch, v: EventScratch, placement: Ints) -> float:
    """Seconds of a step that follows the plan in the scratch, infinite where it cannot be followed to its end."""
    n, num_devices, num_dispatchers, run_ahead = p.num_ops, p.num_devices, p.num_dispatchers, p.run_ahead
    num_slots, num_lanes = p.num_slots, len(v.lane_head)
    output_offsets, is_source, route_kind = pointer(p.output_offsets), pointer(p.is_source), pointer(p.route_kind)
    reader_offsets, reader_ops = pointer(p.reader_offsets), pointer(p.reader_ops)
    launches, by_request, dispatcher_of = p.launches, p.by_request, pointer(p.dispatcher)
    dispatch_s, copy_dispatch_s = p.dispatch_s, p.copy_dispatch_s
    has_corun, has_updates, found = p.has_corun, p.has_updates, s.found
    concerned, updater_offsets = pointer(p.concerned), pointer(p.updater_offsets)
    updater_ops, corun_slowdown = pointer(p.updater_ops), pointer(p.corun_slowdown)
    sequence, start_s, end_s = pointer(s.sequence), pointer(s.start_s), pointer(s.end_s)
    waiting, slot_item, slot_end_s = pointer(s.waiting), pointer(s.slot_item), pointer(s.slot_end_s)
    work_s, anchor_s, slowdown = pointer(v.work_s), pointer(v.anchor_s), pointer(v.slowdown)
    transfer_tensor, transfer_destination = pointer(s.transfer_tensor), pointer(s.transfer_destination)
    transfer_source, has_relays = pointer(s.transfer_source), p.has_relays
    first_behind, next_behind = pointer(v.first_behind), pointer(v.next_behind)
    lane_base, lane_head, lane_items = pointer(v.lane_base), pointer(v.lane_head), pointer(v.lane_items)
    item_lanes, item_base, item_end = pointer(v.item_lanes), pointer(v.item_base), pointer(v.item_end)
    place, bounded = pointer(v.place), pointer(v.bounded)
    duration_s, slot_of, data_waiting = pointer(v.duration_s), pointer(v.slot), pointer(v.data_waiting)
    first_transfer, next_transfer = pointer(v.first_transfer), pointer(v.next_transfer)
    startable, launch_end_s, launch_lane = pointer(v.startable), pointer(v.launch_end_s), pointer(v.launch_lane)
    request_s, ended, devices = pointer(v.request_s), pointer(s.ended), pointer(placement)
    never = np.inf
    s.slot_end_s[:] = never
    v.launch_end_s[:] = never
    v.request_s[:] = never
    first_launch_lane = num_devices + p.num_links
    _count_data(p, s, v, placement)
    _lay_out_lanes(p, s, v, placement)
    for position in range(s.state[POSITION]):
        item = sequence[position]
        waiting[item] = data_waiting[item]
    for lane in range(num_lanes):
        lane_head[lane] = lane_base[lane]
        for a in range(lane_base[lane] + (0 if lane >= first_launch_lane else 1), lane_base[lane + 1]):
            waiting[lane_items[a]] += 1
    num_startable = num_ended = num_done = 0
    for i in range(n):
        if is_source[i]:
            start_s[i] = end_s[i] = 0.0
            ended[num_ended] = i
            num_ended += 1
        elif waiting[i] == 0:
            startable[num_startable] = i
            num_startable += 1
    now = 0.0
    # One round per instant `now`; an item starts once all that it waits for has met it (`waiting` is 0): its data, its
    # turn in each of its lanes, and its launch.
    while True:
        # Phase 1: ops that have ended meet the readers of their outputs, transfers and in-place updates.
        for a in range(num_ended):
            op = ended[a]
            num_done += 1
            for t in range(output_offsets[op], output_offsets[op + 1]):
                for b in range(reader_offsets[t], reader_offsets[t + 1]):
                    device = devices[reader_ops[b]]
                    if device == devices[op] or route_kind[devices[op] * num_devices + device] == HANDOVER:
                        num_startable = _meet(data_waiting, waiting, startable, num_startable, reader_ops[b])
                k = first_transfer[t]
                while k >= 0:
                    if slot_of[n + k] < 0:
                        start_s[n + k] = end_s[n + k] = now
                        num_done += 1
                    elif not has_relays or transfer_source[k] == devices[op]:
                        num_startable = _meet(data_waiting, waiting, startable, num_startable, n + k)
                    k = next_transfer[k]
            if has_updates and concerned[op]:
                for b in range(waiting_updates(p, placement, op, found)):
                    num_startable = _meet(data_waiting, waiting, startable, num_startable, found[b])
        # Phase 2: dispatchers begin the next launch: of the first request, or in plan order.
        if launches and by_request:
            for d in range(num_devices):
                lane, dispatcher = first_launch_lane + d, dispatcher_of[d]
                if dispatcher < 0 or lane_head[lane] == lane_base[lane + 1] or request_s[d] < never:
                    continue
                if launch_end_s[dispatcher] < never and launch_lane[dispatcher] == lane:
                    continue
                item = lane_items[lane_head[lane]]
                if run_ahead == 1 and bounded[item] and data_waiting[item]:
                    continue
                if _within_bound(lane_base, lane_head, item_lanes, item_base, place, bounded, run_ahead, item):
                    request_s[d] = now
            for dispatcher in range(num_dispatchers):
                if launch_end_s[dispatcher] < never:
                    continue
                first = -1
                for d in range(num_devices):
                    if dispatcher_of[d] == dispatcher and request_s[d] < (never if first < 0 else request_s[first]):
                        first = d
                if first >= 0:
                    request_s[first] = never
                    launch_lane[dispatcher] = first_launch_lane + first
                    is_op = lane_items[lane_head[first_launch_lane + first]] < n
                    launch_end_s[dispatcher] = now + (dispatch_s if is_op else copy_dispatch_s)
        elif launches:
            for dispatcher in range(num_dispatchers):
                lane = first_launch_lane + dispatcher
                if launch_end_s[dispatcher] == never and lane_head[lane] < lane_base[lane + 1]:
                    item = lane_items[lane_head[lane]]
                    if _within_bound(lane_base, lane_head, item_lanes, item_base, place, bounded, run_ahead, item):
                        launch_lane[dispatcher] = lane
                        launch_end_s[dispatcher] = now + (dispatch_s if item < n else copy_dispatch_s)
        # Phase 3: items that wait for nothing more start.
        for a in range(num_startable):
            item = startable[a]
            slot = slot_of[item]
            start_s[item] = now
            end_s[item] = now + duration_s[item]
            slot_item[slot] = item
            slot_end_s[slot] = now + duration_s[item]
            if slot < num_devices:
                work_s[slot] = duration_s[item]
                anchor_s[slot] = now
                slowdown[slot] = 1.0
        # Phase 4: the next instant is the earliest end of an item or a launch; what ends then gives up its lanes.
        num_startable = 0
        soonest = min(earliest(slot_end_s, num_slots), earliest(launch_end_s, num_dispatchers))
        if has_corun and soonest > now:
            slow_down(corun_slowdown, slot_end_s, slowdown, work_s, anchor_s, num_devices, now)
            soonest = min(earliest(slot_end_s, num_slots), earliest(launch_end_s, num_dispatchers))
        if soonest == never:
            break
        now = soonest
        num_ended = 0
        for slot in range(num_slots):
            if slot_end_s[slot] != now:
                continue
            slot_end_s[slot] = never
            item = slot_item[slot]
            end_s[item] = now
            k = first_behind[item] if has_relays else -1
            while k >= 0:
                num_startable = _meet(data_waiting, waiting, startable, num_startable, n + k)
                k = next_behind[k]
            for a in range(item_base[item], item_end[item]):
                lane = item_lanes[a]
                if lane < first_launch_lane:
                    lane_head[lane] += 1
                    if lane_head[lane] < lane_base[lane + 1]:
                        num_startable = _take(waiting, startable, num_startable, lane_items[lane_head[lane]])
            if item < n:
                ended[num_ended] = item
                num_ended += 1
                continue
            num_done += 1
            t = transfer_tensor[item - n]
            for b in range(reader_offsets[t], reader_offsets[t + 1]):
                if devices[reader_ops[b]] == transfer_destination[item - n]:
                    num_startable = _meet(data_waiting, waiting, startable, num_startable, reader_ops[b])
            k = first_transfer[t] if has_relays else -1
            while k >= 0:
                if transfer_source[k] == transfer_destination[item - n]:
                    num_startable = _meet(data_waiting, waiting, startable, num_startable, n + k)
                k = next_transfer[k]
            if has_updates:
                for b in range(updater_offsets[t], updater_offsets[t + 1]):
                    num_startable = _meet(data_waiting, waiting, startable, num_startable, updater_ops[b])
        for dispatcher in range(num_dispatchers):
            if launch_end_s[dispatcher] == now:
                launch_end_s[dispatcher] = never
                lane = launch_lane[dispatcher]
                item = lane_items[lane_head[lane]]
                lane_head[lane] += 1
                num_startable = _take(waiting, startable, num_startable, item)
    return now if num_done == s.state[POSITION] else never


@part
def _take(waiting: Ints, startable: Ints, count: int, item: int) -> int:
    waiting[item] -= 1
    if waiting[item] == 0:
        startable[count] = item
        count += 1
    return count


@part
def _meet(data_waiting: Ints, waiting: Ints, startable: Ints, count: int, item: int) -> int:
    data_waiting[item] -= 1
    return _take(waiting, startable, count, item)


@part
def _within_bound(
    lane_base: Longs,
    lane_head: Longs,
    item_lanes: Ints,
    item_base: Longs,
    place: Ints,
    bounded: Ints,
    run_ahead: int,
    item: int,
) -> bool:
    """Whether the job `run_ahead` places before this one has ended on each single device that the bound regards."""
    for a in range(item_base[item], item_base[item] + bounded[item]):
        lane = item_lanes[a]
        if lane_head[lane] - lane_base[lane] <= place[a] - run_ahead:
            return False
    return True


@part
def _lay_out_lanes(p: Compiled, s: Scratch, v: EventScratch, devices: Ints) -> None:
    """Find the lanes of every item, in plan order, with its duration and slot; a relay sends between its items."""
    n, num_devices = p.num_ops, p.num_devices
    first_launch_lane = num_devices + p.num_links
    is_source, op_time_s, atoms = pointer(p.is_source), pointer(p.op_time_s), pointer(p.atoms)
    route_kind, route_offsets, route_links = p.route_kind, pointer(p.route_offsets), pointer(p.route_links)
    blocks_source, latency_s = pointer(p.route_blocks_source), pointer(p.route_latency_s)
    s_per_byte, tensor_bytes, tensor_op = pointer(p.route_s_per_byte), pointer(p.tensor_bytes), pointer(p.tensor_op)
    first_behind, next_behind, last_item = pointer(v.first_behind), pointer(v.next_behind), pointer(v.last_item)
    data_waiting, has_relays = pointer(v.data_waiting), p.has_relays
    route_slot, dispatcher, launches, by_request = (
        pointer(p.route_slot),
        pointer(p.dispatcher),
        p.launches,
        p.by_request,
    )
    lane_base, lane_head, lane_items = v.lane_base, v.lane_head, pointer(v.lane_items)
    item_lanes, item_base, item_end = pointer(v.item_lanes), pointer(v.item_base), pointer(v.item_end)
    place, slot, bounded, duration_s = pointer(v.place), pointer(v.slot), pointer(v.bounded), pointer(v.duration_s)
    transfer_tensor, transfer_destination = pointer(s.transfer_tensor), pointer(s.transfer_destination)
    sequence = pointer(s.sequence)
    count = 0
    lane_head[:] = 0
    if has_relays:
        v.first_behind[:] = -1
        v.last_item[:] = -1
    for position in range(s.state[POSITION]):
        item = sequence[position]
        item_base[item] = item_end[item] = count
        slot[item] = -1
        bounded[item] = 0
        first = count
        if item < n:
            device = devices[item]
            pair = device * num_devices + device
            if is_source[item]:
                continue
            own = held = atoms[device]
            duration_s[item] = op_seconds(p, op_time_s, devices, item, device)
            slot[item] = device
        else:
            t, device = transfer_tensor[item - n], transfer_destination[item - n]
            source = s.transfer_source[item - n]
            pair = source * num_devices + device
            if route_kind[pair] == HANDOVER:
                continue
            is_job = route_kind[pair] == JOB
            own = held = atoms[device] if is_job else 0
            if blocks_source[pair]:
                held |= atoms[source]
            if has_relays and source != devices[tensor_op[t]] and last_item[source] >= 0:  # a relay ends that first
                next_behind[item - n] = first_behind[last_item[source]]
                first_behind[last_item[source]] = item - n
                data_waiting[item] += 1
            seconds = transfer_seconds(latency_s, s_per_byte, pair, tensor_bytes[t])
            duration_s[item] = seconds * s.transfer_factor[item - n]
            slot[item] = device if is_job else route_slot[pair]
        held &= ~own
        while own:
            item_lanes[count] = lowest_bit(own)
            own &= own - 1
            count += 1
        bounded[item] = count - first
        while held:
            item_lanes[count] = lowest_bit(held)
            held &= held - 1
            count += 1
        for a in range(route_offsets[pair], route_offsets[pair + 1]):
            item_lanes[count] = num_devices + route_links[a]
            count += 1
        if launches and dispatcher[device] >= 0:
            item_lanes[count] = first_launch_lane + (device if by_request else dispatcher[device])
            count += 1
        for a in range(first, count):
            place[a] = lane_head[item_lanes[a]]
            lane_head[item_lanes[a]] += 1
            if has_relays and item_lanes[a] < num_devices:
                last_item[item_lanes[a]] = item
        item_end[item] = count
    lane_base[0] = 0
    for lane in range(len(lane_head)):
        lane_base[lane + 1] = lane_base[lane] + lane_head[lane]
    for position in range(s.state[POSITION]):
        item = sequence[position]
        for a in range(item_base[item], item_end[item]):
            lane_items[lane_base[item_lanes[a]] + place[a]] = item


@part
def _count_data(p: Compiled, s: Scratch, v: EventScratch, devices: Ints) -> None:
    """Count the dependencies of every item: inputs, and the other users of a tensor that it updates."""
    n = p.num_ops
    data_waiting, transfer_tensor = pointer(v.data_waiting), pointer(s.transfer_tensor)
    first_transfer, next_transfer = pointer(v.first_transfer), pointer(v.next_transfer)
    for i in range(n):
        data_waiting[i] = p.input_offsets[i + 1] - p.input_offsets[i]
    v.first_transfer[:] = -1
    for k in range(s.state[TRANSFERS] - 1, -1, -1):
        data_waiting[n + k] = 1
        next_transfer[k] = first_transfer[transfer_tensor[k]]
        first_transfer[transfer_tensor[k]] = k
    if p.has_updates:
        count_updates(p, v.data_waiting, devices)
