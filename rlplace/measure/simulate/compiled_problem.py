"""`Compiled`: a `Problem` as flat arrays, laid out once for the simulator's kernels.

Routes, gangs, memory accounts and in-place updates become tables; `default_priorities` orders the ops.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.graphs import FORWARD, OpGraph
from rlplace.graphs.paths import longest_after, ready_order, topological_order
from rlplace.jit import Block, Bytes, Floats, Ints, Longs
from rlplace.measure.costs.costs import allocated
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
    """
    masks = np.zeros(host.num_devices, dtype=np.int64)
    for index in range(host.num_devices):
        waiting, seen = [index], set()
        while waiting:
            at = waiting.pop()
            if at in seen:
                continue
            seen.add(at)
            if not host.devices[at].members:
                masks[index] |= np.int64(1 << at)
            waiting += [host.device_index[name] for name in host.devices[at].members]
        if not masks[index]:
            device = host.devices[index]
            raise InvalidValue("members", device.members, "single devices", where=f"device {device.name!r}")
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
    return ready_order(default_priorities(problem), graph.input_offsets, offsets[graph.output_offsets], readers)


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


MAX_DEVICES = 62
MAX_SLOTS = 63
"""Devices and first links of routes that the fast planner can follow, a bit of a word for each."""


class Compiled(Block):
    """Every figure that the kernels read. Names as in `OpGraph`, `Host` and docs/step-time-model.md.

    Offsets are CSR. Tables over pairs of devices are flat, `source * num_devices + destination`.
    """

    num_ops: int
    num_tensors: int
    num_devices: int
    num_links: int
    max_transfers: int
    max_route_links: int
    num_leaf: int  # words of the three levels of a bitmap over ops
    num_middle: int
    num_top: int
    # the graph
    op_time_s: Floats  # (N * D,)
    is_source: Bytes
    input_counts: Ints  # (N,)
    input_offsets: Ints
    input_tensors: Ints
    output_offsets: Ints
    tensor_op: Ints
    reader_offsets: Ints
    reader_ops: Ints
    updates: Updates
    # routes
    route_kind: Ints  # (D * D,) 0 on the diagonal, else HANDOVER, QUEUED or JOB
    route_blocks_source: Bytes
    route_latency_s: Floats
    route_s_per_byte: Floats
    route_offsets: Ints
    route_links: Ints
    route_padded: Ints  # (D * D * most links,) the links of each route, the first one repeated at the end
    route_slot: Ints  # (D * D,) where its running transfer is kept: one place for each first link of a route
    num_slots: int
    tensor_bytes: Floats
    # devices: what each keeps busy, as a bit mask over single devices
    atoms: Longs
    is_gang: Bytes
    corun_slowdown: Floats  # (D * D,)
    # launching
    dispatcher: Ints  # (D,) -1: launches cost nothing
    num_dispatchers: int
    dispatch_s: float
    copy_dispatch_s: float
    run_ahead: int
    # memory: sizes rounded up by class of granularity; accounts are devices, then pools of several devices
    size_class: Ints  # (D,)
    tensor_size: Longs  # (C * T,)
    workspace_size: Longs  # (N * D,)
    state_size: Longs  # (C * N,)
    is_kept: Bytes  # (T,) never freed where it was made: of a source, or returned by the step
    has_pools: bool
    pool: Ints  # (D,) -1: a memory of its own
    num_accounts: int
    context_bytes: Longs  # (D,)
    capacity_bytes: Longs  # (accounts,)
    # what the host makes use of
    has_handovers: bool
    is_general: bool  # devices or transfers block each other or slow each other down, or launches wait in a queue
    has_corun: bool
    has_updates: bool
    launches: bool
    by_request: bool


def compile_problem(problem: Problem) -> Compiled:
    """`problem` as flat arrays.

    Raises:
        InvalidValue: too many devices, a gang without single devices, or in-place updates that wait for each other.
    """
    graph, host = problem.graph, problem.host
    if host.num_devices > MAX_DEVICES:
        raise InvalidValue("devices", host.num_devices, f"at most {MAX_DEVICES}", where=f"host {host.name!r}")
    reader_offsets, reader_ops = graph.readers
    kinds, blocks_source, route_offsets, route_links = route_tables(host)
    first_links, firsts = np.unique(route_links[route_offsets[:-1][np.diff(route_offsets) > 0]], return_inverse=True)
    route_slot = np.full(len(kinds), -1, dtype=np.int32)
    route_slot[np.diff(route_offsets) > 0] = host.num_devices + firsts
    num_slots = host.num_devices + len(first_links)
    padded = padded_routes(route_offsets, route_links)
    fanout = np.minimum(np.diff(reader_offsets), host.num_devices - 1)
    dispatchers = sorted({device.dispatcher for device in host.devices if device.dispatcher})
    pool, capacity = account_limits(host)
    granularities = sorted({device.memory_granularity_bytes for device in host.devices})
    corun = np.array(host.corun_slowdown or np.zeros((host.num_devices,) * 2), dtype=np.float64)
    np.fill_diagonal(corun, 0.0)
    is_kept = graph.is_source[graph.tensor_op].astype(np.int8)
    is_kept[graph.output_tensors] = 1
    launches = bool(dispatchers) and (host.dispatch_s > 0 or host.copy_dispatch_s > 0)
    by_request = launches and host.dispatch_order == "request"
    atoms = atoms_of(host)
    num_leaf, num_middle = -(-graph.num_ops // 64), -(-graph.num_ops // 4096)
    return Compiled(
        num_ops=graph.num_ops,
        num_tensors=graph.num_tensors,
        num_devices=host.num_devices,
        num_links=len(host.links),
        max_transfers=int(fanout.sum()),
        max_route_links=len(padded) // len(kinds),
        num_leaf=num_leaf,
        num_middle=num_middle,
        num_top=-(-num_middle // 64),
        op_time_s=problem.costs.op_time_s.ravel(),
        is_source=graph.is_source.astype(np.int8),
        input_counts=np.diff(graph.input_offsets),
        input_offsets=graph.input_offsets,
        input_tensors=graph.input_tensors,
        output_offsets=graph.output_offsets,
        tensor_op=graph.tensor_op,
        reader_offsets=reader_offsets,
        reader_ops=reader_ops,
        updates=lay_out_updates(graph, kinds, host.num_devices),
        route_kind=kinds,
        route_blocks_source=blocks_source,
        route_latency_s=problem.transfer_latency_s.ravel(),
        route_s_per_byte=problem.transfer_s_per_byte.ravel(),
        route_offsets=route_offsets,
        route_links=route_links,
        route_padded=padded,
        route_slot=route_slot,
        num_slots=num_slots,
        tensor_bytes=graph.tensor_bytes.astype(np.float64),
        atoms=atoms,
        is_gang=np.array([bool(device.members) for device in host.devices], dtype=np.int8),
        corun_slowdown=corun.ravel(),
        dispatcher=np.array([dispatchers.index(d.dispatcher) if d.dispatcher else -1 for d in host.devices], np.int32),
        num_dispatchers=len(dispatchers),
        dispatch_s=float(host.dispatch_s),
        copy_dispatch_s=float(host.copy_dispatch_s),
        run_ahead=min(host.run_ahead, 2 * (graph.num_ops + int(fanout.sum())) + 1),
        size_class=np.array([granularities.index(d.memory_granularity_bytes) for d in host.devices], np.int32),
        tensor_size=_rounded(graph.tensor_bytes, granularities),
        workspace_size=_workspaces(problem),
        state_size=_rounded(graph.state_bytes, granularities),
        is_kept=is_kept,
        has_pools=bool(np.any(pool >= 0)),
        pool=pool,
        num_accounts=len(capacity),
        context_bytes=np.array([d.context_bytes for d in host.devices], dtype=np.int64),
        capacity_bytes=capacity,
        has_handovers=bool(np.any(kinds == HANDOVER)),
        is_general=bool(
            np.any(kinds == JOB)
            or np.any(blocks_source)
            or np.any(corun)
            or any(d.members for d in host.devices)
            or num_slots > MAX_SLOTS
            or by_request
        ),
        has_corun=bool(np.any(corun)),
        has_updates=len(graph.mutation_op) > 0,
        launches=launches,
        by_request=by_request,
    )


def _workspaces(problem: Problem) -> Longs:
    granularity = np.array([device.memory_granularity_bytes for device in problem.host.devices], dtype=np.int64)
    return allocated(problem.workspace_bytes, granularity).ravel()


def _rounded(num_bytes: Longs, granularities: list[int]) -> Longs:
    return np.concatenate([allocated(num_bytes, granularity) for granularity in granularities])


class Updates(Block):
    """In-place updates, and what it takes to know which ops they wait for. CSR over ops, over tensors, over ops."""

    updated_offsets: Ints  # tensors that an op updates
    updated_tensors: Ints
    updater_offsets: Ints  # ops that update a tensor
    updater_ops: Ints
    concerned: Bytes  # (N,) ops that read or update a tensor that some op updates
    tensor_op: Ints
    input_offsets: Ints
    input_tensors: Ints
    route_kind: Ints
    num_devices: int


def lay_out_updates(graph: OpGraph, route_kind: Ints, num_devices: int) -> Updates:
    """The in-place updates of a graph on a host.

    Args:
        graph: with its mutations.
        route_kind: (D * D,) kinds of route.
        num_devices: D.

    Raises:
        InvalidValue: updates that wait for each other.
    """
    pairs = np.unique(np.stack([graph.mutation_op, graph.mutation_tensor], axis=1), axis=0).astype(np.int64)
    ops, tensors = pairs[:, 0], pairs[:, 1]
    by_tensor = np.lexsort((ops, tensors))
    updated = np.zeros(graph.num_tensors, dtype=np.bool_)
    updated[tensors] = True
    concerned = np.zeros(graph.num_ops, dtype=np.int8)
    concerned[ops] = 1
    concerned[graph.edge_op[updated[graph.input_tensors]]] = 1
    if not _come_last(graph, ops, tensors):
        _check_updates(graph, ops, tensors)
    return Updates(
        updated_offsets=_offsets(ops, graph.num_ops),
        updated_tensors=tensors.astype(np.int32),
        updater_offsets=_offsets(tensors, graph.num_tensors),
        updater_ops=ops[by_tensor].astype(np.int32),
        concerned=concerned,
        tensor_op=graph.tensor_op,
        input_offsets=graph.input_offsets,
        input_tensors=graph.input_tensors,
        route_kind=route_kind,
        num_devices=num_devices,
    )


def _offsets(keys: Longs, count: int) -> Ints:
    return np.concatenate(([0], np.cumsum(np.bincount(keys, minlength=count)))).astype(np.int32)


def _come_last(graph: OpGraph, ops: Longs, tensors: Longs) -> bool:
    """Whether every update has a higher index than each op that reads its tensor and does not update it."""
    is_update = np.isin(
        graph.edge_op.astype(np.int64) * graph.num_tensors + graph.input_tensors, ops * graph.num_tensors + tensors
    )
    last_reader = np.full(graph.num_tensors, -1, dtype=np.int64)
    np.maximum.at(last_reader, graph.input_tensors[~is_update], graph.edge_op[~is_update])
    return bool(np.all(last_reader[tensors] < ops))


def _check_updates(graph: OpGraph, ops: Longs, tensors: Longs) -> None:
    """Refuses in-place updates that would have to wait for a reader that waits for them."""
    waits_for: list[set[int]] = [
        set(graph.tensor_op[graph.input_tensors[graph.input_offsets[i] : graph.input_offsets[i + 1]]].tolist())
        for i in range(graph.num_ops)
    ]
    offsets, readers = graph.readers
    updaters: dict[int, list[int]] = {}
    for op, tensor in zip(ops.tolist(), tensors.tolist(), strict=True):
        updaters.setdefault(tensor, []).append(op)
    for tensor, writers in updaters.items():
        earlier = set(readers[offsets[tensor] : offsets[tensor + 1]].tolist()) - set(writers)
        for writer in sorted(writers):
            waits_for[writer] |= earlier | {int(graph.tensor_op[tensor])}
            earlier |= {writer}
    edges = [(before, op) for op, befores in enumerate(waits_for) for before in befores - {op}]
    runs = set(topological_order(graph.num_ops, edges))
    if len(runs) < graph.num_ops:
        stuck = min(set(ops.tolist()) - runs)
        raise InvalidValue(
            "mutation_op",
            f"op {graph.names[stuck]!r} waits for a reader that waits for it",
            "in-place updates after every other reader of their tensor",
            where="graph",
        )
