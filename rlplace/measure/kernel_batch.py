"""Whole evaluations, for a plan or for a batch of placements."""

from __future__ import annotations

import numpy as np

from rlplace.measure.compiled import HANDOVER, JOB, Compiled
from rlplace.measure.jit import Floats, Ints, Longs, kernel
from rlplace.measure.kernel_events import EventScratch, retime_events
from rlplace.measure.kernel_memory import find_peaks, lay_out_memory
from rlplace.measure.kernel_plan import plan
from rlplace.measure.kernel_plan_general import plan_general
from rlplace.measure.kernel_retime import retime
from rlplace.measure.scratch import POSITION, Scratch


@kernel
def make_plan(p: Compiled, s: Scratch, devices: Ints, rank: Ints, by_rank: Ints) -> float:
    """Plan the placement; seconds of the step if launches took no time."""
    if p.is_general:
        return plan_general(p, s, devices, rank, by_rank)
    return plan(p, s, devices, rank, by_rank)


@kernel
def follow_plan(p: Compiled, s: Scratch, v: EventScratch, throughput: bool, devices: Ints) -> float:
    """Seconds of a step that follows the plan in the scratch, infinite where memory does not suffice.

    Times, memory events and peaks are left in the scratch.
    """
    lay_out_memory(p, s, devices)
    by_event = p.has_corun or p.by_request
    if by_event:
        retime_events(p, s, v, devices)
    step_s = retime(p, s, devices, by_event)
    fits = find_peaks(p, s)
    if throughput:
        step_s = busiest(p, s, devices)
    return step_s if fits else np.inf


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
def evaluate(
    p: Compiled, s: Scratch, v: EventScratch, throughput: bool, placements: Ints, rank: Ints, by_rank: Ints,
    step_s: Floats, peak_bytes: Longs,
) -> None:  # fmt: skip
    """Fill `step_s` (B,) and `peak_bytes` (B, accounts) for `placements` (B, N)."""
    for b in range(len(placements)):
        make_plan(p, s, placements[b], rank, by_rank)
        step_s[b] = follow_plan(p, s, v, throughput, placements[b])
        peak_bytes[b, :] = s.peak_bytes
