"""Whole evaluations, for a plan or for a batch of placements."""

from __future__ import annotations

import numpy as np

from rlplace.jit import Floats, Ints, Longs, kernel
from rlplace.measure.simulate.compiled import Compiled
from rlplace.measure.simulate.host_tables import HANDOVER, JOB
from rlplace.measure.simulate.kernel_cutoff import SLACK, least_seconds
from rlplace.measure.simulate.kernel_events import EventScratch, retime_events
from rlplace.measure.simulate.kernel_memory import find_peaks, lay_out_memory
from rlplace.measure.simulate.kernel_plan import plan
from rlplace.measure.simulate.kernel_plan_general import plan_general
from rlplace.measure.simulate.kernel_retime import retime
from rlplace.measure.simulate.plan_batch import PlanBatch
from rlplace.measure.simulate.scratch import POSITION, TRANSFERS, Scratch


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
