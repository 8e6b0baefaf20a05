"""`Search`: the two published objectives, annealed over units.

For max-load every move is scored by its changes alone; for piece-latency a move cuts only the devices anew that it
touches. The temperature falls geometrically from `hot` to `cold`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import check_known
from rlplace.graphs.formats.published import DnnPartitioning
from rlplace.jit import Block, Bools, Floats, FloatTable, Ints, IntTable, kernel
from rlplace.partitioning.contiguous import contract
from rlplace.partitioning.objectives import (
    OBJECTIVES,
    MaxLoad,
    PieceLatency,
    UnitGraph,
    csr,
    cut_device,
    finish_pieces,
    unit_graph,
    work_ms,
)

Words = NDArray[np.uint64]


class MoveGraph(UnitGraph):
    """Units and nets, an order of the units in which neighbours are near, and the ops that move in these units.

    Attributes:
        order, place: (U,) int32, units in topological order, and where each is in it.
        op_work_ms: (2, N), on an accelerator and on a CPU; ops are in topological order.
        op_transfer_ms: (N,)
        source_offsets, sources, reader_offsets, readers: CSRs of the edges at each op.
        op_offsets, unit_ops: CSR of each unit's ops.
    """

    order: Ints
    place: Ints
    op_work_ms: FloatTable
    op_transfer_ms: Floats
    source_offsets: Ints
    sources: Ints
    reader_offsets: Ints
    readers: Ints
    op_offsets: Ints
    unit_ops: Ints


class Placed(Block):
    """A placement of units with all that its value is made of.

    Attributes:
        devices: (U,) int32.
        load_ms, held_bytes: (D,) float64.
        sinks_on: (M, D) int32, sinks of each net on each device.
        op_devices: (N,) int32.
        piece, kept: (N,) int32, the piece of its device that each op is in, and that before the latest move.
        depth: (N,) int32, scratch.
        number: (D N,) int32 of -1, scratch.
        touched: (D,) bool, devices whose pieces are to be cut anew.
    """

    devices: Ints
    load_ms: Floats
    held_bytes: Floats
    sinks_on: IntTable
    op_devices: Ints
    piece: Ints
    kept: Ints
    depth: Ints
    number: Ints
    touched: Bools


@kernel
def draw(state: Words) -> float:
    """A number in [0, 1), by xorshift64* (Vigna 2016); `state` (1,) goes on."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return np.float64((x * np.uint64(2685821657736338717)) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@kernel
def fill(g: MoveGraph, s: Placed) -> None:
    """Bring all else in line with `s.devices`."""
    s.load_ms[:] = 0.0
    s.held_bytes[:] = 0.0
    s.sinks_on[:] = 0
    for unit in range(len(g.accelerator_ms)):
        device = s.devices[unit]
        s.load_ms[device] += g.cpu_ms[unit] if device == g.num_accelerators else g.accelerator_ms[unit]
        s.held_bytes[device] += g.size_bytes[unit]
    for net in range(len(g.net_ms)):
        for a in range(g.net_offsets[net], g.net_offsets[net + 1]):
            s.sinks_on[net, s.devices[g.net_sinks[a]]] += 1
        home = s.devices[g.net_source[net]]
        size = g.net_offsets[net + 1] - g.net_offsets[net]
        for device in range(g.num_accelerators):
            pays = s.sinks_on[net, device] < size if device == home else s.sinks_on[net, device] > 0
            if pays:
                s.load_ms[device] += g.net_ms[net]
    s.op_devices[:] = s.devices[g.op_unit]
    for device in range(g.num_accelerators):
        cut_device(s.op_devices, device, g.source_offsets, g.sources, s.depth, s.piece)


@kernel
def move(g: MoveGraph, s: Placed, unit: int, device: int) -> None:
    """Put `unit` on `device`, loads following in time proportional to its nets."""
    old, cpus = s.devices[unit], g.num_accelerators
    s.load_ms[old] -= g.cpu_ms[unit] if old == cpus else g.accelerator_ms[unit]
    s.load_ms[device] += g.cpu_ms[unit] if device == cpus else g.accelerator_ms[unit]
    s.held_bytes[old] -= g.size_bytes[unit]
    s.held_bytes[device] += g.size_bytes[unit]
    s.devices[unit] = device
    for a in range(g.unit_offsets[unit], g.unit_offsets[unit + 1]):
        net = g.unit_nets[a]
        cost = g.net_ms[net]
        size = g.net_offsets[net + 1] - g.net_offsets[net]
        source = g.net_source[net]
        if source == unit:
            on_old, on_new = s.sinks_on[net, old], s.sinks_on[net, device]
            if old != cpus:
                s.load_ms[old] += (cost if on_old > 0 else 0.0) - (cost if on_old < size else 0.0)
            if device != cpus:
                s.load_ms[device] += (cost if on_new < size else 0.0) - (cost if on_new > 0 else 0.0)
            continue
        home = s.devices[source]
        on_old, on_new = s.sinks_on[net, old] - 1, s.sinks_on[net, device] + 1
        s.sinks_on[net, old], s.sinks_on[net, device] = on_old, on_new
        if old == home:
            if on_old == size - 1 and old != cpus:
                s.load_ms[old] += cost
        elif on_old == 0 and old != cpus:
            s.load_ms[old] -= cost
        if device == home:
            if on_new == size and device != cpus:
                s.load_ms[device] -= cost
        elif on_new == 1 and device != cpus:
            s.load_ms[device] += cost


@kernel
def exchange(g: MoveGraph, s: Placed, by_pieces: bool, cluster: Ints, goes: Ints, size: int) -> None:
    """Exchange the devices of the first `size` units of `cluster` with those in `goes`; twice undoes it."""
    for a in range(size):
        unit, device = cluster[a], goes[a]
        goes[a] = s.devices[unit]
        if not by_pieces:
            move(g, s, unit, device)
            continue
        s.held_bytes[s.devices[unit]] -= g.size_bytes[unit]
        s.held_bytes[device] += g.size_bytes[unit]
        s.devices[unit] = device
        for b in range(g.op_offsets[unit], g.op_offsets[unit + 1]):
            s.op_devices[g.unit_ops[b]] = device


@kernel
def value_ms(g: MoveGraph, s: Placed, by_pieces: bool) -> float:
    """The objective, infinite where an accelerator holds too much; pieces of touched devices are cut anew."""
    for device in range(g.num_accelerators):
        if s.held_bytes[device] > g.capacity_bytes:
            return np.inf
    if not by_pieces:
        return float(np.max(s.load_ms[: g.num_devices]))
    for device in range(g.num_accelerators):
        if s.touched[device]:
            cut_device(s.op_devices, device, g.source_offsets, g.sources, s.depth, s.piece)
    return finish_pieces(
        s.op_devices,
        g.num_accelerators,
        g.op_work_ms,
        g.op_transfer_ms,
        g.source_offsets,
        g.sources,
        g.reader_offsets,
        g.readers,
        s.piece,
        s.number,
    )


@kernel
def smooth(g: MoveGraph, s: Placed, by_pieces: bool, value: float, scale: float) -> float:
    """Logarithm of the latency, or of the loads' norm of order 2 ** 5; infinite where the value is.

    The norm is near the maximum, but falls also with progress below it.
    """
    if by_pieces or value == np.inf:
        return float(np.log(value))
    total = 0.0
    for device in range(g.num_devices):
        power = max(s.load_ms[device], 0.0) * scale
        for _ in range(5):
            power *= power
        total += power
    return np.log(total) / 32 if total > 0 else -700.0


@kernel
def anneal(
    g: MoveGraph,
    s: Placed,
    by_pieces: bool,
    shares: Floats,
    best: Ints,
    random: Words,
    steps: int,
    hot: float,
    cold: float,
) -> float:
    """The least value met in `steps` moves from `s.devices`, which fits; `best` (U,) holds its placement.

    Moves are accepted by Metropolis' rule on `smooth`. For max-load, units of the fullest device are picked more often.
    """
    num_units = len(s.devices)
    cluster, goes = np.empty(num_units, dtype=np.int32), np.empty(num_units, dtype=np.int32)
    mark = np.full(num_units, -1, dtype=np.int64)
    fill(g, s)
    best[:] = s.devices
    best_ms = value_ms(g, s, by_pieces)
    scale = 1.0 / max(np.max(s.load_ms), 1e-12)
    current = smooth(g, s, by_pieces, best_ms, scale)
    ratio = cold / hot
    temperature = hot
    for step in range(steps):
        if step % 256 == 0:
            temperature = hot * ratio ** (step / steps)
        if step % 65536 == 65535:  # the running sums have drifted by rounding
            fill(g, s)
            current = smooth(g, s, by_pieces, value_ms(g, s, by_pieces), scale)
        unit = int(draw(random) * num_units)
        if not by_pieces and draw(random) < 0.4:
            fullest = np.argmax(s.load_ms[: g.num_devices])
            for _ in range(8):
                if s.devices[unit] == fullest:
                    break
                unit = int(draw(random) * num_units)
        size = _propose(g, s.devices, shares, cluster, goes, mark, step, unit, random)
        if size == 0:
            continue
        s.touched[:] = False
        for a in range(size):
            s.touched[s.devices[cluster[a]]] = True
            s.touched[goes[a]] = True
        if by_pieces:
            s.kept[:] = s.piece
        exchange(g, s, by_pieces, cluster, goes, size)
        # Metropolis' rule; a move that is not taken is taken back
        value = value_ms(g, s, by_pieces)
        after = smooth(g, s, by_pieces, value, scale)
        if after <= current or draw(random) < np.exp((current - after) / temperature):
            current = after
            if value < best_ms * (1 - 1e-12):
                best_ms = value
                best[:] = s.devices
        else:
            exchange(g, s, by_pieces, cluster, goes, size)
            if by_pieces:
                s.piece[:] = s.kept
    return best_ms


@kernel
def _propose(
    g: MoveGraph,
    devices: Ints,
    shares: Floats,
    cluster: Ints,
    goes: Ints,
    mark: NDArray[np.int64],
    step: int,
    unit: int,
    random: Words,
) -> int:
    """Fill `cluster` with the units of a move around `unit`, `goes` with where to; their number, 0 for no move.

    A unit goes elsewhere; or two swap (up to `shares[0]`), or a window of the topological order goes (`shares[1]`), a
    cluster that grows over nets (`shares[2]`), or all of the device on one side of the unit (`shares[3]`).
    """
    num_units, home, target = len(devices), devices[unit], _pick_device(g, devices, unit, random)
    if target == home:
        return 0
    widest, kind, size = max(2, num_units // 4), draw(random), 1
    cluster[0], goes[0] = unit, target
    if kind < shares[0]:
        other = int(draw(random) * num_units)
        if devices[other] == home:
            return 0
        goes[0], goes[1] = devices[other], home
        cluster[1] = other
        size = 2
    elif kind < shares[1]:
        length = 1 + int(widest ** draw(random))
        begin = g.place[unit] - int(draw(random) * length)
        size = 0
        for place in range(max(begin, 0), min(begin + length, num_units)):
            if devices[g.order[place]] != target and (kind < 0.2 or devices[g.order[place]] == home):
                cluster[size] = g.order[place]
                size += 1
    elif kind < shares[2]:
        size = _grow(g, devices, cluster, mark, step, 1 + int(widest ** draw(random)), random)
    elif kind < shares[3]:
        is_later, size = draw(random) < 0.5, 0
        for place in range(g.place[unit] if is_later else 0, num_units if is_later else g.place[unit] + 1):
            if devices[g.order[place]] == home:
                cluster[size] = g.order[place]
                size += 1
    if kind >= shares[0]:
        goes[:size] = target
    for a in range(size):
        if goes[a] != g.num_accelerators and not g.supported[cluster[a]]:
            return 0
    return size


@kernel
def _pick_device(g: MoveGraph, devices: Ints, unit: int, random: Words) -> int:
    """A neighbour's device or, less often, any."""
    nets = g.unit_offsets[unit + 1] - g.unit_offsets[unit]
    if nets > 0 and draw(random) < 0.7:
        for _ in range(4):
            net = g.unit_nets[g.unit_offsets[unit] + int(draw(random) * nets)]
            other = g.net_source[net]
            if other == unit or draw(random) < 0.3:
                first = g.net_offsets[net]
                other = g.net_sinks[first + int(draw(random) * (g.net_offsets[net + 1] - first))]
            if devices[other] != devices[unit]:
                return int(devices[other])
    return int(draw(random) * g.num_devices)


@kernel
def _grow(
    g: MoveGraph, devices: Ints, cluster: Ints, mark: NDArray[np.int64], step: int, most: int, random: Words
) -> int:
    """Grow `cluster` from its first unit over nets within its device, up to `most` units; its size."""
    size, home = 1, devices[cluster[0]]
    mark[cluster[0]] = step
    head = 0
    while head < size and size < most:
        unit = cluster[head]
        head += 1
        for a in range(g.unit_offsets[unit], g.unit_offsets[unit + 1]):
            net = g.unit_nets[a]
            first, last = g.net_offsets[net], g.net_offsets[net + 1]
            if last - first > 16:
                continue
            for b in range(first - 1, last):
                other = g.net_source[net] if b < first else g.net_sinks[b]
                if mark[other] != step and devices[other] == home and size < most and draw(random) < 0.8:
                    mark[other] = step
                    cluster[size] = other
                    size += 1
    return size


SCHEDULES = {"max-load": (0.02, 2e-5, (0.15, 0.3, 0.5, 0.5)), "piece-latency": (0.02, 3e-4, (0.12, 0.4, 0.65, 0.7))}
"""Of each objective: temperatures that annealing begins and ends with, as a share of the value, and shares of moves."""


class Search:
    """One objective on one workload: scores placements of units, and anneals them.

    Args:
        record: the workload.
        objective: of `OBJECTIVES`.

    Attributes:
        hot, cold: temperatures that annealing begins and ends with, as a share of the value.
        units: ops that move together: colour classes, and ops without one.
        order: (U,) units in a topological order of the contracted graph.

    Raises:
        UnknownName: no such objective.
        InvalidValue: piece-latency of a training step.
    """

    def __init__(self, record: DnnPartitioning, objective: str) -> None:
        check_known("objective", objective, OBJECTIVES)
        self._timer = (MaxLoad if objective == "max-load" else PieceLatency)(record)
        self._by_pieces = objective == "piece-latency"
        self.hot, self.cold, self._shares = SCHEDULES[objective]
        self.units = unit_graph(record, record.units)
        first = np.unique(self.units.op_unit, return_index=True)[1]
        # by the contracted unit of each unit's first op, then by that op
        self.order = np.lexsort((first, contract(record).units.op_unit[first])).astype(np.int32)
        reader_offsets, readers = record.graph.readers
        op_offsets, unit_ops = csr(self.units.num_units, self.units.op_unit, np.arange(record.num_ops))
        self.graph = MoveGraph(
            **self.units.to_dict(),
            order=self.order,
            place=np.argsort(self.order).astype(np.int32),
            op_work_ms=work_ms(record),
            op_transfer_ms=record.transfer_ms,
            source_offsets=record.graph.input_offsets,
            sources=record.graph.input_tensors,
            reader_offsets=reader_offsets,
            readers=readers,
            op_offsets=op_offsets,
            unit_ops=unit_ops,
        )

    def values_ms(self, devices: Ints) -> NDArray[np.float64]:
        """(B,) milliseconds of placements of units (B, U) or (U,); infinite where infeasible."""
        return self._timer.values_ms(self.units.expand(np.atleast_2d(devices)))

    def placed(self, devices: Ints) -> Placed:
        """A placement (U,) for the kernels, not filled yet."""
        width, num_ops = self.units.num_accelerators + 1, len(self.units.op_unit)
        op_devices, piece, kept, depth = np.zeros((4, num_ops), dtype=np.int32)
        number, touched = np.full(width * num_ops, -1, dtype=np.int32), np.ones(width, dtype=np.bool_)
        sinks_on = np.zeros((len(self.units.net_ms), width), dtype=np.int32)
        moved = np.array(devices, dtype=np.int32)
        loads = np.zeros(width), np.zeros(width)
        return Placed(moved, *loads, sinks_on, op_devices, piece, kept, depth, number, touched)

    def anneal(self, start: Ints, seed: int, steps: int, hot: float, cold: float) -> tuple[Ints, float]:
        """The best placement (U,) met in `steps` moves from `start`, which fits, and its value in milliseconds."""
        best = np.empty(self.units.num_units, dtype=np.int32)
        state = np.random.SeedSequence(seed).generate_state(1, dtype=np.uint64) | np.uint64(1)  # never 0
        shares = np.array(self._shares)
        args = self.graph, self.placed(start), self._by_pieces, shares, best, state, steps, hot, cold
        return best, anneal(*args)
