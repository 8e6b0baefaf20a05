"""Whole evaluations, for a plan or for a batch of placements."""

from __future__ import annotations

import numpy as np
from numba import njit

from rlplace.measure.compiled import HANDOVER, JOB, Compiled
from rlplace.measure.kernel_events import EventScratch, retime_events
from rlplace.measure.kernel_memory import peaks
from rlplace.measure.kernel_plan import plan
from rlplace.measure.kernel_plan_general import plan_general
from rlplace.measure.kernel_retime import retime
from rlplace.measure.scratch import POSITION, Scratch


@njit(cache=True, nogil=True)
def time_plan(p: Compiled, s: Scratch, v: EventScratch, devices) -> float:
    """Seconds of a step that follows the plan in the scratch."""
    if p.has_corun or p.by_request:
        return retime_events(p, s, v, devices)
    return retime(p, s, devices)


@njit(cache=True, nogil=True)
def plan_and_time(p: Compiled, s: Scratch, v: EventScratch, devices, rank, order) -> float:
    """Seconds of a step that follows the plan made for the placement; plan and times are left in the scratch."""
    if p.has_jobs or p.has_blocked_sources or p.has_gangs or p.has_corun:
        step_s = plan_general(p, s, devices, rank, order)
    else:
        step_s = plan(p, s, devices, rank, order)
    if p.launches:
        step_s = time_plan(p, s, v, devices)
    return step_s


@njit(cache=True, nogil=True)
def busiest(p: Compiled, s: Scratch, devices) -> float:
    """Seconds per step in the steady state of a pipeline: the work of the busiest device or link."""
    n, num_devices = p.num_ops, p.num_devices
    s.load_s[:] = 0.0
    for i in range(n):
        if not p.is_source[i]:
            _load(p, s, p.atoms[devices[i]], p.op_time_s[i, devices[i]])
    for position in range(s.state[POSITION]):
        k = s.sequence[position] - n
        if k >= 0:
            tensor, destination = s.transfer_tensor[k], s.transfer_destination[k]
            source = devices[p.tensor_op[tensor]]
            pair = source * num_devices + destination
            if p.route_kind[pair] == HANDOVER:
                continue
            duration = p.route_latency_s[pair] + p.tensor_bytes[tensor] * p.route_s_per_byte[pair]
            atoms = np.int64(0)
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


@njit(cache=True, nogil=True)
def _load(p: Compiled, s: Scratch, atoms: int, seconds: float) -> None:
    for d in range(p.num_devices):
        if (atoms >> d) & 1:
            s.load_s[d] += seconds


@njit(cache=True, nogil=True)
def evaluate(
    p: Compiled, s: Scratch, v: EventScratch, throughput: bool, placements, rank, order, step_s, peak_bytes
) -> None:
    """Fill `step_s` (B,), infinite where memory does not suffice, and `peak_bytes` (B, accounts)."""
    for b in range(len(placements)):
        devices = placements[b]
        seconds = plan_and_time(p, s, v, devices, rank, order)
        fits = peaks(p, s, devices)
        if throughput:
            seconds = busiest(p, s, devices)
        step_s[b] = seconds if fits else np.inf
        peak_bytes[b, :] = s.peak_bytes
