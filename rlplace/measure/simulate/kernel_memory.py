"""Peak memory of every account.

An allocation counts from its start up to, not including, its end. Allocations and frees are kept in one lane each for
every account, in order of time (they come almost in order), and merged at the end.
"""

from __future__ import annotations

import numpy as np

from rlplace.jit import Floats, Ints, Longs, inlined, kernel, pointer
from rlplace.measure.simulate.compiled import Compiled
from rlplace.measure.simulate.host_tables import HANDOVER
from rlplace.measure.simulate.scratch import KEPT, ORIGINAL, TRANSFERS, Scratch


@kernel
def lay_out_memory(p: Compiled, s: Scratch, placement: Ints) -> None:
    """Count the users of every tensor on every account, and what is held from start to end of the step."""
    n, num_devices, has_handovers = p.num_ops, p.num_devices, p.has_handovers
    is_source, is_kept, size_class, pool = pointer(p.is_source), pointer(p.is_kept), pointer(p.size_class), p.pool
    input_offsets, input_tensors = pointer(p.input_offsets), pointer(p.input_tensors)
    output_offsets, tensor_op, route_kind = pointer(p.output_offsets), pointer(p.tensor_op), pointer(p.route_kind)
    tensor_size, state_size = pointer(p.tensor_size), pointer(p.state_size)
    transfer_tensor, transfer_destination = pointer(s.transfer_tensor), pointer(s.transfer_destination)
    users, held_bytes, base, devices = (
        pointer(s.users),
        pointer(s.held_bytes),
        pointer(s.event_base),
        pointer(placement),
    )
    s.users[:] = 0
    s.event_count[:] = 0
    s.event_base[:] = 1
    s.held_bytes[:] = 0
    for d in range(num_devices):
        held_bytes[d] = p.context_bytes[d]
    for i in range(n):
        d = devices[i]
        held_bytes[d] += state_size[size_class[d] * n + i]
        base[2 * d + 1] += 1
        base[2 * d + 2] += 1
        for t in range(output_offsets[i], output_offsets[i + 1]):
            base[2 * d + 2] += 1
            users[t * num_devices + d] = ORIGINAL + KEPT * is_kept[t]
            held_bytes[d] += is_source[i] * tensor_size[size_class[d] * p.num_tensors + t]
        for a in range(input_offsets[i], input_offsets[i + 1]):
            account = d
            if has_handovers:
                source = devices[tensor_op[input_tensors[a]]]
                account = source if route_kind[source * num_devices + d] == HANDOVER else d
            users[input_tensors[a] * num_devices + account] += 1
    for k in range(s.state[TRANSFERS]):
        t, d = transfer_tensor[k], transfer_destination[k]
        source = devices[tensor_op[t]]
        if not has_handovers or route_kind[source * num_devices + d] != HANDOVER:
            users[t * num_devices + source] += 1
            base[2 * d + 1] += 1
            base[2 * d + 2] += 1
    for d in range(num_devices):
        if pool[d] >= 0:
            held_bytes[pool[d]] += held_bytes[d]
            base[2 * pool[d] + 1] += base[2 * d + 1]
            base[2 * pool[d] + 2] += base[2 * d + 2]
    base[0] = 0
    for lane in range(2 * p.num_accounts):
        base[lane + 1] += base[lane]


@inlined
def note(
    time_s: Floats, num_bytes: Longs, base: Longs, count: Longs, account: int, is_free: int, time: float, size: int
) -> None:
    """Keep an allocation or a free, in order of time."""
    lane = 2 * account + is_free
    first = 2 * base[lane]
    at = first + 2 * count[lane]
    count[lane] += 1
    while at > first and time_s[at - 2] > time:
        time_s[at] = time_s[at - 2]
        num_bytes[at + 1] = num_bytes[at - 1]
        at -= 2
    time_s[at] = time
    num_bytes[at + 1] = size


@kernel
def find_peaks(p: Compiled, s: Scratch) -> bool:
    """Whether every account stays within its capacity; the peaks are left in the scratch."""
    time_s, num_bytes = pointer(s.events), pointer(s.events.view(np.int64))
    base, count = s.event_base, s.event_count
    fits = True
    for account in range(p.num_accounts):
        allocation, free = 2 * base[2 * account], 2 * base[2 * account + 1]
        last = allocation + 2 * count[2 * account]
        time_s[free + 2 * count[2 * account + 1]] = np.inf
        held = most = 0
        while allocation < last:
            frees = int(time_s[free] <= time_s[allocation])
            held += num_bytes[allocation + 1] if frees == 0 else -num_bytes[free + 1]
            free += 2 * frees
            allocation += 2 * (1 - frees)
            most = max(most, held)
        s.peak_bytes[account] = s.held_bytes[account] + most
        fits = fits and s.peak_bytes[account] <= p.capacity_bytes[account]
    return fits
