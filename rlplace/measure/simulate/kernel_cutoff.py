"""What a placement's step takes at least: enough to leave slow ones before they are simulated to their end."""

from __future__ import annotations

import numpy as np

from rlplace.jit import Ints, kernel, pointer
from rlplace.measure.simulate.compiled import Compiled
from rlplace.measure.simulate.host_tables import HANDOVER
from rlplace.measure.simulate.scratch import Scratch

SLACK = 1e-9
"""Share by which a bound must be above a cutoff: sums in another order round differently."""


@kernel
def least_seconds(p: Compiled, s: Scratch, placement: Ints, throughput: bool) -> float:
    """A lower bound on the step time; the work of each device and the path from each op are left in the scratch.

    A device does its ops one after the other, and no path through the graph is shorter than its ops and the transfers
    between their devices; queues, launches and co-run slowdown only add to both. In a full pipeline only work counts.
    """
    n, num_devices = p.num_ops, p.num_devices
    op_time_s, is_source, output_offsets = pointer(p.op_time_s), pointer(p.is_source), pointer(p.output_offsets)
    reader_offsets, reader_ops = pointer(p.reader_offsets), pointer(p.reader_ops)
    route_kind, latency_s, s_per_byte = pointer(p.route_kind), pointer(p.route_latency_s), pointer(p.route_s_per_byte)
    tensor_bytes, devices = pointer(p.tensor_bytes), pointer(placement)
    path_s, work_s = pointer(s.path_s), pointer(s.work_left_s)
    s.work_left_s[:] = 0.0
    longest_path = 0.0
    for i in range(n - 1, -1, -1):
        device = devices[i]
        longest = 0.0
        for t in range(output_offsets[i], output_offsets[i + 1]):
            for b in range(reader_offsets[t], reader_offsets[t + 1]):
                reader = reader_ops[b]
                pair = device * num_devices + devices[reader]
                after = path_s[reader]
                if route_kind[pair] > HANDOVER:
                    after += latency_s[pair] + tensor_bytes[t] * s_per_byte[pair]
                longest = max(longest, after)
        if not is_source[i]:
            seconds = op_time_s[i * num_devices + device]
            longest += seconds
            work_s[device] += seconds
        path_s[i] = longest
        longest_path = max(longest_path, longest)
    least = 0.0 if throughput else longest_path
    for d in range(num_devices):
        least = max(least, work_s[d])
    return least


@kernel
def forget_ready(s: Scratch) -> None:
    """Leave no op ready, after a plan that was not followed to its end."""
    s.ready_leaf[:] = np.int64(0)
    s.ready_middle[:] = np.int64(0)
    s.ready_top[:] = np.int64(0)
