"""Whole evaluations of a plan or of a batch of placements (`evaluate`), and the critical path of a plan that was timed.

`retime` times a given plan in one pass over its sequence: every item waits only for items before it. This holds where a
job's duration does not depend on jobs beside it (no `corun_slowdown`) and launches follow the plan (not
`dispatch_order="request"`); `retime_events` finds the times of the other hosts. Memory is followed for all.

For peak memory, an allocation counts from its start up to, not including, its end. Allocations and frees are kept in
one lane each for every account, in order of time (they come almost in order), and merged at the end (`find_peaks`).
"""

from __future__ import annotations

import numpy as np

from rlplace.jit import Floats, Ints, Longs, inlined, kernel, lowest_bit, part, pointer
from rlplace.measure.simulate.compiled_problem import (
    HANDOVER,
    JOB,
    KEPT,
    ORIGINAL,
    POSITION,
    TRANSFERS,
    Compiled,
    EventScratch,
    FastScratch,
    PlanBatch,
    Scratch,
)
from rlplace.measure.simulate.kernel_general import plan_general, retime_events
from rlplace.measure.simulate.kernel_plan import SLACK, is_updater, least_seconds, op_seconds, plan, shares_memory
from rlplace.measure.simulate.transfer_time import transfer_seconds


@kernel
def evaluate(
    p: Compiled,
    s: Scratch,
    f: FastScratch | None,
    v: EventScratch | None,
    throughput: bool,
    batch: PlanBatch,
    first: int,
    last: int,
    rank: Ints,
    by_rank: Ints,
    cutoff_s: Floats,
    step_s: Floats,
    peak_bytes: Longs,
) -> None:
    """Fill places `first` up to `last` of `step_s` (B,) and `peak_bytes` (B, accounts).

    Placements that come without a plan are planned. The step time is infinite where memory does not suffice, and may be
    where it is above `cutoff_s` (B,), whose peaks are then 0. Peaks count each op's scratch memory on its device.
    The scratch keeps the plan, times and memory events of the last one, if it was not given up.
    """
    by_event = p.has_corun or p.by_request
    for b in range(first, last):
        devices = batch.devices[b]
        cutoff = cutoff_s[b] * (1.0 + SLACK)
        step_s[b] = np.inf
        peak_bytes[b] = 0
        if cutoff < np.inf and least_seconds(p, s, devices, throughput) > cutoff:
            continue
        # launches delay what is planned, but with launches by request or co-run slowdown a delay may save time
        planned_cutoff = np.inf if throughput or by_event else cutoff
        planned = 0.0
        if len(batch.sequence) > 0:
            load_plan(s, batch, b)
        else:  # numba leaves out what is called under `is not None` where it is None: each host compiles one planner
            if f is not None:
                planned = plan(p, s, f, devices, rank, by_rank, planned_cutoff)
            if v is not None:
                planned = plan_general(p, s, v, devices, rank, by_rank, planned_cutoff)
        if planned > planned_cutoff:
            continue
        lay_out_memory(p, s, devices)
        if v is not None:  # noqa: SIM102 (so alone is it left out)
            if by_event:
                retime_events(p, s, v, devices)
        seconds = retime(p, s, devices, by_event)
        fits = find_peaks(p, s)
        if throughput:
            seconds = busiest(p, s, devices)
        step_s[b] = seconds if fits else np.inf
        for account in range(p.num_accounts):
            peak_bytes[b, account] = s.peak_bytes[account]


@kernel
def load_plan(s: Scratch, batch: PlanBatch, b: int) -> None:
    """Put plan `b` of the batch into the scratch."""
    first, last = batch.sequence_offsets[b], batch.sequence_offsets[b + 1]
    s.state[POSITION] = last - first
    for a in range(last - first):
        s.sequence[a] = batch.sequence[first + a]
    first, last = batch.transfer_offsets[b], batch.transfer_offsets[b + 1]
    s.state[TRANSFERS] = last - first
    for a in range(last - first):
        s.transfer_tensor[a] = batch.transfer_tensor[first + a]
        s.transfer_source[a] = batch.transfer_source[first + a]
        s.transfer_destination[a] = batch.transfer_destination[first + a]


@part
def busiest(p: Compiled, s: Scratch, devices: Ints) -> float:
    """Seconds per step in the steady state of a pipeline: the work of the busiest device or link."""
    n, num_devices = p.num_ops, p.num_devices
    s.load_s[:] = 0.0
    for i in range(n):
        if not p.is_source[i]:
            _load(p, s, p.atoms[devices[i]], op_seconds(p, p.op_time_s, devices, i, devices[i]))
    for position in range(s.state[POSITION]):
        k = s.sequence[position] - n
        if k >= 0:
            tensor, destination = s.transfer_tensor[k], s.transfer_destination[k]
            source = s.transfer_source[k]
            pair = source * num_devices + destination
            if p.route_kind[pair] == HANDOVER:
                continue
            duration = transfer_seconds(p.route_latency_s, p.route_s_per_byte, pair, p.tensor_bytes[tensor])
            atoms = 0
            if p.route_kind[pair] == JOB:
                atoms |= p.atoms[destination]
            if p.route_blocks_source[pair]:
                atoms |= p.atoms[source]
            _load(p, s, atoms, duration)
            for a in range(p.route_offsets[pair], p.route_offsets[pair + 1]):
                s.load_s[num_devices + p.route_links[a]] += duration
    most = 0.0
    for load in s.load_s:
        most = max(most, load)
    return most


@part
def _load(p: Compiled, s: Scratch, atoms: int, seconds: float) -> None:
    for d in range(p.num_devices):
        if (atoms >> d) & 1:
            s.load_s[d] += seconds


@kernel
def critical_path(p: Compiled, s: Scratch, devices: Ints) -> Ints:
    """(P,) int32: the items of the critical path, the last item first.

    Of all that an item waits for (its tensors, its device, its links, readers of the tensor that it updates), the one
    that ends last binds it; of several that end at one instant, the first that is looked at. Where an item waited for a
    launch, it begins after the end of the binding one. One that ended after the middle of an item did not bind it: a
    measured one may begin before something ends that it would wait for in the model.

    Args:
        p: the problem.
        s: holds the plan and its times, simulated or measured.
        devices: (N,) int32, device of each op.
    """
    n, num_devices, most_links = p.num_ops, p.num_devices, p.max_route_links
    binding = np.full(n + p.max_transfers, -1, np.int32)  # the item that binds each item, -1 for none
    path = np.empty_like(binding)
    available = np.full(p.num_tensors * num_devices, -1, np.int32)
    updated = np.full(p.num_tensors, -1, np.int32)
    on_atom = np.full(num_devices, -1, np.int32)
    on_link = np.full(max(p.num_links, 1), -1, np.int32)
    end_s, last = s.end_s, -1
    for position in range(s.state[POSITION]):
        item = s.sequence[position]
        limit_s = 0.5 * (s.start_s[item] + s.end_s[item])
        found = -1
        if item < n:
            device = devices[item]
            if p.is_source[item]:
                continue
            held = p.atoms[device]
            for a in range(p.input_offsets[item], p.input_offsets[item + 1]):
                found = _later(end_s, found, available[p.input_tensors[a] * num_devices + device], limit_s)
            if p.has_updates:
                for a in range(p.updated_offsets[item], p.updated_offsets[item + 1]):
                    found = _later(end_s, found, updated[p.updated_tensors[a]], limit_s)
            for t in range(p.output_offsets[item], p.output_offsets[item + 1]):
                available[t * num_devices + device] = item
            if p.has_updates and p.concerned[item]:
                for a in range(awaited(p, devices, item, s.found)):
                    updated[s.found[a]] = _later(end_s, updated[s.found[a]], item, np.inf)
        else:
            t, device = s.transfer_tensor[item - n], s.transfer_destination[item - n]
            source = s.transfer_source[item - n]
            pair = source * num_devices + device
            found = _later(end_s, -1, available[t * num_devices + source], limit_s)
            held = 0
            if p.route_kind[pair] != HANDOVER:
                if p.route_kind[pair] == JOB:
                    held = p.atoms[device]
                if p.route_blocks_source[pair]:
                    held |= p.atoms[source]
                elif source != devices[p.tensor_op[t]]:
                    found = _later(end_s, found, on_atom[source], limit_s)
                for a in range(most_links):
                    link = p.route_padded[pair * most_links + a]
                    if on_link[link] != item:  # a route of fewer links repeats its first
                        found = _later(end_s, found, on_link[link], limit_s)
                        on_link[link] = item
                if p.has_updates:
                    updated[t] = _later(end_s, updated[t], item, np.inf)
            available[t * num_devices + device] = item
        while held:
            d = lowest_bit(held)
            held &= held - 1
            found = _later(end_s, found, on_atom[d], limit_s)
            on_atom[d] = item
        binding[item] = found
        last = _later(end_s, last, item, np.inf)
    length = 0
    while last >= 0:
        path[length] = last
        length += 1
        last = binding[last]
    return path[:length]


@part
def _later(end_s: Floats, one: int, other: int, limit_s: float) -> int:
    if other < 0 or end_s[other] > limit_s or (one >= 0 and end_s[one] >= end_s[other]):
        return one
    return other


@inlined
def awaited(p: Compiled, devices: Ints, op: int, found: Ints) -> int:
    """Number of tensors whose in-place updates wait for the end of `op`, left in `found`."""
    count = 0
    for a in range(p.input_offsets[op], p.input_offsets[op + 1]):
        t = p.input_tensors[a]
        waits = p.updater_offsets[t] < p.updater_offsets[t + 1] and not is_updater(p, op, t)
        if waits and shares_memory(p, devices[p.tensor_op[t]], devices[op]):
            found[count] = t
            count += 1
    for a in range(p.updated_offsets[op], p.updated_offsets[op + 1]):
        found[count] = p.updated_tensors[a]
        count += 1
    return count


@part
def retime(p: Compiled, s: Scratch, placement: Ints, timed: bool) -> float:
    """Seconds of a step that follows the plan in the scratch; times, memory events and users are left there.

    Args:
        p: the problem.
        s: working memory, holding the plan, with memory laid out for it.
        placement: (N,) int32, device of each op.
        timed: the scratch has the times already; only memory is followed.
    """
    n, num_tensors, num_devices = p.num_ops, p.num_tensors, p.num_devices
    run_ahead, most_links, launches = p.run_ahead, p.max_route_links, p.launches
    has_handovers, has_updates, has_pools = p.has_handovers, p.has_updates, p.has_pools
    posts_receives = p.posts_receives
    is_source, op_time_s, atoms = pointer(p.is_source), pointer(p.op_time_s), pointer(p.atoms)
    input_offsets, input_tensors = pointer(p.input_offsets), pointer(p.input_tensors)
    output_offsets, tensor_op = pointer(p.output_offsets), pointer(p.tensor_op)
    route_kind, route_links = pointer(p.route_kind), pointer(p.route_padded)
    blocks_source, latency_s = pointer(p.route_blocks_source), pointer(p.route_latency_s)
    s_per_byte, tensor_bytes = pointer(p.route_s_per_byte), pointer(p.tensor_bytes)
    dispatcher, dispatch_s, copy_dispatch_s = pointer(p.dispatcher), p.dispatch_s, p.copy_dispatch_s
    updated_s, found = pointer(s.updated_s), s.found
    sequence, start_s, end_s = pointer(s.sequence), pointer(s.start_s), pointer(s.end_s)
    transfer_tensor, transfer_destination = pointer(s.transfer_tensor), pointer(s.transfer_destination)
    transfer_source, transfer_factor = pointer(s.transfer_source), pointer(s.transfer_factor)
    available_s, atom_free_s, link_free_s = pointer(s.available_s), pointer(s.atom_free_s), pointer(s.link_free_s)
    dispatcher_free_s, recent_s = pointer(s.dispatcher_free_s), pointer(s.recent_s)
    recent_place, users, last_use_s = pointer(s.recent_place), pointer(s.users), pointer(s.last_use_s)
    size_class, pool, devices = pointer(p.size_class), pointer(p.pool), pointer(placement)
    tensor_size, workspace_size = pointer(p.tensor_size), pointer(p.workspace_size)
    time_s, num_bytes = pointer(s.events), pointer(s.event_bytes)
    base, count = pointer(s.event_base), pointer(s.event_count)
    s.atom_free_s[:] = 0.0
    s.link_free_s[:] = 0.0
    s.dispatcher_free_s[:] = 0.0
    s.updated_s[:] = 0.0
    if launches:
        s.recent_s[:] = 0.0
        for d in range(num_devices):
            recent_place[d] = d * run_ahead
    step_s = 0.0
    for position in range(s.state[POSITION]):
        item = sequence[position]
        if item < n:
            device = devices[item]
            if is_source[item]:
                start_s[item] = end_s[item] = 0.0
                for t in range(output_offsets[item], output_offsets[item + 1]):
                    available_s[t * num_devices + device] = 0.0
                    last_use_s[t * num_devices + device] = 0.0
                continue
            # An op: first its time. It starts when its inputs are there, its devices are free and it is launched.
            if timed:
                start, end = start_s[item], end_s[item]
            else:
                start = 0.0
                for a in range(input_offsets[item], input_offsets[item + 1]):
                    start = max(start, available_s[input_tensors[a] * num_devices + device])
                if has_updates:
                    for a in range(p.updated_offsets[item], p.updated_offsets[item + 1]):
                        start = max(start, updated_s[p.updated_tensors[a]])
                rest = atoms[device]
                while rest:
                    start = max(start, atom_free_s[lowest_bit(rest)])
                    rest &= rest - 1
                if launches and dispatcher[device] >= 0:
                    first = _bounded_s(recent_s, recent_place, atoms[device])
                    start = max(start, _launched_s(dispatcher_free_s, dispatcher[device], first, dispatch_s))
                end = start + op_seconds(p, op_time_s, devices, item, device)
                start_s[item] = start
                end_s[item] = end
                if has_updates and p.concerned[item]:
                    for a in range(awaited(p, placement, item, found)):
                        updated_s[found[a]] = max(updated_s[found[a]], end)
            _occupy(atom_free_s, recent_s, recent_place, run_ahead, launches, atoms[device], end)
            # Then its memory: workspace and outputs from its start on; after its end, the workspace, outputs without
            # users, and inputs whose last user it was.
            step_s = max(step_s, end)
            freed = workspace_size[item * num_devices + device]
            allocated = freed
            for t in range(output_offsets[item], output_offsets[item + 1]):
                place = t * num_devices + device
                available_s[place] = end
                last_use_s[place] = end
                size = tensor_size[size_class[device] * num_tensors + t]
                allocated += size
                freed += size * int(users[place] == ORIGINAL)
            for a in range(input_offsets[item], input_offsets[item + 1]):
                t = input_tensors[a]
                account = device
                if has_handovers:
                    source = devices[tensor_op[t]]
                    account = source if route_kind[source * num_devices + device] == HANDOVER else device
                place = t * num_devices + account
                left = users[place] - 1
                users[place] = left
                used = max(last_use_s[place], end)
                last_use_s[place] = used
                size = tensor_size[size_class[account] * num_tensors + t]
                is_last = (left & ~ORIGINAL) == 0
                is_now = used == end and account == device
                freed += size * int(is_last and is_now)
                if is_last and not is_now:
                    _note_both(time_s, num_bytes, base, count, has_pools, pool, account, 1, used, size)
            _note_both(time_s, num_bytes, base, count, has_pools, pool, device, 0, start, allocated)
            _note_both(time_s, num_bytes, base, count, has_pools, pool, device, 1, end, freed)
        else:
            # A transfer: a hand-over takes no time and no memory; a copy waits for its links, for the devices that it
            # blocks and for its launch.
            t, device = transfer_tensor[item - n], transfer_destination[item - n]
            source = transfer_source[item - n]
            pair = source * num_devices + device
            start = available_s[t * num_devices + source]
            if has_handovers and route_kind[pair] == HANDOVER:
                if not timed:
                    start_s[item] = end_s[item] = start
                available_s[t * num_devices + device] = start
                continue
            own = held = 0
            if route_kind[pair] == JOB:
                own = held = atoms[device]
            if blocks_source[pair]:
                held |= atoms[source]
            if timed:
                start, end = start_s[item], end_s[item]
            else:
                for a in range(most_links):
                    start = max(start, link_free_s[route_links[pair * most_links + a]])
                rest = held
                if source != devices[tensor_op[t]]:
                    rest |= atoms[source]  # a relay is not kept busy, but it sends between its ops
                while rest:
                    start = max(start, atom_free_s[lowest_bit(rest)])
                    rest &= rest - 1
                if launches and dispatcher[device] >= 0:
                    first = _bounded_s(recent_s, recent_place, own)
                    start = max(start, _launched_s(dispatcher_free_s, dispatcher[device], first, copy_dispatch_s))
                seconds = transfer_seconds(latency_s, s_per_byte, pair, tensor_bytes[t])
                end = start + seconds * transfer_factor[item - n]
                start_s[item] = start
                end_s[item] = end
                for a in range(most_links):
                    link_free_s[route_links[pair * most_links + a]] = end
                if has_updates:
                    updated_s[t] = max(updated_s[t], end)
            _occupy(atom_free_s, recent_s, recent_place, run_ahead, launches, held, end)
            # Memory of the copy from its start on, or from when its destination is free to wait for it; the original is
            # freed if this was its last user.
            taken = min(start, atom_free_s[device]) if posts_receives and held == 0 else start
            available_s[t * num_devices + device] = end
            last_use_s[t * num_devices + device] = end
            size = tensor_size[size_class[device] * num_tensors + t]
            _note_both(time_s, num_bytes, base, count, has_pools, pool, device, 0, taken, size)
            place = t * num_devices + source
            left = users[place] - 1
            users[place] = left
            used = max(last_use_s[place], end)
            last_use_s[place] = used
            if (left & ~ORIGINAL) == 0:
                size = tensor_size[size_class[source] * num_tensors + t]
                _note_both(time_s, num_bytes, base, count, has_pools, pool, source, 1, used, size)
    return step_s


@inlined
def _bounded_s(recent_s: Floats, recent_place: Longs, atoms: int) -> float:
    """The instant before which nothing is launched on the devices of a bit mask: `run_ahead` bounds it."""
    first = 0.0
    while atoms:
        first = max(first, recent_s[recent_place[lowest_bit(atoms)]])
        atoms &= atoms - 1
    return first


@inlined
def _launched_s(dispatcher_free_s: Floats, dispatcher: int, first_s: float, seconds: float) -> float:
    """The end of a launch that takes some seconds and begins no earlier than `first_s`."""
    launched_s: float = max(dispatcher_free_s[dispatcher], first_s) + seconds
    dispatcher_free_s[dispatcher] = launched_s
    return launched_s


@inlined
def _occupy(
    atom_free_s: Floats, recent_s: Floats, recent_place: Longs, run_ahead: int, launches: bool, atoms: int, end: float
) -> None:
    """Keep the devices of a bit mask busy until `end`."""
    while atoms:
        d = lowest_bit(atoms)
        atoms &= atoms - 1
        atom_free_s[d] = end
        if launches:
            place = recent_place[d]
            recent_s[place] = end
            recent_place[d] = place + 1 if place + 1 < (d + 1) * run_ahead else d * run_ahead


@part
def lay_out_memory(p: Compiled, s: Scratch, placement: Ints) -> None:
    """Count the users of every tensor on every account, and the bytes held from start to end of the step."""
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
        source = s.transfer_source[k]
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


@inlined
def _note_both(
    time_s: Floats,
    num_bytes: Longs,
    base: Longs,
    count: Longs,
    has_pools: bool,
    pool: Ints,
    device: int,
    is_free: int,
    time: float,
    size: int,
) -> None:
    """Keep an allocation or a free on the account of a device, and on that of the pool that it shares."""
    note(time_s, num_bytes, base, count, device, is_free, time, size)
    if has_pools and pool[device] >= 0:
        note(time_s, num_bytes, base, count, pool[device], is_free, time, size)


@part
def find_peaks(p: Compiled, s: Scratch) -> bool:
    """Whether every account stays within its capacity; the peaks are left in the scratch."""
    time_s, num_bytes = pointer(s.events), pointer(s.event_bytes)
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
