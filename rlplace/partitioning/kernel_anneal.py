"""`MaxLoadSearch`, `PieceLatencySearch`: the two published objectives, annealed over units.

For max-load every move is scored by its changes alone; for piece-latency a move cuts only the devices anew that it
touches. Both kernels follow one schedule: the temperature falls geometrically from `hot` to `cold`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import check_known
from rlplace.graphs.formats.published import DnnPartitioning
from rlplace.jit import Block, Floats, FloatTable, Ints, IntTable, kernel
from rlplace.partitioning.contiguous import contract
from rlplace.partitioning.objectives import (
    OBJECTIVES,
    MaxLoad,
    PieceLatency,
    PublishedTimer,
    UnitGraph,
    csr,
    cut_device,
    finish_pieces,
    unit_graph,
    work_ms,
)

Words = NDArray[np.uint64]


class LoadGraph(UnitGraph):
    """Units and nets, and an order of the units in which neighbours are near.

    Attributes:
        order, place: (U,) int32, units in topological order, and where each is in it.
    """

    order: Ints
    place: Ints


class Loads(Block):
    """A placement of units with all that its max-load is made of.

    Attributes:
        devices: (U,) int32.
        load_ms: (D,) float64.
        held_bytes: (D,) float64.
        sinks_on: (M, D) int32, sinks of each net on each device.
    """

    devices: Ints
    load_ms: Floats
    held_bytes: Floats
    sinks_on: IntTable


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
def fill(g: LoadGraph, s: Loads) -> None:
    """Bring loads, memory and counts in line with `s.devices`."""
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


@kernel
def move(g: LoadGraph, s: Loads, unit: int, device: int) -> None:
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
def largest(g: LoadGraph, s: Loads) -> float:
    """The max-load, infinite where an accelerator holds too much."""
    most = 0.0
    for device in range(g.num_devices):
        most = max(most, s.load_ms[device])
        if device < g.num_accelerators and s.held_bytes[device] > g.capacity_bytes:
            return np.inf
    return most


@kernel
def smooth(g: LoadGraph, s: Loads, scale: float, doublings: int) -> float:
    """Logarithm of the loads' norm of order 2 ** `doublings`, infinite where an accelerator holds too much."""
    total = 0.0
    for device in range(g.num_devices):
        if device < g.num_accelerators and s.held_bytes[device] > g.capacity_bytes:
            return np.inf
        power = max(s.load_ms[device], 0.0) * scale
        for _ in range(doublings):
            power *= power
        total += power
    return np.log(total) / (1 << doublings) if total > 0 else -700.0


@kernel
def anneal_loads(
    g: LoadGraph, s: Loads, best: Ints, random: Words, steps: int, hot: float, cold: float, doublings: int
) -> float:
    """The least max-load met in `steps` moves from `s.devices`; `best` (U,) holds its placement.

    Moves, accepted by Metropolis' rule on the loads' smoothed maximum (a high norm, so that progress below the maximum
    counts): a unit goes elsewhere, or to a neighbour's device; two units swap; a window of the topological order, or a
    cluster that grows over nets from one unit, goes to one device. Units of the fullest device are picked more often.
    """
    num_units = len(g.accelerator_ms)
    cluster = np.empty(num_units, dtype=np.int32)
    old_device = np.empty(num_units, dtype=np.int32)
    mark = np.full(num_units, -1, dtype=np.int64)
    fill(g, s)
    best[:] = s.devices
    best_ms = largest(g, s)
    scale = 1.0 / max(np.max(s.load_ms), 1e-12)
    current = smooth(g, s, scale, doublings)
    ratio = cold / hot
    temperature = hot
    widest = max(2, num_units // 4)
    for step in range(steps):
        if step % 256 == 0:
            temperature = hot * ratio ** (step / steps)
        if step % 65536 == 65535:  # the running sums have drifted by rounding
            fill(g, s)
            current = smooth(g, s, scale, doublings)
        unit = int(draw(random) * num_units)
        if draw(random) < 0.4:
            fullest = np.argmax(s.load_ms[: g.num_devices])
            for _ in range(8):
                if s.devices[unit] == fullest:
                    break
                unit = int(draw(random) * num_units)
        # which units go where: a swap, a window of the order, a cluster over nets, or one unit
        home = s.devices[unit]
        target = _pick_device(g, s, unit, random)
        if target == home:
            continue
        kind = draw(random)
        size = 1
        cluster[0] = unit
        if kind < 0.15:
            other = int(draw(random) * num_units)
            if s.devices[other] == home:
                continue
            target = s.devices[other]
            cluster[1] = other
            size = 2
        elif kind < 0.3:
            length = 1 + int(widest ** draw(random))
            begin = g.place[unit] - int(draw(random) * length)
            size = 0
            for place in range(max(begin, 0), min(begin + length, num_units)):
                if s.devices[g.order[place]] != target and (kind < 0.2 or s.devices[g.order[place]] == home):
                    cluster[size] = g.order[place]
                    size += 1
        elif kind < 0.5:
            size = _grow(g, s, cluster, mark, step, 1 + int(widest ** draw(random)), random)
        is_possible = True
        for a in range(size):
            moved = cluster[a]
            old_device[a] = s.devices[moved]
            goes = home if kind < 0.15 and a == 1 else target
            is_possible = is_possible and (goes == g.num_accelerators or g.supported[moved])
        if not is_possible:
            continue
        for a in range(size):
            move(g, s, cluster[a], home if kind < 0.15 and a == 1 else target)
        # Metropolis' rule; a move that is not taken is taken back
        after = smooth(g, s, scale, doublings)
        if after <= current or draw(random) < np.exp((current - after) / temperature):
            current = after
            now_ms = largest(g, s)
            if now_ms < best_ms * (1 - 1e-12):
                best_ms = now_ms
                best[:] = s.devices
        else:
            for a in range(size):
                move(g, s, cluster[a], old_device[a])
    s.devices[:] = best
    fill(g, s)
    return largest(g, s)


@kernel
def _pick_device(g: LoadGraph, s: Loads, unit: int, random: Words) -> int:
    """A neighbour's device or, less often, any."""
    nets = g.unit_offsets[unit + 1] - g.unit_offsets[unit]
    if nets > 0 and draw(random) < 0.7:
        for _ in range(4):
            net = g.unit_nets[g.unit_offsets[unit] + int(draw(random) * nets)]
            other = g.net_source[net]
            if other == unit or draw(random) < 0.3:
                first = g.net_offsets[net]
                other = g.net_sinks[first + int(draw(random) * (g.net_offsets[net + 1] - first))]
            if s.devices[other] != s.devices[unit]:
                return int(s.devices[other])
    return int(draw(random) * g.num_devices)


@kernel
def _grow(g: LoadGraph, s: Loads, cluster: Ints, mark: NDArray[np.int64], step: int, most: int, random: Words) -> int:
    """Grow `cluster` from its first unit over nets within its device, up to `most` units; its size."""
    size, home = 1, s.devices[cluster[0]]
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
                if mark[other] != step and s.devices[other] == home and size < most and draw(random) < 0.8:
                    mark[other] = step
                    cluster[size] = other
                    size += 1
    return size


class PieceGraph(LoadGraph):
    """The same, and a workload's ops, in topological order, that move in these units.

    Attributes:
        work_ms: (2, N), on an accelerator and on a CPU.
        transfer_ms: (N,)
        source_offsets, sources, reader_offsets, readers: CSRs of the edges at each op.
        op_offsets, unit_ops: CSR of each unit's ops.
    """

    work_ms: FloatTable
    transfer_ms: Floats
    source_offsets: Ints
    sources: Ints
    reader_offsets: Ints
    readers: Ints
    op_offsets: Ints
    unit_ops: Ints


@kernel
def latency(g: PieceGraph, devices: Ints, piece: Ints, number: Ints) -> float:
    """As `finish_pieces`."""
    return finish_pieces(
        devices,
        g.num_accelerators,
        g.work_ms,
        g.transfer_ms,
        g.source_offsets,
        g.sources,
        g.reader_offsets,
        g.readers,
        piece,
        number,
    )


@kernel
def _swap(g: PieceGraph, unit_device: Ints, devices: Ints, held: Floats, cluster: Ints, goes: Ints, size: int) -> None:
    """Exchange the devices of the first `size` units of `cluster` with those in `goes`; twice undoes it."""
    for a in range(size):
        unit = cluster[a]
        old = unit_device[unit]
        held[old] -= g.size_bytes[unit]
        held[goes[a]] += g.size_bytes[unit]
        unit_device[unit], goes[a] = goes[a], old
        for b in range(g.op_offsets[unit], g.op_offsets[unit + 1]):
            devices[g.unit_ops[b]] = unit_device[unit]


@kernel
def anneal_latency(
    g: PieceGraph, unit_device: Ints, best: Ints, random: Words, steps: int, hot: float, cold: float
) -> float:
    """The least latency met in `steps` moves from `unit_device` (U,), which fits; `best` (U,) holds its placement.

    Moves are those of max-load: one unit, two that swap, a window of the topological order, a cluster that grows along
    edges within a device. One that does not fit in memory is dropped before it is scored, one that makes pieces wait
    for each other when it is; the rest is Metropolis' rule on the logarithm of the latency.
    """
    num_units, n = len(unit_device), len(g.op_unit)
    devices = unit_device[g.op_unit]
    piece, kept = np.ones(n, dtype=np.int32), np.ones(n, dtype=np.int32)
    depth = np.zeros(n, dtype=np.int32)
    number = np.full((g.num_accelerators + 1) * n, -1, dtype=np.int32)
    held = np.zeros(g.num_accelerators + 1)
    cluster, goes = np.empty(num_units, dtype=np.int32), np.empty(num_units, dtype=np.int32)
    mark = np.full(num_units, -1, dtype=np.int64)
    touched = np.zeros(g.num_accelerators + 1, dtype=np.bool_)
    for unit in range(num_units):
        held[unit_device[unit]] += g.size_bytes[unit]
    for device in range(g.num_accelerators):
        cut_device(devices, device, g.source_offsets, g.sources, depth, piece)
    current = latency(g, devices, piece, number)
    best[:] = unit_device
    best_ms = current
    temperature, ratio = hot, cold / hot
    widest = max(2, num_units // 3)
    for step in range(steps):
        if step % 64 == 0:
            temperature = hot * ratio ** (step / steps)
        unit = int(draw(random) * num_units)
        home = unit_device[unit]
        target = _pick_device_by_latency(g, unit_device, unit, random)
        if target == home:
            continue
        kind = draw(random)
        size = 1
        cluster[0], goes[0] = unit, target
        if kind < 0.12:
            other = int(draw(random) * num_units)
            if unit_device[other] == home:
                continue
            goes[0], goes[1] = unit_device[other], home
            cluster[1] = other
            size = 2
        elif kind < 0.4:
            length = 1 + int(widest ** draw(random))
            begin = g.place[unit] - int(draw(random) * length)
            size = 0
            for place in range(max(begin, 0), min(begin + length, num_units)):
                moved = g.order[place]
                if unit_device[moved] != target and (kind < 0.2 or unit_device[moved] == home):
                    cluster[size], goes[size] = moved, target
                    size += 1
        elif kind < 0.65:
            size = _grow_by_latency(g, unit_device, cluster, mark, step, 1 + int(widest ** draw(random)), random)
            goes[:size] = target
        elif kind < 0.7:
            size = _side(g, unit_device, cluster, unit, draw(random) < 0.5)
            goes[:size] = target
        if size == 0 or not np.all((goes[:size] == g.num_accelerators) | g.supported[cluster[:size]]):
            continue
        touched[:] = False
        touched[unit_device[cluster[:size]]] = True
        touched[goes[:size]] = True
        _swap(g, unit_device, devices, held, cluster, goes, size)
        if np.all(held[: g.num_accelerators] <= g.capacity_bytes):  # what does not fit need not be cut into pieces
            kept[:] = piece
            for device in range(g.num_accelerators):
                if touched[device]:
                    cut_device(devices, device, g.source_offsets, g.sources, depth, piece)
            after = latency(g, devices, piece, number)
            if after <= current or draw(random) < (current / after) ** (1.0 / temperature):
                current = after
                if current < best_ms * (1 - 1e-12):
                    best_ms = current
                    best[:] = unit_device
                continue
            piece[:] = kept
        _swap(g, unit_device, devices, held, cluster, goes, size)
    unit_device[:] = best
    return best_ms


@kernel
def _neighbour(g: PieceGraph, unit: int, random: Words) -> int:
    """A unit that an edge joins with `unit`, or the unit itself where the draw finds none."""
    first, last = g.op_offsets[unit], g.op_offsets[unit + 1]
    op = g.unit_ops[first + int(draw(random) * (last - first))]
    before = g.source_offsets[op + 1] - g.source_offsets[op]
    after = g.reader_offsets[op + 1] - g.reader_offsets[op]
    if before + after == 0:
        return unit
    a = int(draw(random) * (before + after))
    other = g.sources[g.source_offsets[op] + a] if a < before else g.readers[g.reader_offsets[op] + a - before]
    return int(g.op_unit[other])


@kernel
def _pick_device_by_latency(g: PieceGraph, unit_device: Ints, unit: int, random: Words) -> int:
    """A neighbour's device or, less often, any."""
    if draw(random) < 0.75:
        for _ in range(5):
            other = _neighbour(g, unit, random)
            if unit_device[other] != unit_device[unit]:
                return int(unit_device[other])
    return int(draw(random) * g.num_devices)


@kernel
def _grow_by_latency(
    g: PieceGraph, unit_device: Ints, cluster: Ints, mark: NDArray[np.int64], step: int, most: int, random: Words
) -> int:
    """Grow `cluster` from its first unit along edges within its device, up to `most` units; its size."""
    size, head, home = 1, 0, unit_device[cluster[0]]
    mark[cluster[0]] = step
    while head < size and size < most:
        unit = cluster[head]
        head += 1
        for b in range(g.op_offsets[unit], g.op_offsets[unit + 1]):
            op = g.unit_ops[b]
            for way in range(2):
                first = g.source_offsets[op] if way == 0 else g.reader_offsets[op]
                last = g.source_offsets[op + 1] if way == 0 else g.reader_offsets[op + 1]
                if last - first > 16:
                    continue
                for a in range(first, last):
                    other = g.op_unit[g.sources[a] if way == 0 else g.readers[a]]
                    is_new = mark[other] != step and unit_device[other] == home and size < most
                    if is_new and draw(random) < 0.85:
                        mark[other] = step
                        cluster[size] = other
                        size += 1
    return size


@kernel
def _side(g: PieceGraph, unit_device: Ints, cluster: Ints, unit: int, is_later: bool) -> int:
    """Fill `cluster` with the units of `unit`'s device before, or after, it in order, and itself; their number."""
    size = 0
    begin = g.place[unit] if is_later else 0
    end = len(unit_device) if is_later else g.place[unit] + 1
    for place in range(begin, end):
        other = g.order[place]
        if unit_device[other] == unit_device[unit]:
            cluster[size] = other
            size += 1
    return size


class Search(ABC):
    """One objective on one workload: scores placements of units, and anneals them.

    Attributes:
        hot, cold: temperatures that annealing begins and ends with, as a share of the value.
        units: ops that move together: colour classes, and ops without one.
        order: (U,) units in a topological order of the contracted graph.
        place: (U,) where each unit is in it.
    """

    hot: float
    cold: float

    def __init__(self, timer: PublishedTimer) -> None:
        record = timer.record
        self._timer = timer
        self.units = unit_graph(record, record.units)
        first = np.unique(self.units.op_unit, return_index=True)[1]
        # by the contracted unit of each unit's first op, then by that op
        self.order = np.lexsort((first, contract(record).units.op_unit[first])).astype(np.int32)
        self.place = np.argsort(self.order).astype(np.int32)

    def values_ms(self, devices: Ints) -> NDArray[np.float64]:
        """(B,) milliseconds of placements of units (B, U) or (U,); infinite where infeasible."""
        return self._timer.values_ms(self.units.expand(np.atleast_2d(devices)))

    def anneal(self, start: Ints, seed: int, steps: int, hot: float, cold: float) -> tuple[Ints, float]:
        """The best placement (U,) met in `steps` moves from `start`, which fits, and its value in milliseconds."""
        best = np.empty(self.units.num_units, dtype=np.int32)
        state = np.random.SeedSequence(seed).generate_state(1, dtype=np.uint64) | np.uint64(1)  # never 0
        return best, self._anneal(np.array(start, dtype=np.int32), best, state, steps, hot, cold)

    @abstractmethod
    def _anneal(self, devices: Ints, best: Ints, random: Words, steps: int, hot: float, cold: float) -> float:
        """Fills `best` (U,) with the best placement met from `devices` (U,); its value in milliseconds."""


class MaxLoadSearch(Search):
    """Max-load; see `anneal_loads`."""

    hot, cold = 0.02, 2e-5
    _DOUBLINGS = 5

    def __init__(self, record: DnnPartitioning) -> None:
        super().__init__(MaxLoad(record))
        self._graph = LoadGraph(**self.units.to_dict(), order=self.order, place=self.place)

    def _anneal(self, devices: Ints, best: Ints, random: Words, steps: int, hot: float, cold: float) -> float:
        width = self._graph.num_accelerators + 1
        counts = np.zeros((len(self.units.net_ms), width), dtype=np.int32)
        loads = Loads(devices, np.zeros(width), np.zeros(width), counts)
        return anneal_loads(self._graph, loads, best, random, steps, hot, cold, self._DOUBLINGS)


class PieceLatencySearch(Search):
    """Piece-latency; see `anneal_latency`.

    Raises:
        InvalidValue: the workload has backward nodes.
    """

    hot, cold = 0.02, 3e-4

    def __init__(self, record: DnnPartitioning) -> None:
        super().__init__(PieceLatency(record))
        reader_offsets, readers = record.graph.readers
        op_offsets, unit_ops = csr(self.units.num_units, self.units.op_unit, np.arange(record.num_ops))
        self._graph = PieceGraph(
            **self.units.to_dict(),
            order=self.order,
            place=self.place,
            work_ms=work_ms(record),
            transfer_ms=record.transfer_ms,
            source_offsets=record.graph.input_offsets,
            sources=record.graph.input_tensors,
            reader_offsets=reader_offsets,
            readers=readers,
            op_offsets=op_offsets,
            unit_ops=unit_ops,
        )

    def _anneal(self, devices: Ints, best: Ints, random: Words, steps: int, hot: float, cold: float) -> float:
        return anneal_latency(self._graph, devices, best, random, steps, hot, cold)


def make_search(record: DnnPartitioning, objective: str) -> Search:
    """The search for `objective`.

    Raises:
        UnknownName: no such objective.
        InvalidValue: piece-latency of a training step.
    """
    check_known("objective", objective, OBJECTIVES)
    return MaxLoadSearch(record) if objective == "max-load" else PieceLatencySearch(record)
