"""Annealing of piece-latency over units; a move re-cuts only the devices that it touches."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.jit import Floats, Ints, kernel
from rlplace.partitioning.kernel_anneal_load import draw
from rlplace.partitioning.objectives import finish_pieces

Words = NDArray[np.uint64]


class PieceGraph(NamedTuple):
    """A workload's ops, in topological order, and the units that they move in.

    Attributes:
        num_accelerators: K; device K is the CPUs.
        num_devices: K, or K + 1 where there are CPUs.
        capacity_bytes: of an accelerator.
        work_ms: (2, N), on an accelerator and on a CPU.
        transfer_ms: (N,)
        source_offsets, sources, reader_offsets, readers: CSRs of the edges at each op.
        op_unit: (N,)
        unit_offsets, unit_ops: CSR of each unit's ops.
        unit_bytes: (U,)
        supported: (U,)
        order, place: (U,) units in a topological order, and where each is in it.
    """

    num_accelerators: int
    num_devices: int
    capacity_bytes: float
    work_ms: Floats
    transfer_ms: Floats
    source_offsets: Ints
    sources: Ints
    reader_offsets: Ints
    readers: Ints
    op_unit: Ints
    unit_offsets: Ints
    unit_ops: Ints
    unit_bytes: Floats
    supported: NDArray[np.bool_]
    order: Ints
    place: Ints


@kernel
def cut_device(g: PieceGraph, devices: Ints, device: int, depth: Ints, piece: Ints) -> None:
    """Fill `piece` (N,) for the ops on `device`: which of its pieces each is in, from 1."""
    n = len(devices)
    first, last = n, -1
    for v in range(n):
        if devices[v] == device:
            first = min(first, v)
            last = v
    for v in range(first, last + 1):
        inside = devices[v] == device
        deepest = 1 if inside else 0
        for edge in range(g.source_offsets[v], g.source_offsets[v + 1]):
            u = g.sources[edge]
            if u >= first:
                deepest = max(deepest, depth[u] + (1 if inside and devices[u] != device else 0))
        depth[v] = deepest
        if inside:
            piece[v] = deepest


@kernel
def latency(g: PieceGraph, devices: Ints, piece: Ints, number: Ints, part: Ints, finish_ms: Floats) -> float:
    """The latest finish, for ops cut into `piece`; infinite where pieces wait for each other.

    `number` (K N + N,) is -1 throughout, and is left so.
    """
    n, num_parts = len(devices), 0
    for v in range(n):
        if devices[v] == g.num_accelerators:
            part[v] = num_parts
            num_parts += 1
            continue
        key = devices[v] * n + piece[v] - 1
        if number[key] < 0:
            number[key] = num_parts
            num_parts += 1
        part[v] = number[key]
    for v in range(n):
        if devices[v] != g.num_accelerators:
            number[devices[v] * n + piece[v] - 1] = -1
    return finish_pieces(
        devices,
        g.num_accelerators,
        g.work_ms,
        g.transfer_ms,
        g.source_offsets,
        g.sources,
        g.reader_offsets,
        g.readers,
        part,
        num_parts,
        finish_ms,
    )


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
    devices = np.empty(n, dtype=np.int32)
    piece, kept = np.ones(n, dtype=np.int32), np.ones(n, dtype=np.int32)
    depth, part = np.zeros(n, dtype=np.int32), np.zeros(n, dtype=np.int32)
    number = np.full((g.num_accelerators + 1) * n, -1, dtype=np.int32)
    finish_ms = np.empty(n)
    held = np.zeros(g.num_accelerators + 1)
    cluster, goes = np.empty(num_units, dtype=np.int32), np.empty(num_units, dtype=np.int32)
    mark = np.full(num_units, -1, dtype=np.int64)
    touched = np.zeros(g.num_accelerators + 1, dtype=np.bool_)
    for v in range(n):
        devices[v] = unit_device[g.op_unit[v]]
    for unit in range(num_units):
        held[unit_device[unit]] += g.unit_bytes[unit]
    for device in range(g.num_accelerators):
        cut_device(g, devices, device, depth, piece)
    current = latency(g, devices, piece, number, part, finish_ms)
    best[:] = unit_device
    best_ms = current
    temperature, ratio = hot, cold / hot
    widest = max(2, num_units // 3)
    for step in range(steps):
        if step % 64 == 0:
            temperature = hot * ratio ** (step / steps)
        unit = int(draw(random) * num_units)
        home = unit_device[unit]
        target = _pick_device(g, unit_device, unit, random)
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
            size = _grow(g, unit_device, cluster, mark, step, 1 + int(widest ** draw(random)), random)
            goes[:size] = target
        elif kind < 0.7:
            size = _side(g, unit_device, cluster, unit, draw(random) < 0.5)
            goes[:size] = target
        is_possible = True
        for a in range(size):
            is_possible = is_possible and (goes[a] == g.num_accelerators or g.supported[cluster[a]])
        if not is_possible or size == 0:
            continue
        touched[:] = False
        for a in range(size):
            moved = cluster[a]
            old = unit_device[moved]
            held[old] -= g.unit_bytes[moved]
            held[goes[a]] += g.unit_bytes[moved]
            touched[old] = True
            touched[goes[a]] = True
            unit_device[moved], goes[a] = goes[a], old
        fits = True
        for device in range(g.num_accelerators):
            fits = fits and held[device] <= g.capacity_bytes
        after = np.inf
        if fits:
            for a in range(size):
                for b in range(g.unit_offsets[cluster[a]], g.unit_offsets[cluster[a] + 1]):
                    devices[g.unit_ops[b]] = unit_device[cluster[a]]
            kept[:] = piece
            for device in range(g.num_accelerators):
                if touched[device]:
                    cut_device(g, devices, device, depth, piece)
            after = latency(g, devices, piece, number, part, finish_ms)
            if after <= current or draw(random) < (current / after) ** (1.0 / temperature):
                current = after
                if current < best_ms * (1 - 1e-12):
                    best_ms = current
                    best[:] = unit_device
                continue
            piece[:] = kept
        for a in range(size):
            moved = cluster[a]
            held[unit_device[moved]] -= g.unit_bytes[moved]
            held[goes[a]] += g.unit_bytes[moved]
            unit_device[moved] = goes[a]
            if fits:
                for b in range(g.unit_offsets[moved], g.unit_offsets[moved + 1]):
                    devices[g.unit_ops[b]] = goes[a]
    unit_device[:] = best
    return best_ms


@kernel
def _neighbour(g: PieceGraph, unit: int, random: Words) -> int:
    """A unit that an edge joins with `unit`, or the unit itself where the draw finds none."""
    first, last = g.unit_offsets[unit], g.unit_offsets[unit + 1]
    op = g.unit_ops[first + int(draw(random) * (last - first))]
    before = g.source_offsets[op + 1] - g.source_offsets[op]
    after = g.reader_offsets[op + 1] - g.reader_offsets[op]
    if before + after == 0:
        return unit
    a = int(draw(random) * (before + after))
    other = g.sources[g.source_offsets[op] + a] if a < before else g.readers[g.reader_offsets[op] + a - before]
    return int(g.op_unit[other])


@kernel
def _pick_device(g: PieceGraph, unit_device: Ints, unit: int, random: Words) -> int:
    """A neighbour's device or, less often, any."""
    if draw(random) < 0.75:
        for _ in range(5):
            other = _neighbour(g, unit, random)
            if unit_device[other] != unit_device[unit]:
                return int(unit_device[other])
    return int(draw(random) * g.num_devices)


@kernel
def _grow(
    g: PieceGraph, unit_device: Ints, cluster: Ints, mark: NDArray[np.int64], step: int, most: int, random: Words
) -> int:
    """Grow `cluster` from its first unit along edges within its device, up to `most` units; its size."""
    size, head, home = 1, 0, unit_device[cluster[0]]
    mark[cluster[0]] = step
    while head < size and size < most:
        unit = cluster[head]
        head += 1
        for b in range(g.unit_offsets[unit], g.unit_offsets[unit + 1]):
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
