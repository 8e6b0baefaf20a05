"""`allocated_bytes`: what a step that ran held in each memory, from when its items began and ended."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.granularity import allocated
from rlplace.measure.hosts.host import Host
from rlplace.measure.plan import Plan
from rlplace.measure.run.codegen.step_code import StepCode

Floats = NDArray[np.float64]
Levels = tuple[Floats, NDArray[np.int32], NDArray[np.int64]]


def allocated_bytes(graph: OpGraph, host: Host, plan: Plan, code: StepCode, begin_s: Floats, end_s: Floats) -> Levels:
    """Instants in seconds, devices and bytes: allocated bytes of a device from that instant on, in order of time.

    A device holds its residents all along, and every tensor from its making to its `del`.

    Args:
        graph: with its program.
        host: the devices.
        plan: what ran.
        code: made of it.
        begin_s: (N + K,) when each item began.
        end_s: (N + K,) when it ended.
    """
    sizes = [allocated(graph.tensor_bytes, device.memory_granularity_bytes) for device in host.devices]
    resident = resident_bytes(graph, host, plan.devices)
    resident += np.array([device.context_bytes for device in host.devices], dtype=np.int64)
    events: list[tuple[float, int, int, int]] = [(0.0, 1, d, int(size)) for d, size in enumerate(resident)]
    for device in range(host.num_devices):
        for item, tensor in code.allocations[device]:
            events.append((float(begin_s[item]), 1, device, int(sizes[device][tensor])))
        for item, tensor in code.releases[device]:
            is_here = int(plan.devices[graph.tensor_op[tensor]]) == device
            lent_s = _lent_until_s(graph, plan, code, tensor, end_s) if is_here else 0.0
            events.append((max(float(end_s[item]), lent_s), 0, device, -int(sizes[device][tensor])))
    events.sort()
    level = np.zeros(host.num_devices, dtype=np.int64)
    times, devices, levels = [], [], []
    for moment_s, _, device, change in events:
        level[device] += change
        times.append(moment_s)
        devices.append(device)
        levels.append(int(level[device]))
    return np.array(times), np.array(devices, dtype=np.int32), np.array(levels, dtype=np.int64)


def resident_bytes(graph: OpGraph, host: Host, devices: NDArray[np.int32]) -> NDArray[np.int64]:
    """(D,) bytes that stay on each device from step to step where ops are on `devices` (N,): tensors and states."""
    is_source = np.isin(np.arange(graph.num_ops), list(require_program(graph).sources))
    kept = graph.state_bytes + np.where(is_source, graph.output_bytes, 0)
    granularity = np.array([device.memory_granularity_bytes for device in host.devices], dtype=np.int64)[devices]
    held = np.zeros(host.num_devices, dtype=np.int64)
    np.add.at(held, devices, allocated(kept, granularity))
    return held


def _lent_until_s(graph: OpGraph, plan: Plan, code: StepCode, tensor: int, end_s: Floats) -> float:
    """When the last other device is done with the original: it has its copy, or its last reader has ended."""
    lent_s = 0.0
    for transfer in np.flatnonzero(plan.transfer_tensor == tensor):
        lent_s = max(lent_s, float(end_s[graph.num_ops + transfer]))
        if not code.is_handover[transfer]:
            continue
        offsets, ops = graph.readers
        readers = ops[offsets[tensor] : offsets[tensor + 1]]
        there = readers[plan.devices[readers] == plan.transfer_destination[transfer]]
        lent_s = max(lent_s, float(end_s[there].max(initial=0.0)))
    return lent_s
