"""Timing a given plan in one pass over its sequence: every item waits only for items before it.

This holds where a job's duration does not depend on what runs beside it (no `corun_slowdown`) and launches follow the
plan (not `dispatch_order="request"`); kernel_events.py times the other hosts.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from rlplace.measure.bits import lowest_bit
from rlplace.measure.compiled import HANDOVER, JOB, Compiled
from rlplace.measure.kernel_updates import is_updater, shares_memory
from rlplace.measure.scratch import POSITION, TRANSFERS, Scratch


@njit(cache=True, nogil=True)
def retime(p: Compiled, s: Scratch, devices):  # type: ignore[no-untyped-def]
    """Seconds of a step that follows the plan in the scratch; the times are left there.

    Args:
        p: the problem.
        s: working memory, holding the plan.
        devices: (N,) int32, device of each op.
    """
    n, num_devices, run_ahead = p.num_ops, p.num_devices, p.run_ahead
    is_source, op_time_s, atoms = p.is_source, p.op_time_s, p.atoms
    input_offsets, input_tensors, output_offsets, tensor_op = (
        p.input_offsets, p.input_tensors, p.output_offsets, p.tensor_op,
    )  # fmt: skip
    route_kind, route_offsets, route_links = p.route_kind, p.route_offsets, p.route_links
    blocks_source, latency_s, s_per_byte, tensor_bytes = (
        p.route_blocks_source, p.route_latency_s, p.route_s_per_byte, p.tensor_bytes,
    )  # fmt: skip
    dispatcher, dispatch_s, copy_dispatch_s = p.dispatcher, p.dispatch_s, p.copy_dispatch_s
    updates, updated_s, has_updates = p.updates, s.updated_s, p.has_updates
    sequence, start_s, end_s = s.sequence, s.start_s, s.end_s
    transfer_tensor, transfer_destination = s.transfer_tensor, s.transfer_destination
    available_s, atom_free_s, link_free_s = s.available_s, s.atom_free_s, s.link_free_s
    dispatcher_free_s, recent_s, recent_place = s.dispatcher_free_s, s.recent_s, s.recent_place
    atom_free_s[:] = 0.0
    link_free_s[:] = 0.0
    dispatcher_free_s[:] = 0.0
    updated_s[:] = 0.0
    if p.launches:
        recent_s[:] = 0.0
        for d in range(num_devices):
            recent_place[d] = d * run_ahead
    step_s = 0.0
    for position in range(s.state[POSITION]):
        item = sequence[position]
        start = 0.0
        held = np.int64(0)  # single devices that the item keeps busy
        own = np.int64(0)  # those among them whose earlier jobs bound its launch
        launch_s = dispatch_s
        if item < n:
            device = devices[item]
            source = device
            pair = device * num_devices + device
            if is_source[item]:
                start_s[item] = end_s[item] = 0.0
                for t in range(output_offsets[item], output_offsets[item + 1]):
                    available_s[t * num_devices + device] = 0.0
                continue
            own = held = atoms[device]
            duration = op_time_s[item, device]
            for a in range(input_offsets[item], input_offsets[item + 1]):
                start = max(start, available_s[input_tensors[a] * num_devices + device])
            if has_updates:
                for a in range(updates.updated_offsets[item], updates.updated_offsets[item + 1]):
                    start = max(start, updated_s[updates.updated_tensors[a]])
        else:
            tensor, device = transfer_tensor[item - n], transfer_destination[item - n]
            source = devices[tensor_op[tensor]]
            pair = source * num_devices + device
            start = available_s[tensor * num_devices + source]
            if route_kind[pair] == HANDOVER:
                start_s[item] = end_s[item] = start
                available_s[tensor * num_devices + device] = start
                continue
            if route_kind[pair] == JOB:
                own = held = atoms[device]
            if blocks_source[pair]:
                held |= atoms[source]
            launch_s = copy_dispatch_s
            duration = latency_s[pair] + tensor_bytes[tensor] * s_per_byte[pair]
            for a in range(route_offsets[pair], route_offsets[pair + 1]):
                start = max(start, link_free_s[route_links[a]])
        if p.launches and dispatcher[device] >= 0:
            launched = dispatcher_free_s[dispatcher[device]]
            rest = own
            while rest:
                launched = max(launched, recent_s[recent_place[lowest_bit(rest)]])
                rest &= rest - 1
            launched += launch_s
            dispatcher_free_s[dispatcher[device]] = launched
            start = max(start, launched)
        rest = held
        while rest:
            start = max(start, atom_free_s[lowest_bit(rest)])
            rest &= rest - 1
        end = start + duration
        start_s[item] = start
        end_s[item] = end
        step_s = max(step_s, end)
        rest = held
        while rest:
            d = lowest_bit(rest)
            rest &= rest - 1
            atom_free_s[d] = end
            if p.launches:
                recent_s[recent_place[d]] = end
                place = recent_place[d] + 1
                recent_place[d] = place if place < (d + 1) * run_ahead else d * run_ahead
        if item < n:
            for t in range(output_offsets[item], output_offsets[item + 1]):
                available_s[t * num_devices + device] = end
            if has_updates and updates.concerned[item]:
                for a in range(input_offsets[item], input_offsets[item + 1]):
                    t = input_tensors[a]
                    if updates.updater_offsets[t] < updates.updater_offsets[t + 1]:
                        if not is_updater(updates, item, t) and shares_memory(updates, devices[tensor_op[t]], device):
                            updated_s[t] = max(updated_s[t], end)
                for a in range(updates.updated_offsets[item], updates.updated_offsets[item + 1]):
                    t = updates.updated_tensors[a]
                    updated_s[t] = max(updated_s[t], end)
        else:
            for a in range(route_offsets[pair], route_offsets[pair + 1]):
                link_free_s[route_links[a]] = end
            available_s[tensor * num_devices + device] = end
            if has_updates:
                updated_s[tensor] = max(updated_s[tensor], end)
    return step_s


@njit(cache=True, nogil=True)
def check(p: Compiled, s: Scratch, devices):  # type: ignore[no-untyped-def]
    """Position of the first item of the sequence that comes too early or twice, or -1 where the sequence is sound.

    Leaves the number of transfers that the placement needs in `s.state[TRANSFERS]`.
    """
    n, num_devices = p.num_ops, p.num_devices
    input_offsets, input_tensors, output_offsets, tensor_op = (
        p.input_offsets, p.input_tensors, p.output_offsets, p.tensor_op,
    )  # fmt: skip
    u, sequence, state = p.updates, s.sequence, s.users
    done = s.waiting
    done[:] = 0
    state[:] = 0
    missing, there = 1, 2
    needed = 0
    for i in range(n):
        for a in range(input_offsets[i], input_offsets[i + 1]):
            t = input_tensors[a]
            place = t * num_devices + devices[i]
            if devices[i] != devices[tensor_op[t]] and state[place] == 0:
                state[place] = missing
                needed += 1
    s.state[TRANSFERS] = needed
    for position in range(s.state[POSITION]):
        item = sequence[position]
        if done[item]:
            return position
        done[item] = 1
        if item < n:
            for a in range(input_offsets[item], input_offsets[item + 1]):
                if state[input_tensors[a] * num_devices + devices[item]] != there:
                    return position
            for a in range(u.updated_offsets[item], u.updated_offsets[item + 1]):
                t = u.updated_tensors[a]
                source = devices[tensor_op[t]]
                for e in range(num_devices):
                    if not shares_memory(u, source, e) and state[t * num_devices + e] == missing:
                        return position
                for b in range(p.reader_offsets[t], p.reader_offsets[t + 1]):
                    reader = p.reader_ops[b]
                    if not done[reader] and not is_updater(u, reader, t) and shares_memory(u, source, devices[reader]):
                        return position
                for b in range(u.updater_offsets[t], u.updater_offsets[t + 1]):
                    if u.updater_ops[b] < item and not done[u.updater_ops[b]]:
                        return position
            for t in range(output_offsets[item], output_offsets[item + 1]):
                state[t * num_devices + devices[item]] = there
        else:
            tensor, destination = s.transfer_tensor[item - n], s.transfer_destination[item - n]
            place = tensor * num_devices + destination
            if state[tensor * num_devices + devices[tensor_op[tensor]]] != there or state[place] != missing:
                return position
            state[place] = there
    return -1
