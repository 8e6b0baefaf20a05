"""`Compiled`: a `Problem` as flat arrays, laid out once for the simulator's kernels; `Scratch`: the memory they write.

Routes, gangs, memory accounts and in-place updates become tables; `default_priorities` orders the ops. Scratch is
allocated once per thread and used again for every placement. `PlanBatch`: plans that were checked once, laid out to be
re-timed many times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.graphs import FORWARD, OpGraph
from rlplace.graphs.paths import longest_after, ready_order, topological_order
from rlplace.jit import Block, Bytes, Floats, Ints, IntTable, Longs
from rlplace.measure.hosts.host import Host, allocated
from rlplace.measure.problem import Plan, Problem, transfer_sources

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
    counts = np.diff(offsets)[:, None]
    nth = np.arange(max(counts.max(initial=1), 1))
    places = offsets[:-1, None] + np.where(nth < counts, nth, 0)
    return np.where(counts > 0, np.append(links, 0)[places], 0).astype(np.int32).ravel()


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
    shared = account_names(host)[host.num_devices :]
    pool = [
        host.num_devices + shared.index(device.memory_pool) if device.memory_pool in shared else -1
        for device in host.devices
    ]
    capacity = [device.memory_bytes for device in host.devices]
    capacity += [min(d.memory_bytes for d in host.devices if d.memory_pool == name) for name in shared]
    return np.array(pool, dtype=np.int32), np.array(capacity, dtype=np.int64)


def default_priorities(problem: Problem) -> NDArray[np.float64]:
    """(N,) float64, higher runs first: by `problem.op_order`; upward ranks where nothing is cut."""
    rank = upward_ranks(problem)
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
    """(N,) int64: ops by `default_priorities`, ties by index, each after its inputs."""
    graph = problem.graph
    offsets, readers = graph.readers
    return ready_order(default_priorities(problem), graph.input_offsets, offsets[graph.output_offsets], readers)


def upward_ranks(problem: Problem) -> NDArray[np.float64]:
    """(N,) float64 seconds: the longest remaining path from the start of each op to the end of the step.

    Ops count with their mean time over devices, tensors with their mean transfer time over ordered pairs of distinct
    devices (HEFT: Topcuoglu, Hariri, Wu 2002, equation 6). Source ops take no time.
    """
    graph, latency_s = problem.graph, mean_route(problem.transfer_latency_s)
    s_per_byte = mean_route(problem.transfer_s_per_byte)
    transfer_s: Floats = latency_s + graph.tensor_bytes.astype(np.float64) * s_per_byte
    op_s: Floats = np.mean(problem.costs.op_time_s, axis=1, dtype=np.float64) * ~graph.is_source
    producers = graph.tensor_op[graph.input_tensors]
    return op_s + longest_after(op_s, graph.input_offsets, producers, transfer_s[graph.input_tensors])


def mean_route(table_DD: NDArray[np.float64]) -> float:
    """Mean over ordered pairs of distinct devices, of a table that is 0 on the diagonal; 0 for one device."""
    return float(table_DD.sum()) / max(len(table_DD) * (len(table_DD) - 1), 1)


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
    moved_factor: Floats  # (N,) on the time of an op whose largest input was made on another device
    main_producer: Ints  # (N,) the op that makes it; the op itself where it reads nothing
    is_source: Bytes
    input_offsets: Ints
    input_tensors: Ints
    output_offsets: Ints
    tensor_op: Ints
    reader_offsets: Ints
    reader_ops: Ints
    # in-place updates, CSR over ops and over tensors
    updated_offsets: Ints  # tensors that an op updates
    updated_tensors: Ints
    updater_offsets: Ints  # ops that update a tensor
    updater_ops: Ints
    concerned: Bytes  # (N,) ops that read or update a tensor that some op updates
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
    least_latency_s: Floats  # (D * D,) no transfer that ends there takes less, also if its tensor is relayed
    least_s_per_byte: Floats
    tensor_bytes: Floats
    # devices: what each keeps busy, as a bit mask over single devices
    atoms: Longs
    is_gang: Bytes
    peers: Longs  # (D,) bit masks: devices of its machine; all of them where nothing is relayed
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
    posts_receives: bool  # a copy that keeps no device busy has its memory before it starts
    has_pools: bool
    pool: Ints  # (D,) -1: a memory of its own
    num_accounts: int
    context_bytes: Longs  # (D,)
    capacity_bytes: Longs  # (accounts,)
    # what the host makes use of
    has_handovers: bool
    has_relays: bool
    is_general: bool  # devices or transfers block each other or slow each other down, or launches wait in a queue
    has_corun: bool
    has_updates: bool
    has_moved: bool  # some op takes longer where its largest input was made elsewhere
    launches: bool
    by_request: bool


def compile_problem(problem: Problem) -> Compiled:
    """`problem` as flat arrays.

    Raises:
        InvalidValue: too many devices, a gang without single devices, or in-place updates that wait for each other.
    """
    graph, host, moved = problem.graph, problem.host, problem.costs.moved_factor
    if host.num_devices > MAX_DEVICES:
        raise InvalidValue("devices", host.num_devices, f"at most {MAX_DEVICES}", where=f"host {host.name!r}")
    reader_offsets, reader_ops = graph.readers
    kinds, blocks_source, route_offsets, route_links = route_tables(host)
    is_wired = np.diff(route_offsets) > 0
    first_links, firsts = np.unique(route_links[route_offsets[:-1][is_wired]], return_inverse=True)
    route_slot = np.full(len(kinds), -1, dtype=np.int32)
    route_slot[is_wired] = host.num_devices + firsts
    num_slots = host.num_devices + len(first_links)
    padded = padded_routes(route_offsets, route_links)
    fanout = np.minimum(np.diff(reader_offsets), host.num_devices - 1)
    dispatchers = sorted({device.dispatcher for device in host.devices if device.dispatcher})
    pool, capacity = account_limits(host)
    granularity = [device.memory_granularity_bytes for device in host.devices]
    granularities = sorted(set(granularity))
    corun = np.array(host.corun_slowdown or np.zeros((host.num_devices,) * 2), dtype=np.float64)
    np.fill_diagonal(corun, 0.0)
    is_kept = graph.is_source[graph.tensor_op].astype(np.int8)
    is_kept[graph.output_tensors] = 1
    launches = bool(dispatchers) and (host.dispatch_s > 0 or host.copy_dispatch_s > 0)
    by_request = launches and host.dispatch_order == "request"
    atoms, machine_of = atoms_of(host), host.machine_of
    is_peer = machine_of[:, None] == machine_of
    has_relays = not is_peer.all()
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
        moved_factor=np.ones(graph.num_ops) if moved is None else moved,
        main_producer=main_producers(graph),
        is_source=graph.is_source.astype(np.int8),
        input_offsets=graph.input_offsets,
        input_tensors=graph.input_tensors,
        output_offsets=graph.output_offsets,
        tensor_op=graph.tensor_op,
        reader_offsets=reader_offsets,
        reader_ops=reader_ops,
        **lay_out_updates(graph),
        route_kind=kinds,
        route_blocks_source=blocks_source,
        route_latency_s=problem.transfer_latency_s.ravel(),
        route_s_per_byte=problem.transfer_s_per_byte.ravel(),
        route_offsets=route_offsets,
        route_links=route_links,
        route_padded=padded,
        route_slot=route_slot,
        num_slots=num_slots,
        least_latency_s=_least_of_machine(problem.transfer_latency_s, is_peer).ravel(),
        least_s_per_byte=_least_of_machine(problem.transfer_s_per_byte, is_peer).ravel(),
        tensor_bytes=graph.tensor_bytes.astype(np.float64),
        atoms=atoms,
        is_gang=np.array([bool(device.members) for device in host.devices], dtype=np.int8),
        peers=is_peer @ (np.int64(1) << np.arange(host.num_devices)),
        corun_slowdown=corun.ravel(),
        dispatcher=np.array([dispatchers.index(d.dispatcher) if d.dispatcher else -1 for d in host.devices], np.int32),
        num_dispatchers=len(dispatchers),
        dispatch_s=float(host.dispatch_s),
        copy_dispatch_s=float(host.copy_dispatch_s),
        run_ahead=min(host.run_ahead, 2 * (graph.num_ops + int(fanout.sum())) + 1),
        size_class=np.array([granularities.index(each) for each in granularity], np.int32),
        tensor_size=_rounded(graph.tensor_bytes, granularities),
        workspace_size=allocated(problem.workspace_bytes, np.array(granularity, dtype=np.int64)).ravel(),
        state_size=_rounded(graph.state_bytes, granularities),
        is_kept=is_kept,
        posts_receives=host.processes,
        has_pools=bool(np.any(pool >= 0)),
        pool=pool,
        num_accounts=len(capacity),
        context_bytes=np.array([d.context_bytes for d in host.devices], dtype=np.int64),
        capacity_bytes=capacity,
        has_handovers=bool(np.any(kinds == HANDOVER)),
        has_relays=has_relays,
        is_general=bool(
            np.any(kinds == JOB)
            or np.any(blocks_source)
            or np.any(corun)
            or any(d.members for d in host.devices)
            or num_slots > MAX_SLOTS
            or has_relays
            or by_request
        ),
        has_corun=bool(np.any(corun)),
        has_updates=len(graph.mutation_op) > 0,
        has_moved=moved is not None and bool(np.any(moved > 1)),
        launches=launches,
        by_request=by_request,
    )


def _least_of_machine(table: NDArray[np.float64], is_peer: NDArray[np.bool_]) -> NDArray[np.float64]:
    """A (D, D) figure of routes: between two machines the least one of all routes from the device to the other."""
    return np.where(is_peer, table, np.where(is_peer, table[:, None], np.inf).min(axis=2))


def main_producers(graph: OpGraph) -> Ints:
    """(N,) int32: the op that makes the largest input of each op, the first of equal ones; itself where it has none."""
    largest_first = np.lexsort((-graph.tensor_bytes[graph.input_tensors], graph.edge_op))
    ops, first = np.unique(graph.edge_op[largest_first], return_index=True)
    producers = np.arange(graph.num_ops, dtype=np.int32)
    producers[ops] = graph.tensor_op[graph.input_tensors[largest_first[first]]]
    return producers


def _rounded(num_bytes: Longs, granularities: list[int]) -> Longs:
    return np.concatenate([allocated(num_bytes, granularity) for granularity in granularities])


def lay_out_updates(graph: OpGraph) -> dict[str, Any]:
    """The fields of `Compiled` for the in-place updates of a graph.

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
    is_update = np.isin(
        graph.edge_op.astype(np.int64) * graph.num_tensors + graph.input_tensors, ops * graph.num_tensors + tensors
    )
    last_reader = np.full(graph.num_tensors, -1, dtype=np.int64)
    np.maximum.at(last_reader, graph.input_tensors[~is_update], graph.edge_op[~is_update])
    if not np.all(last_reader[tensors] < ops):  # else every update comes after all that it waits for
        _check_updates(graph, ops, tensors)
    return {
        "updated_offsets": offsets_of(ops, graph.num_ops),
        "updated_tensors": tensors.astype(np.int32),
        "updater_offsets": offsets_of(tensors, graph.num_tensors),
        "updater_ops": ops[by_tensor].astype(np.int32),
        "concerned": concerned,
    }


def offsets_of(keys: NDArray[np.integer], count: int) -> Ints:
    """(count + 1,) int32: CSR offsets of what is sorted by `keys`."""
    return np.concatenate(([0], np.cumsum(np.bincount(keys, minlength=count)))).astype(np.int32)


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
        raise InvalidValue(
            "mutation_op",
            f"op {graph.names[min(set(ops.tolist()) - runs)]!r} waits for a reader that waits for it",
            "in-place updates after every other reader of their tensor",
            where="graph",
        )


POSITION, TRANSFERS = range(2)
"""Places in `Scratch.state`: length of the sequence, number of transfers."""
ORIGINAL, KEPT = 1 << 28, 1 << 29
"""Flags in `Scratch.users`: the tensor was made here; it is never freed here."""


class Scratch(Block):
    """Outputs (the plan, and when each item starts and ends) and working memory. K is the most transfers there can be.

    An item is an op `i` or a transfer `num_ops + k`.
    """

    state: Longs
    sequence: Ints  # (N + K + 1,)
    transfer_tensor: Ints  # (K,)
    transfer_source: Ints  # (K,)
    transfer_destination: Ints  # (K,)
    start_s: Floats  # (N + K,)
    end_s: Floats  # (N + K,)
    transfer_factor: Floats  # (K,) on the duration of each transfer of a given plan: 1, but for a disturbed step
    peak_bytes: Longs  # (accounts,)
    load_s: Floats  # (D + L,)
    path_s: Floats  # (N,) least seconds from an op's start to the end of the step
    work_left_s: Floats  # (D,) seconds of the ops that a device has not begun
    # planning
    waiting: Ints  # (N + K,) what an item still waits for
    ended: Ints  # (N,) ops that end at one instant
    found: Ints
    ready_leaf: Longs  # (D * leaf words,) ready ops of each device: bits, words with bits, words of words
    ready_middle: Longs
    ready_top: Longs
    slot_end_s: Floats  # (slots + 1,) when the running item of a device or of a first link ends
    slot_end_bits: Longs  # the same memory, read as int64
    slot_item: Ints  # (slots,)
    # timing
    available_s: Floats  # (T * D,)
    updated_s: Floats  # (T,)
    atom_free_s: Floats  # (D,)
    link_free_s: Floats  # (L,)
    dispatcher_free_s: Floats  # (dispatchers,)
    recent_s: Floats  # (D * run_ahead,)
    recent_place: Longs  # (D,)
    # memory
    users: Ints  # (T * D,) users to come of a tensor on an account, with the flags below
    last_use_s: Floats  # (T * D,)
    event_base: Longs  # (2 * accounts + 1,) where each account's allocations begin, then its frees
    event_count: Longs  # (2 * accounts,)
    events: Floats  # pairs of an event's time and its bytes
    event_bytes: Longs  # the same memory, read as int64: bytes are whole numbers
    held_bytes: Longs  # (accounts,) from start to end of the step


def new_scratch(p: Compiled) -> Scratch:
    """Working memory for one thread."""
    n, t, d, links, k = p.num_ops, p.num_tensors, p.num_devices, p.num_links, p.max_transfers
    most_events = 2 * (2 * n + t + 2 * k) + 2 * (d + p.num_accounts)
    events, slot_end_s = np.zeros(2 * most_events), np.zeros(p.num_slots + 1)
    return Scratch(
        state=np.zeros(2, np.int64),
        sequence=np.zeros(n + k + 1, np.int32),
        transfer_tensor=np.zeros(k, np.int32),
        transfer_source=np.zeros(k, np.int32),
        transfer_destination=np.zeros(k, np.int32),
        start_s=np.zeros(n + k),
        end_s=np.zeros(n + k),
        transfer_factor=np.ones(k),
        peak_bytes=np.zeros(p.num_accounts, np.int64),
        load_s=np.zeros(d + links),
        path_s=np.zeros(n),
        work_left_s=np.zeros(d),
        waiting=np.zeros(n + k, np.int32),
        ended=np.zeros(n, np.int32),
        found=np.zeros(2 * len(p.updater_ops), np.int32),
        ready_leaf=np.zeros(d * p.num_leaf, np.int64),
        ready_middle=np.zeros(d * p.num_middle, np.int64),
        ready_top=np.zeros(d * p.num_top, np.int64),
        slot_end_s=slot_end_s,
        slot_end_bits=slot_end_s.view(np.int64),
        slot_item=np.zeros(p.num_slots, np.int32),
        available_s=np.zeros(t * d),
        updated_s=np.zeros(t),
        atom_free_s=np.zeros(d),
        link_free_s=np.zeros(links),
        dispatcher_free_s=np.zeros(p.num_dispatchers),
        recent_s=np.zeros(d * p.run_ahead),
        recent_place=np.zeros(d, np.int64),
        users=np.zeros(t * d, np.int32),
        last_use_s=np.zeros(t * d),
        event_base=np.zeros(2 * p.num_accounts + 1, np.int64),
        event_count=np.zeros(2 * p.num_accounts, np.int64),
        events=events,
        event_bytes=events.view(np.int64),
        held_bytes=np.zeros(p.num_accounts, np.int64),
    )


class FastScratch(Block):
    """Arrays that only the fast planner needs."""

    slot_tail: Ints  # (slots,)
    arrived: Ints  # (K,) tensors that arrive at one instant
    slot_next: Ints  # (K + 1,) the next transfer of the slot
    follower: Ints  # (K * most links of a route + 1,) transfer that starts when this one ends
    link_last: Ints  # (L,) place in `follower` of the link's last transfer


def new_fast_scratch(p: Compiled) -> FastScratch | None:
    """Working memory for one thread; None where the general planner plans."""
    if p.is_general:
        return None
    return FastScratch(
        slot_tail=np.zeros(p.num_slots, np.int32),
        arrived=np.zeros(p.max_transfers, np.int32),
        slot_next=np.zeros(p.max_transfers + 1, np.int32),
        follower=np.zeros(p.max_transfers * p.max_route_links + 1, np.int32),
        link_last=np.zeros(p.num_links, np.int32),
    )


class EventScratch(Block):
    """Arrays that only the general planner and the event-by-event simulation need.

    A lane is a list of items in plan order that take turns: one for each single device, for each link and, where
    launches cost time, for each dispatcher (`dispatch_order="plan"`) or device's launching thread (`"request"`).
    """

    # planning
    queue_next: Ints  # (K * most links of a route,)
    queue_head: Ints  # (L,)
    queue_tail: Ints  # (L,)
    link_busy: Bytes  # (L,)
    copy_key: Longs  # (K,)
    copy_next: Ints  # (K,)
    copy_head: Ints  # (D,)
    copy_cursor: Ints  # (D,)
    reserved: Longs  # (D,)
    work_s: Floats  # (D,) work left at `anchor_s`
    anchor_s: Floats  # (D,)
    slowdown: Floats  # (D,)
    # timing event by event
    lane_base: Longs  # (lanes + 1,)
    lane_head: Longs  # (lanes,)
    lane_items: Ints
    item_lanes: Ints  # lanes of each item, for each of its turns ...
    item_base: Longs  # (N + K,) ... from here ...
    item_end: Longs  # (N + K,) ... to here
    place: Ints  # place of the item in each of its lanes, aligned with `item_lanes`
    duration_s: Floats  # (N + K,)
    slot: Ints  # (N + K,) where the running item is kept; -1 for items that take no time
    bounded: Ints  # (N + K,) how many of its lanes, the first ones, bound its launch by `run_ahead`
    data_waiting: Ints  # (N + K,)
    first_transfer: Ints  # (T,)
    next_transfer: Ints  # (K,)
    first_behind: Ints  # (N + K,) transfers that a relay sends on when this item of it has ended
    next_behind: Ints  # (K,)
    last_item: Ints  # (D,)
    startable: Ints  # (N + K,)
    launch_end_s: Floats  # (dispatchers,)
    launch_lane: Longs  # (dispatchers,)
    request_s: Floats  # (D,)


def new_event_scratch(p: Compiled) -> EventScratch | None:
    """Working memory for one thread; None where the fast planner plans."""
    if not p.is_general:
        return None
    n, k, d, links = p.num_ops, p.max_transfers, p.num_devices, p.num_links
    lanes = d + links + max(d, p.num_dispatchers)
    most_atoms = max(mask.bit_count() for mask in p.atoms.tolist())
    turns = n * (most_atoms + 1) + k * (2 * most_atoms + p.max_route_links + 1)
    return EventScratch(
        queue_next=np.zeros(k * p.max_route_links, np.int32),
        queue_head=np.zeros(links, np.int32),
        queue_tail=np.zeros(links, np.int32),
        link_busy=np.zeros(links, np.int8),
        copy_key=np.zeros(k, np.int64),
        copy_next=np.zeros(k, np.int32),
        copy_head=np.zeros(d, np.int32),
        copy_cursor=np.zeros(d, np.int32),
        reserved=np.zeros(d, np.int64),
        work_s=np.zeros(d),
        anchor_s=np.zeros(d),
        slowdown=np.zeros(d),
        lane_base=np.zeros(lanes + 1, np.int64),
        lane_head=np.zeros(lanes, np.int64),
        lane_items=np.zeros(turns, np.int32),
        item_lanes=np.zeros(turns, np.int32),
        item_base=np.zeros(n + k, np.int64),
        item_end=np.zeros(n + k, np.int64),
        place=np.zeros(turns, np.int32),
        duration_s=np.zeros(n + k),
        slot=np.zeros(n + k, np.int32),
        bounded=np.zeros(n + k, np.int32),
        data_waiting=np.zeros(n + k, np.int32),
        first_transfer=np.zeros(p.num_tensors, np.int32),
        next_transfer=np.zeros(k, np.int32),
        first_behind=np.zeros(n + k, np.int32),
        next_behind=np.zeros(k, np.int32),
        last_item=np.zeros(d, np.int32),
        startable=np.zeros(n + k, np.int32),
        launch_end_s=np.zeros(p.num_dispatchers),
        launch_lane=np.zeros(p.num_dispatchers, np.int64),
        request_s=np.zeros(d),
    )


class PlanBatch(Block):
    """B plans, one after the other, or B placements that are still to be planned (then all but `devices` is empty).

    Good on any host with the same devices, machines and kinds of route.

    Attributes:
        devices: (B, N) int32.
        sequence: int32, every plan's sequence.
        sequence_offsets: (B + 1,) int64.
        transfer_tensor: int32, every plan's.
        transfer_source: int32, every plan's.
        transfer_destination: int32, every plan's.
        transfer_offsets: (B + 1,) int64.
    """

    devices: IntTable
    sequence: Ints
    sequence_offsets: Longs
    transfer_tensor: Ints
    transfer_source: Ints
    transfer_destination: Ints
    transfer_offsets: Longs


def stack_plans(problem: Problem, p: Compiled, plans: Sequence[Plan]) -> PlanBatch:
    """The plans as one batch, with everything in range; whether they can be followed is not looked at.

    Raises:
        InvalidValue: a plan for other ops, or with an index out of range.
    """
    for plan in plans:
        if plan.num_transfers > p.max_transfers or len(plan.sequence) != p.num_ops + plan.num_transfers:
            raise InvalidValue("sequence", len(plan.sequence), "every op and needed transfer once", where="plan")
        if (count := len(plan.transfer_destination)) != plan.num_transfers:
            raise InvalidValue("transfer_destination", count, f"{plan.num_transfers} entries", where="plan")
        for name, values, bound in (
            ("sequence", plan.sequence, len(plan.sequence)),
            ("transfer_tensor", plan.transfer_tensor, p.num_tensors),
            ("transfer_destination", plan.transfer_destination, p.num_devices),
        ):
            if len(values) and (values.min() < 0 or values.max() >= bound):
                expected = f"indices in 0..{bound - 1}"
                raise InvalidValue(name, f"{values.min()}..{values.max()}", expected, where="plan")
    devices = [problem.check_placement(plan.devices) for plan in plans]
    return PlanBatch(
        devices=np.stack(devices) if devices else np.zeros((0, p.num_ops), dtype=np.int32),
        sequence=_joined([plan.sequence for plan in plans]),
        sequence_offsets=np.cumsum([0, *(len(plan.sequence) for plan in plans)]),
        transfer_tensor=_joined([plan.transfer_tensor for plan in plans]),
        transfer_source=_joined([transfer_sources(problem.graph, problem.host, plan) for plan in plans]),
        transfer_destination=_joined([plan.transfer_destination for plan in plans]),
        transfer_offsets=np.cumsum([0, *(plan.num_transfers for plan in plans)]),
    )


def _joined(parts: list[NDArray[np.int32]]) -> Ints:
    return np.concatenate([np.zeros(0, dtype=np.int32), *parts])
