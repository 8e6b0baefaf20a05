"""Timing a given plan event by event: for hosts with `corun_slowdown`, or whose launches queue by request.

Items take turns in the lanes of `EventScratch`.
"""

from __future__ import annotations

import numpy as np

from rlplace.jit import Ints, Longs, lowest_bit, part, pointer
from rlplace.measure.simulate.compiled_problem import HANDOVER, JOB, Compiled
from rlplace.measure.simulate.kernel_plan import count_updates, waiting_updates
from rlplace.measure.simulate.kernel_plan_general import earliest, slow_down
from rlplace.measure.simulate.scratch import POSITION, TRANSFERS, EventScratch, Scratch
from rlplace.measure.simulate.transfer_time import transfer_seconds


@part
def retime_events(p: Compiled, s: Scratch, v: EventScratch, placement: Ints) -> float:
    """Seconds of a step that follows the plan in the scratch, infinite where it cannot be followed to its end."""
    n, num_devices, num_dispatchers, run_ahead = p.num_ops, p.num_devices, p.num_dispatchers, p.run_ahead
    num_slots, num_lanes = p.num_slots, len(v.lane_head)
    output_offsets, is_source, route_kind = pointer(p.output_offsets), pointer(p.is_source), pointer(p.route_kind)
    reader_offsets, reader_ops = pointer(p.reader_offsets), pointer(p.reader_ops)
    launches, by_request, dispatcher_of = p.launches, p.by_request, pointer(p.dispatcher)
    dispatch_s, copy_dispatch_s = p.dispatch_s, p.copy_dispatch_s
    has_corun, has_updates, updates, found = p.has_corun, p.has_updates, p.updates, s.found
    concerned, updater_offsets = pointer(updates.concerned), pointer(updates.updater_offsets)
    updater_ops, corun_slowdown = pointer(updates.updater_ops), pointer(p.corun_slowdown)
    sequence, start_s, end_s = pointer(s.sequence), pointer(s.start_s), pointer(s.end_s)
    waiting, slot_item, slot_end_s = pointer(s.waiting), pointer(s.slot_item), pointer(s.slot_end_s)
    work_s, anchor_s, slowdown = pointer(v.work_s), pointer(v.anchor_s), pointer(v.slowdown)
    transfer_tensor, transfer_destination = pointer(s.transfer_tensor), pointer(s.transfer_destination)
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
    _lay_out_lanes(p, s, v, placement)
    _count_data(p, s, v, placement)
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
                    else:
                        num_startable = _meet(data_waiting, waiting, startable, num_startable, n + k)
                    k = next_transfer[k]
            if has_updates and concerned[op]:
                for b in range(waiting_updates(updates, placement, op, found)):
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
        soonest = earliest(slot_end_s, num_slots)
        soonest = min(soonest, earliest(launch_end_s, num_dispatchers))
        if has_corun and soonest > now:
            slow_down(corun_slowdown, slot_end_s, slowdown, work_s, anchor_s, num_devices, now)
            soonest = earliest(slot_end_s, num_slots)
            soonest = min(soonest, earliest(launch_end_s, num_dispatchers))
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
    """Find the lanes of every item, in plan order, with its duration and slot."""
    n, num_devices = p.num_ops, p.num_devices
    first_launch_lane = num_devices + p.num_links
    is_source, op_time_s, atoms = pointer(p.is_source), pointer(p.op_time_s), pointer(p.atoms)
    route_kind, route_offsets, route_links = p.route_kind, pointer(p.route_offsets), pointer(p.route_links)
    blocks_source, latency_s = pointer(p.route_blocks_source), pointer(p.route_latency_s)
    s_per_byte, tensor_bytes, tensor_op = pointer(p.route_s_per_byte), pointer(p.tensor_bytes), pointer(p.tensor_op)
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
            duration_s[item] = op_time_s[item * num_devices + device]
            slot[item] = device
        else:
            t, device = transfer_tensor[item - n], transfer_destination[item - n]
            source = devices[tensor_op[t]]
            pair = source * num_devices + device
            if route_kind[pair] == HANDOVER:
                continue
            is_job = route_kind[pair] == JOB
            own = held = atoms[device] if is_job else 0
            if blocks_source[pair]:
                held |= atoms[source]
            duration_s[item] = transfer_seconds(latency_s, s_per_byte, pair, tensor_bytes[t])
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
    """Count what every item waits for: inputs, and the other users of a tensor that it updates."""
    n = p.num_ops
    data_waiting, transfer_tensor = pointer(v.data_waiting), pointer(s.transfer_tensor)
    first_transfer, next_transfer = pointer(v.first_transfer), pointer(v.next_transfer)
    for i in range(n):
        data_waiting[i] = p.input_counts[i]
    v.first_transfer[:] = -1
    for k in range(s.state[TRANSFERS] - 1, -1, -1):
        data_waiting[n + k] = 1
        next_transfer[k] = first_transfer[transfer_tensor[k]]
        first_transfer[transfer_tensor[k]] = k
    if p.has_updates:
        count_updates(p.updates, p.reader_offsets, p.reader_ops, v.data_waiting, devices)
