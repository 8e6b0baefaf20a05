"""Whole evaluations, for a plan or for a batch of placements.

The critical path of a plan that was timed: what each item waited for, back from the one that ends last.
"""

from __future__ import annotations

import numpy as np

from rlplace.jit import Floats, Ints, Longs, kernel, lowest_bit
from rlplace.measure.simulate.compiled import Compiled
from rlplace.measure.simulate.host_tables import HANDOVER, JOB
from rlplace.measure.simulate.kernel_events import EventScratch, retime_events
from rlplace.measure.simulate.kernel_plan import SLACK, is_updater, least_seconds, plan, shares_memory
from rlplace.measure.simulate.kernel_plan_general import plan_general
from rlplace.measure.simulate.kernel_retime import find_peaks, lay_out_memory, retime
from rlplace.measure.simulate.scratch import POSITION, TRANSFERS, PlanBatch, Scratch


@kernel
def evaluate(
    p: Compiled,
    s: Scratch,
    v: EventScratch,
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
    where it is above `cutoff_s` (B,), whose peaks are then 0. Peaks count what each op takes for itself on its device.
    What is left in the scratch (the plan, times, memory events) is that of the last one, if it was not given up.
    """
    by_event = p.has_corun or p.by_request
    for b in range(first, last):
        devices = batch.devices[b]
        cutoff = cutoff_s[b] * (1.0 + SLACK)
        if cutoff < np.inf and least_seconds(p, s, devices, throughput) > cutoff:
            step_s[b] = np.inf
            peak_bytes[b] = 0
            continue
        # launches delay what is planned, but with launches by request or co-run slowdown a delay may save time
        planned_cutoff = np.inf if throughput or by_event else cutoff
        planned = 0.0
        if len(batch.sequence) > 0:
            load_plan(s, batch, b)
        elif p.is_general:
            planned = plan_general(p, s, devices, rank, by_rank, planned_cutoff)
        else:
            planned = plan(p, s, devices, rank, by_rank, planned_cutoff)
        if planned > planned_cutoff:
            step_s[b] = np.inf
            peak_bytes[b] = 0
            continue
        lay_out_memory(p, s, devices)
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
        s.transfer_destination[a] = batch.transfer_destination[first + a]


@kernel
def busiest(p: Compiled, s: Scratch, devices: Ints) -> float:
    """Seconds per step in the steady state of a pipeline: the work of the busiest device or link."""
    n, num_devices = p.num_ops, p.num_devices
    s.load_s[:] = 0.0
    for i in range(n):
        if not p.is_source[i]:
            _load(p, s, p.atoms[devices[i]], p.op_time_s[i * num_devices + devices[i]])
    for position in range(s.state[POSITION]):
        k = s.sequence[position] - n
        if k >= 0:
            tensor, destination = s.transfer_tensor[k], s.transfer_destination[k]
            source = devices[p.tensor_op[tensor]]
            pair = source * num_devices + destination
            if p.route_kind[pair] == HANDOVER:
                continue
            duration = p.route_latency_s[pair] + p.tensor_bytes[tensor] * p.route_s_per_byte[pair]
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


@kernel
def _load(p: Compiled, s: Scratch, atoms: int, seconds: float) -> None:
    for d in range(p.num_devices):
        if (atoms >> d) & 1:
            s.load_s[d] += seconds


@kernel
def critical_path(p: Compiled, s: Scratch, devices: Ints, binding: Ints, path: Ints) -> int:
    """The length of the critical path, which is left in `path`, the last item first.

    Of all that an item waits for (its tensors, its device, its links, readers of what it updates), what ends last binds
    it; of several that end at one instant, the first that is looked at. Where a launch is what an item waited for, it
    begins after the end of what binds it. What ended after the middle of an item did not bind it: a measured one may
    begin before something ends that it would wait for in the model.

    Args:
        p: the problem.
        s: holds the plan and its times, simulated or measured.
        devices: (N,) int32, device of each op.
        binding: (N + K,) int32, overwritten: the item that binds each item, -1 for none.
        path: (N + K,) int32, overwritten.
    """
    n, num_devices, most_links = p.num_ops, p.num_devices, p.max_route_links
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
            binding[item] = -1
            if p.is_source[item]:
                continue
            for a in range(p.input_offsets[item], p.input_offsets[item + 1]):
                found = _later(end_s, found, available[p.input_tensors[a] * num_devices + device], limit_s)
            if p.has_updates:
                for a in range(p.updates.updated_offsets[item], p.updates.updated_offsets[item + 1]):
                    found = _later(end_s, found, updated[p.updates.updated_tensors[a]], limit_s)
            rest = p.atoms[device]
            while rest:
                d = lowest_bit(rest)
                rest &= rest - 1
                found = _later(end_s, found, on_atom[d], limit_s)
                on_atom[d] = item
            for t in range(p.output_offsets[item], p.output_offsets[item + 1]):
                available[t * num_devices + device] = item
            if p.has_updates and p.updates.concerned[item]:
                _note_updates(p, end_s, updated, devices, item)
        else:
            t, device = s.transfer_tensor[item - n], s.transfer_destination[item - n]
            source = devices[p.tensor_op[t]]
            pair = source * num_devices + device
            found = _later(end_s, -1, available[t * num_devices + source], limit_s)
            if p.route_kind[pair] != HANDOVER:
                held = 0
                if p.route_kind[pair] == JOB:
                    held = p.atoms[device]
                if p.route_blocks_source[pair]:
                    held |= p.atoms[source]
                for a in range(most_links):
                    link = p.route_padded[pair * most_links + a]
                    if on_link[link] != item:  # a route of fewer links repeats its first
                        found = _later(end_s, found, on_link[link], limit_s)
                        on_link[link] = item
                while held:
                    d = lowest_bit(held)
                    held &= held - 1
                    found = _later(end_s, found, on_atom[d], limit_s)
                    on_atom[d] = item
                if p.has_updates:
                    updated[t] = _later(end_s, updated[t], item, np.inf)
            available[t * num_devices + device] = item
        binding[item] = found
        last = _later(end_s, last, item, np.inf)
    length = 0
    while last >= 0:
        path[length] = last
        length += 1
        last = binding[last]
    return length


@kernel
def _later(end_s: Floats, one: int, other: int, limit_s: float) -> int:
    if other < 0 or end_s[other] > limit_s or (one >= 0 and end_s[one] >= end_s[other]):
        return one
    return other


@kernel
def _note_updates(p: Compiled, end_s: Floats, updated: Ints, devices: Ints, op: int) -> None:
    u = p.updates
    for a in range(u.input_offsets[op], u.input_offsets[op + 1]):
        t = u.input_tensors[a]
        waits = u.updater_offsets[t] < u.updater_offsets[t + 1] and not is_updater(u, op, t)
        if waits and shares_memory(u, devices[u.tensor_op[t]], devices[op]):
            updated[t] = _later(end_s, updated[t], op, np.inf)
    for a in range(u.updated_offsets[op], u.updated_offsets[op + 1]):
        t = u.updated_tensors[a]
        updated[t] = _later(end_s, updated[t], op, np.inf)
