"""Kernels of the published objectives: the largest load, and the latency of atomic contiguous pieces.

`MaxLoad`: the throughput objective of the dnn-partitioning benchmark (Tarnawski et al. 2020, section 3).

`PieceLatency`: the latency objective of the dnn-partitioning benchmark (Tarnawski et al. 2020, section 4).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.graphs.formats.dnn_partitioning import DnnPartitioning
from rlplace.jit import Floats, Ints, Longs, kernel
from rlplace.partitioning.problem import PublishedTimer


@kernel
def max_loads(
    placements: Ints,
    num_accelerators: int,
    work_ms: Floats,
    transfer_ms: Floats,
    size_bytes: Floats,
    capacity_bytes: float,
    reader_offsets: Ints,
    readers: Ints,
    load_ms: Floats,
    seen: Longs,
    value_ms: Floats,
) -> None:
    """Fill `value_ms` (B,) for `placements` (B, N): the largest load, infinite where memory does not suffice.

    Args:
        placements: (B, N) devices; K is the pooled CPUs.
        num_accelerators: K.
        work_ms: (2, N), on an accelerator and on a CPU.
        transfer_ms: (N,)
        size_bytes: (N,)
        capacity_bytes: of an accelerator.
        reader_offsets: (N + 1,), CSR of the readers of each op.
        readers: (E,)
        load_ms: (K + 1,) scratch; the loads of the last placement on return.
        seen: (K + 1,) scratch.
        value_ms: (B,) to fill.
    """
    n = placements.shape[1]
    held = np.zeros(num_accelerators + 1)
    for b in range(placements.shape[0]):
        devices = placements[b]
        load_ms[:] = 0.0
        held[:] = 0.0
        seen[:] = -1
        for u in range(n):
            home = devices[u]
            load_ms[home] += work_ms[1, u] if home == num_accelerators else work_ms[0, u]
            held[home] += size_bytes[u]
            leaves = False
            for edge in range(reader_offsets[u], reader_offsets[u + 1]):
                device = devices[readers[edge]]
                if device == home:
                    continue
                leaves = True
                if device < num_accelerators and seen[device] != u:
                    seen[device] = u
                    load_ms[device] += transfer_ms[u]
            if leaves and home < num_accelerators:
                load_ms[home] += transfer_ms[u]
        most, fits = 0.0, True
        for device in range(num_accelerators + 1):
            most = max(most, load_ms[device])
            fits = fits and (device == num_accelerators or held[device] <= capacity_bytes)
        value_ms[b] = most if fits else np.inf


@kernel
def piece_latencies(
    placements: Ints,
    num_accelerators: int,
    work_ms: Floats,
    transfer_ms: Floats,
    size_bytes: Floats,
    capacity_bytes: float,
    source_offsets: Ints,
    sources: Ints,
    reader_offsets: Ints,
    readers: Ints,
    value_ms: Floats,
) -> None:
    """Fill `value_ms` (B,) for `placements` (B, N): the latest finish, infinite where memory does not suffice or the
    graph of pieces has a cycle.

    Ops are in topological order; arguments as in `max_loads`, and the CSR of the sources of each op.
    """
    n = placements.shape[1]
    part = np.empty(n, dtype=np.int32)
    depth = np.empty(n, dtype=np.int32)
    held = np.zeros(num_accelerators + 1)
    finish_ms = np.empty(n)
    for b in range(placements.shape[0]):
        devices = placements[b]
        held[:] = 0.0
        for u in range(n):
            held[devices[u]] += size_bytes[u]
        fits = True
        for device in range(num_accelerators):
            fits = fits and held[device] <= capacity_bytes
        if not fits:
            value_ms[b] = np.inf
            continue
        num_parts = find_pieces(devices, num_accelerators, source_offsets, sources, depth, part)
        value_ms[b] = finish_pieces(
            devices,
            num_accelerators,
            work_ms,
            transfer_ms,
            source_offsets,
            sources,
            reader_offsets,
            readers,
            part,
            num_parts,
            finish_ms,
        )


@kernel
def find_pieces(
    devices: Ints, num_accelerators: int, source_offsets: Ints, sources: Ints, depth: Ints, part: Ints
) -> int:
    """Fill `part` (N,), the piece of each op, a CPU op being one by itself; the number of pieces comes back.

    A member of a set S whose paths from outside re-enter S k times is in piece k + 1 of S.
    """
    n = len(devices)
    number = np.empty(n + 1, dtype=np.int32)
    num_parts = 0
    for device in range(num_accelerators):
        is_used = False
        for v in range(n):
            if devices[v] == device:
                is_used = True
                break
        if not is_used:
            continue
        number[:] = -1
        for v in range(n):
            inside = devices[v] == device
            deepest = 1 if inside else 0
            for edge in range(source_offsets[v], source_offsets[v + 1]):
                u = sources[edge]
                deepest = max(deepest, depth[u] + (1 if inside and devices[u] != device else 0))
            depth[v] = deepest
            if inside:
                if number[deepest] < 0:
                    number[deepest] = num_parts
                    num_parts += 1
                part[v] = number[deepest]
    for v in range(n):
        if devices[v] == num_accelerators:
            part[v] = num_parts
            num_parts += 1
    return num_parts


@kernel
def finish_pieces(
    devices: Ints,
    num_accelerators: int,
    work_ms: Floats,
    transfer_ms: Floats,
    source_offsets: Ints,
    sources: Ints,
    reader_offsets: Ints,
    readers: Ints,
    part: Ints,
    num_parts: int,
    finish_ms: Floats,
) -> float:
    """The latest finish of the pieces, infinite where they form a cycle; `finish_ms` (>= num_parts,) is filled."""
    n = len(devices)
    first = np.zeros(num_parts + 1, dtype=np.int32)
    for v in range(n):
        first[part[v] + 1] += 1
    for k in range(num_parts):
        first[k + 1] += first[k]
    member = np.empty(n, dtype=np.int32)
    fill = first[:num_parts].copy()
    waiting = np.zeros(num_parts, dtype=np.int32)
    for v in range(n):
        member[fill[part[v]]] = v
        fill[part[v]] += 1
        for edge in range(source_offsets[v], source_offsets[v + 1]):
            if part[sources[edge]] != part[v]:
                waiting[part[v]] += 1
    seen = np.full(n, -1, dtype=np.int32)
    queue = np.empty(num_parts, dtype=np.int32)
    head, tail = 0, 0
    for k in range(num_parts):
        if waiting[k] == 0:
            queue[tail] = k
            tail += 1
    latest = 0.0
    while head < tail:
        k = queue[head]
        head += 1
        on_cpu = devices[member[first[k]]] == num_accelerators
        start, takes = 0.0, 0.0
        for a in range(first[k], first[k + 1]):
            v = member[a]
            takes += work_ms[1, v] if on_cpu else work_ms[0, v]
            for edge in range(source_offsets[v], source_offsets[v + 1]):
                u = sources[edge]
                if part[u] != k:
                    start = max(start, finish_ms[part[u]])
                    if not on_cpu and seen[u] != k:
                        seen[u] = k
                        takes += transfer_ms[u]
            leaves = False
            for edge in range(reader_offsets[v], reader_offsets[v + 1]):
                other = part[readers[edge]]
                if other != k:
                    leaves = True
                    waiting[other] -= 1
                    if waiting[other] == 0:
                        queue[tail] = other
                        tail += 1
            if leaves and not on_cpu:
                takes += transfer_ms[v]
        finish_ms[k] = start + takes
        latest = max(latest, finish_ms[k])
    return latest if tail == num_parts else np.inf


class MaxLoad(PublishedTimer):
    """Scores placements by the largest load: of each accelerator its work and transfers, of the CPUs their work.

    An accelerator's load is the work of its ops, the transfer of each of its ops that someone elsewhere reads, and the
    transfer of each op elsewhere that it reads, once however many read it. The CPUs' pooled load is their work alone.
    A value is infinite where memory does not suffice.
    """

    def loads_ms(self, placement: NDArray[np.int32]) -> NDArray[np.float64]:
        """(D,) load of each device under one placement (N,), in milliseconds."""
        load_ms = np.empty(self.record.num_accelerators + 1)
        self._run(self.problem.check_placement(placement)[None], load_ms, np.empty(1))
        return load_ms[: self.record.num_devices]

    def _score(self, placements: NDArray[np.int32], values_ms: NDArray[np.float64]) -> None:
        self._run(placements, np.empty(self.record.num_accelerators + 1), values_ms)

    def _run(self, placements: NDArray[np.int32], load_ms: NDArray[np.float64], values: NDArray[np.float64]) -> None:
        record, count = self.record, self.record.num_accelerators
        reader_offsets, readers = record.graph.readers
        max_loads(
            placements,
            count,
            self._work_ms,
            record.transfer_ms,
            record.size_bytes,
            self._capacity,
            reader_offsets,
            readers,
            load_ms,
            np.empty(count + 1, dtype=np.int64),
            values,
        )


class PieceLatency(PublishedTimer):
    """Scores placements by the latest finish, accelerators running atomic contiguous pieces of their ops.

    A piece starts when all that it reads is there, and takes its transfers in, its work and its transfers out; all its
    ops finish with it. CPU ops run as soon as they can, without contention. A value is infinite where memory does not
    suffice or pieces wait for each other.

    Args:
        record: the workload, without backward nodes.
        memory_limit: whether a placement that does not fit an accelerator's memory has value infinity.

    Raises:
        InvalidValue: the workload is a training step, for which the objective is not defined.
    """

    def __init__(self, record: DnnPartitioning, *, memory_limit: bool = True) -> None:
        if record.is_training:
            raise InvalidValue(
                "objective",
                "piece-latency",
                "max-load: the workload has backward nodes, and latency is defined for inference only",
                where="workload",
            )
        super().__init__(record, memory_limit=memory_limit)

    def _score(self, placements: NDArray[np.int32], values_ms: NDArray[np.float64]) -> None:
        record, graph = self.record, self.record.graph
        reader_offsets, readers = graph.readers
        piece_latencies(
            placements,
            record.num_accelerators,
            self._work_ms,
            record.transfer_ms,
            record.size_bytes,
            self._capacity,
            graph.input_offsets,
            graph.input_tensors,
            reader_offsets,
            readers,
            values_ms,
        )
