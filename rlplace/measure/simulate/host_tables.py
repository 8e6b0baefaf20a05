"""A `Host` as flat arrays: its routes, the single devices behind gangs, and its accounts of memory.

Priorities of ops: upward ranks, and the orders of micro-batches that are made of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue, UnknownName
from rlplace.graphs.opgraph import FORWARD
from rlplace.graphs.paths import longest_after, ready_order
from rlplace.jit import Bytes, Floats, Ints, Longs
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Problem

HANDOVER, QUEUED, JOB = 1, 2, 3
"""How a tensor reaches another device: no copy; a transfer beside the ops; a copy that the destination makes itself."""


def route_tables(host: Host) -> tuple[Ints, Bytes, Ints, Ints]:
    """(D * D,) kinds of route, (D * D,) whether the source waits, and the links of each route: offsets, and indices."""
    num_devices = host.num_devices
    link_index = {link.name: index for index, link in enumerate(host.links)}
    kinds = np.zeros(num_devices * num_devices, dtype=np.int32)
    blocks_source = np.zeros(num_devices * num_devices, dtype=np.int8)
    links: list[list[int]] = [[] for _ in kinds]
    for route in host.routes:
        pair = host.device_index[route.source] * num_devices + host.device_index[route.destination]
        if route.source == route.destination:
            continue
        links[pair] = [link_index[name] for name in dict.fromkeys(route.links)]
        kinds[pair] = HANDOVER if not route.links else JOB if route.blocks_destination else QUEUED
        blocks_source[pair] = bool(route.links) and route.blocks_source
    offsets = np.cumsum([0, *(len(pair) for pair in links)]).astype(np.int32)
    return kinds, blocks_source, offsets, np.array([link for pair in links for link in pair], dtype=np.int32)


def padded_routes(offsets: Ints, links: Ints) -> Ints:
    """(D * D * most links,) the links of each route, the first one repeated at the end.

    Args:
        offsets: of routes in `links`.
        links: indices, as `route_tables` gives them.
    """
    most = int(max(np.diff(offsets).max(initial=1), 1))
    padded = np.zeros((len(offsets) - 1, most), dtype=np.int32)
    for pair, (first, last) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        if first < last:
            padded[pair] = links[first]
            padded[pair, : last - first] = links[first:last]
    return padded.ravel()


def atoms_of(host: Host) -> Longs:
    """(D,) int64 bit masks: the single devices that each device keeps busy, itself unless it is a gang.

    Raises:
        InvalidValue: a gang without single devices.
        UnknownName: a gang's member that is no device.
    """
    masks = np.zeros(host.num_devices, dtype=np.int64)
    for index in range(host.num_devices):
        waiting, seen = [index], set()
        while waiting:
            device = waiting.pop()
            if device in seen:
                continue
            seen.add(device)
            if not host.devices[device].members:
                masks[index] |= np.int64(1 << device)
            for name in host.devices[device].members:
                if name not in host.device_index:
                    raise UnknownName("device", name, host.device_index)
                waiting.append(host.device_index[name])
        if not masks[index]:
            device_name = host.devices[index].name
            raise InvalidValue(
                "members", host.devices[index].members, "single devices", where=f"device {device_name!r}"
            )
    return masks


def account_names(host: Host) -> tuple[str, ...]:
    """Names of the memory accounts: every device, then every pool that several devices share."""
    pools = [device.memory_pool for device in host.devices if device.memory_pool]
    shared = sorted({pool for pool in pools if pools.count(pool) > 1})
    return (*(device.name for device in host.devices), *shared)


def account_limits(host: Host) -> tuple[Ints, Longs]:
    """(D,) the account of the pool that each device shares, -1 for a memory of its own; (accounts,) bytes of each."""
    names = account_names(host)
    shared = names[host.num_devices :]
    pool = [
        host.num_devices + shared.index(device.memory_pool) if device.memory_pool in shared else -1
        for device in host.devices
    ]
    capacity = [device.memory_bytes for device in host.devices]
    capacity += [min(d.memory_bytes for d in host.devices if d.memory_pool == name) for name in shared]
    return np.array(pool, dtype=np.int32), np.array(capacity, dtype=np.int64)


def default_priorities(problem: Problem) -> NDArray[np.float64]:
    """(N,) float64, higher runs first: what `problem.op_order` says; upward ranks where nothing is cut."""
    rank = upward_ranks(problem)
    if problem.op_order == "rank" or problem.graph.num_micro_batches == 1:
        return rank
    return np.asarray(rank + turns(problem) * rank.max(initial=0.0))


def turns(problem: Problem) -> NDArray[np.float64]:
    """(N,) float64: how much earlier than its rank each op comes by `problem.op_order`, in multiples of the largest.

    `tilt` is -k/K for micro-batch k of K and 0 for shared ops, so that micro-batches follow each other through a
    pipeline; equal ranks run them in lock-step. With `backward-first` shared ops come first, then backward ops, then
    forward ones, each micro-batch before the next. Nothing where the step is not cut.
    """
    graph, count = problem.graph, problem.graph.num_micro_batches
    if problem.op_order == "rank" or count == 1:
        return np.zeros(graph.num_ops)
    micro_batch = graph.micro_batch.astype(np.float64)
    if problem.op_order == "tilt":
        return np.where(micro_batch >= 0, -micro_batch / count, 0.0)
    earlier = np.where(graph.phases == FORWARD, 0.0, count) + count - 1.0 - micro_batch
    return np.where(micro_batch >= 0, earlier, 2.0 * count)


def list_order(problem: Problem) -> NDArray[np.int64]:
    """(N,) int64: ops by `default_priorities`, ties by index, each after what it reads."""
    graph = problem.graph
    offsets, readers = graph.readers
    starts = offsets[graph.output_offsets]
    return np.asarray(ready_order(default_priorities(problem), np.diff(graph.input_offsets), starts, readers))


def upward_ranks(problem: Problem) -> NDArray[np.float64]:
    """(N,) float64 seconds: the longest remaining path from the start of each op to the end of the step.

    Ops count with their mean time over devices, tensors with their mean transfer time over ordered pairs of distinct
    devices (HEFT: Topcuoglu, Hariri, Wu 2002, equation 6). Source ops take no time.
    """
    graph, num_devices = problem.graph, problem.host.num_devices
    pairs = max(num_devices * (num_devices - 1), 1)
    latency_s = float(problem.transfer_latency_s.sum()) / pairs
    s_per_byte = float(problem.transfer_s_per_byte.sum()) / pairs
    transfer_s: Floats = latency_s + graph.tensor_bytes.astype(np.float64) * s_per_byte
    op_s: Floats = np.mean(problem.costs.op_time_s, axis=1, dtype=np.float64) * ~graph.is_source
    producers = graph.tensor_op[graph.input_tensors]
    return op_s + longest_after(op_s, graph.input_offsets, producers, transfer_s[graph.input_tensors])
