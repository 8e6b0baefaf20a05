"""Data parallelism by arithmetic: the ring that sums gradients, and what a step takes whose batch is split evenly."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.opgraph import BACKWARD, FORWARD, UPDATE, OpGraph
from rlplace.measure.costs.single_device import capacity_bytes
from rlplace.measure.host_model.priors import Prior, prior_of
from rlplace.measure.host_model.scales import slowdown_of
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Problem


def ring_all_reduce_s(host: Host, devices: Sequence[int], num_bytes: float) -> float:
    """Seconds of a ring all-reduce of `num_bytes` over `devices`, in their order.

    2 (k - 1) rounds, in each of which every device sends a k-th of the bytes to the next one, all at once (Patarasuk &
    Yuan 2009, J. Parallel Distrib. Comput. 69(2)); hops that share a link share its bandwidth.
    """
    count = len(devices)
    if count < 2:
        return 0.0
    links = {link.name: link for link in host.links}
    routes = {(route.source, route.destination): route for route in host.routes}
    names = [host.devices[device].name for device in devices]
    hops: dict[str, int] = defaultdict(int)
    latency_s = 0.0
    for source, destination in zip(names, [*names[1:], names[0]], strict=True):
        for link in routes[source, destination].links:
            hops[link] += 1
            latency_s = max(latency_s, links[link].latency_s)
    slowest = max((count_ / links[name].bandwidth_bytes_per_s for name, count_ in hops.items()), default=0.0)
    return 2 * (count - 1) * (latency_s + num_bytes / count * slowest)


def can_be_split(graph: OpGraph) -> bool:
    """Whether the batch may have several samples: an input's first dimension is 2 or more, or there is no input."""
    inputs = [op for op, target in enumerate(graph.targets) if target == "input"]
    tensors = [
        int(graph.output_offsets[op]) for op in inputs if graph.output_offsets[op] < graph.output_offsets[op + 1]
    ]
    shapes = [graph.tensor_shapes[tensor] for tensor in tensors]
    return not shapes or any(shape[0] > 1 for shape in shapes if shape)


def even_split_s(problem: Problem) -> float:
    """Seconds of a step whose batch is split over devices by their speed, at best; infinite where it cannot be.

    Each of the devices, the fastest k of them for the best k of 2 or more, holds the model and runs its share of the
    forward and of the backward, ops shrinking with their batch; a ring sums the gradients behind the backward; every
    device updates all parameters, and launches every op. Devices slow each other down as the host says; on this
    machine, where it says nothing, as the host model expects of devices that share a memory. Smaller batches make ops
    less efficient, and what all devices hold of the activations is not counted: a real split takes longer.
    """
    graph, host = problem.graph, problem.host
    if not can_be_split(graph):
        return math.inf
    slowdown = _slowdown(problem)
    time_s = np.where(graph.is_source[:, None], 0.0, problem.costs.op_time_s)
    forward_s, backward_s, update_s = (
        time_s[graph.phases == phase].sum(axis=0) for phase in (FORWARD, BACKWARD, UPDATE)
    )
    shared_s = np.maximum(forward_s + backward_s, 1e-30)
    held = int((graph.parameter_bytes + graph.gradient_bytes + graph.state_bytes).sum())
    fits = [
        index
        for index, device in enumerate(host.devices)
        if not device.members and device.context_bytes + held <= capacity_bytes(host, index)
    ]
    fits.sort(key=lambda index: (float(shared_s[index]), index))
    launched_s = host.dispatch_s * int(np.count_nonzero(~graph.is_source))
    best_s = math.inf
    for count in range(2, len(fits) + 1):
        used = sorted(fits[:count])
        factor = 1.0 + slowdown[np.ix_(used, used)].sum(axis=1)
        share_s = 1.0 / float((1.0 / (shared_s[used] * factor)).sum())
        backward_share_s = share_s * float((backward_s[used] / shared_s[used]).max())
        all_reduce_s = ring_all_reduce_s(host, used, float(graph.gradient_bytes.sum()))
        step_s = (
            share_s - backward_share_s + max(backward_share_s, all_reduce_s) + float((update_s[used] * factor).max())
        )
        best_s = min(best_s, max(step_s, launched_s))
    return best_s


def _slowdown(problem: Problem) -> NDArray[np.float64]:
    """(D, D) by how much each busy device slows each other one."""
    host = problem.host
    prior = Prior(corun=0.0) if host.is_simulated else prior_of(problem)
    found = slowdown_of(host, prior)
    np.fill_diagonal(found, 0.0)
    return found
