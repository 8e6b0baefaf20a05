"""`summarise`: what is kept of a traced step: seconds of each type of op on each device, and of copies."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlplace.measure.plan import Timeline
from rlplace.measure.problem import Problem


def summarise(problem: Problem, timeline: Timeline) -> dict[str, Any]:
    """A timeline of one step in a few numbers.

    Args:
        problem: that was placed.
        timeline: of one step.

    Returns:
        `step_s`; `ops`: `[type, device, number, seconds]` for each pair, the longest first; `copies`: `[source,
        destination, number, bytes, seconds]`; `peak_bytes` of each device, empty where memory was not followed.
    """
    graph, names = problem.graph, [device.name for device in problem.host.devices]
    ops: dict[tuple[str, str], list[float]] = {}
    runs = ~graph.is_source
    op_s = timeline.op_end_s - timeline.op_start_s
    for op in np.flatnonzero(runs).tolist():
        of = ops.setdefault((graph.targets[op], names[int(timeline.op_device[op])]), [0, 0.0])
        of[0] += 1
        of[1] += float(op_s[op])
    copies: dict[tuple[str, str], list[float]] = {}
    copy_s = timeline.transfer_end_s - timeline.transfer_start_s
    for k, tensor in enumerate(timeline.transfer_tensor.tolist()):
        pair = names[int(timeline.transfer_source[k])], names[int(timeline.transfer_destination[k])]
        of = copies.setdefault(pair, [0, 0, 0.0])
        of[0] += 1
        of[1] += int(graph.tensor_bytes[tensor])
        of[2] += float(copy_s[k])
    ends = (*timeline.op_end_s[runs].tolist(), *timeline.transfer_end_s.tolist())
    peaks = np.zeros(len(names), dtype=np.int64)
    np.maximum.at(peaks, timeline.memory_device, timeline.memory_bytes)
    return {
        "step_s": max(ends, default=0.0),
        "ops": sorted(([*pair, *of] for pair, of in ops.items()), key=lambda row: (-float(row[3]), row[:2])),
        "copies": sorted(([*pair, *of] for pair, of in copies.items()), key=lambda row: (-float(row[4]), row[:2])),
        "peak_bytes": peaks.tolist() if len(timeline.memory_bytes) else [],
    }
