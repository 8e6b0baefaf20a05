"""Peak memory of every account, from when each item starts and ends.

An allocation counts from its start up to, not including, its end. Allocations and frees are kept in one lane each for
every account, in order of time (they come almost in order), and merged.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from rlplace.measure.compiled import HANDOVER, Compiled
from rlplace.measure.scratch import POSITION, TRANSFERS, Scratch


@njit(cache=True, nogil=True)
def peaks(p: Compiled, s: Scratch, devices):  # type: ignore[no-untyped-def]
    """Whether every account stays within its capacity; the peaks are left in the scratch."""
    n, num_devices = p.num_ops, p.num_devices
    is_source, is_output, size_class, pool = p.is_source, p.is_output, p.size_class, p.pool
    tensor_size, workspace_size = p.tensor_size, p.workspace_size
    input_offsets, input_tensors, output_offsets, tensor_op = (
        p.input_offsets, p.input_tensors, p.output_offsets, p.tensor_op,
    )  # fmt: skip
    route_kind = p.route_kind
    sequence, start_s, end_s = s.sequence, s.start_s, s.end_s
    transfer_tensor, transfer_destination = s.transfer_tensor, s.transfer_destination
    users, last_use_s, base, count = s.users, s.last_use_s, s.event_base, s.event_count
    event_time_s, event_bytes = s.event_time_s, s.event_bytes
    _lay_out(p, s, devices)
    for position in range(s.state[POSITION]):
        item = sequence[position]
        start, end = start_s[item], end_s[item]
        if item >= n:
            t, d = transfer_tensor[item - n], transfer_destination[item - n]
            source = devices[tensor_op[t]]
            if route_kind[source * num_devices + d] != HANDOVER:
                note(event_time_s, event_bytes, base, count, pool, d, 0, start, tensor_size[size_class[d], t])
                place = t * num_devices + source
                users[place] -= 1
                last_use_s[t] = max(last_use_s[t], end)
                if users[place] == 0 and not (is_source[tensor_op[t]] or is_output[t]):
                    size = tensor_size[size_class[source], t]
                    note(event_time_s, event_bytes, base, count, pool, source, 1, last_use_s[t], size)
        elif not is_source[item]:
            d = devices[item]
            freed = workspace_size[size_class[d], item]
            allocated = freed
            for t in range(output_offsets[item], output_offsets[item + 1]):
                size = tensor_size[size_class[d], t]
                allocated += size
                if users[t * num_devices + d] == 0 and not is_output[t]:
                    freed += size
            note(event_time_s, event_bytes, base, count, pool, d, 0, start, allocated)
            for a in range(input_offsets[item], input_offsets[item + 1]):
                t = input_tensors[a]
                source = devices[tensor_op[t]]
                account = source if route_kind[source * num_devices + d] == HANDOVER else d
                place = t * num_devices + account
                users[place] -= 1
                size = tensor_size[size_class[account], t]
                if account != source:
                    if users[place] == 0:
                        freed += size
                else:
                    last_use_s[t] = max(last_use_s[t], end)
                    if users[place] == 0 and not (is_source[tensor_op[t]] or is_output[t]):
                        note(event_time_s, event_bytes, base, count, pool, account, 1, last_use_s[t], size)
            if freed > 0:
                note(event_time_s, event_bytes, base, count, pool, d, 1, end, freed)
    fits = True
    for account in range(p.num_accounts):
        lane = 2 * account
        most = _most(event_time_s, event_bytes, base[lane], base[lane + 1], count[lane], count[lane + 1])
        s.peak_bytes[account] = s.held_bytes[account] + most
        fits = fits and s.peak_bytes[account] <= p.capacity_bytes[account]
    return fits


@njit(cache=True, nogil=True)
def _lay_out(p: Compiled, s: Scratch, devices) -> None:  # type: ignore[no-untyped-def]
    """Count the users of every tensor on every account, and what is held from start to end of the step."""
    n, num_devices = p.num_ops, p.num_devices
    is_source, size_class, pool, output_offsets = p.is_source, p.size_class, p.pool, p.output_offsets
    input_offsets, input_tensors, tensor_op, route_kind = p.input_offsets, p.input_tensors, p.tensor_op, p.route_kind
    tensor_size, state_size = p.tensor_size, p.state_size
    transfer_tensor, transfer_destination = s.transfer_tensor, s.transfer_destination
    users, held_bytes, base = s.users, s.held_bytes, s.event_base
    users[:] = 0
    s.last_use_s[:] = 0.0
    s.event_count[:] = 0
    base[:] = 0
    held_bytes[:] = 0
    held_bytes[:num_devices] = p.context_bytes
    for i in range(n):
        d = devices[i]
        held_bytes[d] += state_size[size_class[d], i]
        if is_source[i]:
            for t in range(output_offsets[i], output_offsets[i + 1]):
                held_bytes[d] += tensor_size[size_class[d], t]
            continue
        base[2 * d + 1] += 1
        base[2 * d + 2] += 1 + output_offsets[i + 1] - output_offsets[i]
        for a in range(input_offsets[i], input_offsets[i + 1]):
            t = input_tensors[a]
            source = devices[tensor_op[t]]
            account = source if route_kind[source * num_devices + d] == HANDOVER else d
            users[t * num_devices + account] += 1
    for k in range(s.state[TRANSFERS]):
        t, d = transfer_tensor[k], transfer_destination[k]
        source = devices[tensor_op[t]]
        if route_kind[source * num_devices + d] != HANDOVER:
            users[t * num_devices + source] += 1
            base[2 * d + 1] += 1
            base[2 * d + 2] += 1
    for d in range(num_devices):
        if pool[d] >= 0:
            held_bytes[pool[d]] += held_bytes[d]
            base[2 * pool[d] + 1] += base[2 * d + 1]
            base[2 * pool[d] + 2] += base[2 * d + 2]
    for lane in range(2 * p.num_accounts):
        base[lane + 1] += base[lane]


@njit(cache=True, nogil=True)
def note(event_time_s, event_bytes, base, count, pool, device, is_free, time, size) -> None:  # type: ignore[no-untyped-def]
    """Keep an allocation or a free of the device, and of its pool, in order of time."""
    account = device
    while account >= 0:
        lane = 2 * account + is_free
        first = base[lane]
        at = first + count[lane]
        count[lane] += 1
        while at > first and event_time_s[at - 1] > time:
            event_time_s[at] = event_time_s[at - 1]
            event_bytes[at] = event_bytes[at - 1]
            at -= 1
        event_time_s[at] = time
        event_bytes[at] = size
        account = pool[device] if account == device else -1


@njit(cache=True, nogil=True)
def _most(event_time_s, event_bytes, allocation, free, allocations, frees):  # type: ignore[no-untyped-def]
    """Most bytes allocated at any time: at one instant frees come before allocations."""
    held = np.int64(0)
    most = np.int64(0)
    last, last_free = allocation + allocations, free + frees
    while allocation < last:
        if free < last_free and event_time_s[free] <= event_time_s[allocation]:
            held -= event_bytes[free]
            free += 1
        else:
            held += event_bytes[allocation]
            allocation += 1
            most = max(most, held)
    return most
