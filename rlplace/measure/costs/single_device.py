"""Everything on one device: the plan, and whether it fits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.costs import allocated
from rlplace.measure.hosts.host import Host
from rlplace.measure.plan import Plan


def single_device_plan(graph: OpGraph, device: int) -> Plan:
    """Everything on one device, in index order."""
    n = graph.num_ops
    none = np.zeros(0, dtype=np.int32)
    return Plan(np.full(n, device, dtype=np.int32), none, none, np.arange(n, dtype=np.int32))


def single_device_peak_bytes(
    graph: OpGraph, host: Host, device: int, workspace_bytes: NDArray[np.int64] | None = None
) -> int:
    """Peak bytes of `single_device_plan`, context included, as the simulator counts (docs/step-time-model.md).

    Args:
        graph: whose step it is.
        host: of the device.
        device: where everything is.
        workspace_bytes: (N,) scratch of each op there; by default as the graph says.
    """
    described = host.devices[device]
    scratch = graph.workspace_bytes if workspace_bytes is None else workspace_bytes
    sizes = allocated(graph.tensor_bytes, described.memory_granularity_bytes)
    is_resident = graph.is_source[graph.tensor_op]
    held = described.context_bytes + int(sizes[is_resident].sum())
    held += int(allocated(graph.state_bytes, described.memory_granularity_bytes).sum())
    last = graph.tensor_op.astype(np.int64)  # the op after whose end each tensor is freed
    np.maximum.at(last, graph.input_tensors, graph.edge_op)
    last[graph.output_tensors] = graph.num_ops
    changes = np.zeros(graph.num_ops + 2, dtype=np.int64)
    np.add.at(changes, graph.tensor_op[~is_resident], sizes[~is_resident])
    np.subtract.at(changes, last[~is_resident] + 1, sizes[~is_resident])
    levels = np.cumsum(changes)[: graph.num_ops] + allocated(scratch, described.memory_granularity_bytes)
    return held + int(levels.max(initial=0))


def capacity_bytes(host: Host, device: int) -> int:
    """What the peak of a plan on one device may be: of a pool, what the contexts of its other devices leave."""
    described = host.devices[device]
    others = [
        other
        for other in host.devices
        if other is not described and described.memory_pool and other.memory_pool == described.memory_pool
    ]
    smallest = min(each.memory_bytes for each in (described, *others))
    return smallest - sum(other.context_bytes for other in others)
