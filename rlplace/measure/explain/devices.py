"""`device_shares` and `memory_curves`: what each device does during a step, and what it holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.explain.explanation import DeviceShare, MemoryCurve
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.timeline import Timeline

MOST_POINTS = 400
"""Of a memory curve that is kept."""


def is_copied(problem: Problem, plan: Plan) -> NDArray[np.bool_]:
    """(K,) bool: transfers that are copies; the others hand a tensor over, which takes nothing."""
    host = problem.host
    table = np.zeros((host.num_devices, host.num_devices), dtype=np.bool_)
    for route in host.routes:
        table[host.device_index[route.source], host.device_index[route.destination]] = bool(route.links)
    source = plan.devices[problem.graph.tensor_op[plan.transfer_tensor]]
    return np.asarray(table[source, plan.transfer_destination], dtype=np.bool_)


def step_end_s(timeline: Timeline) -> float:
    """Seconds at which the last op or transfer of a step ends."""
    return float(max(timeline.op_end_s.max(initial=0.0), timeline.transfer_end_s.max(initial=0.0)))


def device_shares(
    problem: Problem, plan: Plan, timeline: Timeline, peak_bytes: Sequence[int]
) -> tuple[DeviceShare, ...]:
    """What every device does during the step, in the host's order.

    Args:
        problem: what is placed.
        plan: of the step.
        timeline: of the step.
        peak_bytes: (D,) most that each device holds.
    """
    graph, host, step_s = problem.graph, problem.host, step_end_s(timeline)
    runs = ~graph.is_source
    copied = is_copied(problem, plan)
    sizes = np.where(copied, graph.tensor_bytes[plan.transfer_tensor], 0)
    shares = []
    for index, device in enumerate(host.devices):
        keeps_busy = np.array([other is device or device.name in other.members for other in host.devices])
        ops = runs & keeps_busy[timeline.op_device]
        leaves = copied & keeps_busy[timeline.transfer_source]
        arrives = copied & keeps_busy[timeline.transfer_destination]
        moves = leaves | arrives
        busy = np.stack((timeline.op_start_s[ops], timeline.op_end_s[ops]), axis=1)
        moving = np.stack((timeline.transfer_start_s[moves], timeline.transfer_end_s[moves]), axis=1)
        busy_s = _covered_s(busy, step_s)
        taken_s = max(_covered_s(np.concatenate((busy, moving)), step_s), busy_s)
        shares.append(
            DeviceShare(
                name=device.name,
                kind=device.kind,
                num_ops=int(np.count_nonzero(runs & (plan.devices == index))),
                busy_s=busy_s,
                transfer_s=taken_s - busy_s,
                idle_s=max(step_s - taken_s, 0.0),
                sent_bytes=int(sizes[leaves].sum()),
                received_bytes=int(sizes[arrives].sum()),
                peak_bytes=int(peak_bytes[index]),
                capacity_bytes=device.memory_bytes,
                memory_pool=device.memory_pool,
                members=device.members,
            )
        )
    return tuple(shares)


def memory_curves(problem: Problem, timeline: Timeline) -> tuple[MemoryCurve, ...]:
    """Allocated bytes of every device over the step; nothing where memory was not followed.

    A curve of more than `MOST_POINTS` steps keeps the highest of every stretch of them.
    """
    if not len(timeline.memory_time_s):
        return ()
    curves = []
    for index, device in enumerate(problem.host.devices):
        here = timeline.memory_device == index
        time_s, held = timeline.memory_time_s[here], timeline.memory_bytes[here]
        kept = _highest(held)
        curves.append(MemoryCurve(device.name, tuple(time_s[kept].tolist()), tuple(held[kept].tolist())))
    return tuple(curves)


def _covered_s(spans: NDArray[np.float64], step_s: float) -> float:
    """Seconds that spans (S, 2) of start and end cover together, within the step."""
    spans = np.clip(spans, 0.0, step_s)
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    if not len(spans):
        return 0.0
    reached_s = np.maximum.accumulate(np.concatenate(([0.0], spans[:-1, 1])))
    return float(np.maximum(spans[:, 1] - np.maximum(spans[:, 0], reached_s), 0.0).sum())


def _highest(held: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices of the first value, and of the highest one in each of at most `MOST_POINTS` stretches, ascending."""
    if len(held) <= MOST_POINTS:
        return np.arange(len(held))
    bounds = np.linspace(0, len(held), MOST_POINTS, dtype=np.int64)
    stretches = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    return np.unique([0, *(first + int(held[first:last].argmax()) for first, last in stretches)])
