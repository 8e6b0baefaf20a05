"""The published benchmark's workloads and its two objectives (Tarnawski et al. 2020, sections 3 and 4).

`published_problem`: a workload as a `Problem` with its own host.

`MaxLoad` (throughput): the largest load of a device. `PieceLatency`: the latest finish, accelerators running atomic
contiguous pieces.

`UnitGraph`: a workload as units that move together and nets that cost something when they are cut.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.graphs import Grouping
from rlplace.graphs.formats.published import TRANSFER_BYTES_PER_MS, DnnPartitioning
from rlplace.jit import Block, Bools, Floats, Ints, kernel
from rlplace.measure import Costs, Device, Host, Link, Problem, Route

OBJECTIVES = ("max-load", "piece-latency")
HOST_MEMORY_BYTES = 1 << 60
"""CPUs hold anything."""


def published_host(record: DnnPartitioning) -> Host:
    """The workload's own host: its accelerators, each with one link up and one down, and the pooled CPUs.

    Between accelerators a transfer goes through host memory: the source's link up and the destination's link down.
    """
    count = record.num_accelerators
    capacity = max(int(record.capacity_bytes), 1)
    devices = [Device(f"accelerator:{k}", "accelerator", "simulated", capacity) for k in range(count)]
    if record.num_cpus:
        devices.append(Device("cpu", f"{record.num_cpus} cpus", "simulated", HOST_MEMORY_BYTES))
    rate = TRANSFER_BYTES_PER_MS * 1e3
    links = [Link(f"{way}:{k}", rate) for k in range(count) for way in ("up", "down")]
    routes = (
        Route(source.name, destination.name, (f"up:{i}",) * (i < count) + (f"down:{j}",) * (j < count))
        for (i, source), (j, destination) in itertools.permutations(enumerate(devices), 2)
    )
    return Host("dnn-partitioning", tuple(devices), tuple(links), tuple(routes))


def published_problem(record: DnnPartitioning) -> Problem:
    """The workload as a `Problem`: costs as given, one group a colour class or op, accelerators where supported."""
    op_time_s = np.repeat(record.accelerator_ms[:, None] * 1e-3, record.num_devices, axis=1)
    op_time_s[:, record.num_accelerators :] = record.cpu_ms[:, None] * 1e-3
    return Problem(
        record.graph,
        published_host(record),
        Costs(op_time_s, "profiled"),
        Grouping(record.units, "published"),
        allowed=record.allowed,
    )


class PublishedTimer(ABC):
    """Scores placements of a workload by a published objective.

    Args:
        record: the workload.
        memory_limit: whether a placement that does not fit an accelerator's memory has value infinity.
    """

    def __init__(self, record: DnnPartitioning, *, memory_limit: bool = True) -> None:
        self.record = record
        self._capacity = record.capacity_bytes if memory_limit else np.inf
        self._work_ms = work_ms(record)
        self.problem = published_problem(record)

    def values_ms(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
        """(B,) milliseconds of placements (B, N) or (N,); infinite where memory does not suffice.

        Raises:
            InvalidValue: a device out of range, a class torn apart, or an op where it cannot run.
        """
        placements, count = np.atleast_2d(placements), self.record.num_accelerators
        values = []
        for devices in self.problem.check_placement(placements):
            held = np.bincount(devices, weights=self.record.size_bytes, minlength=count)
            fits = bool(np.all(held[:count] <= self._capacity))
            values.append(self._value_ms(devices) if fits else np.inf)
        return np.array(values, dtype=np.float64)

    @abstractmethod
    def _value_ms(self, devices: NDArray[np.int32]) -> float:
        """Milliseconds of a checked placement (N,) that fits."""


def work_ms(record: DnnPartitioning) -> NDArray[np.float64]:
    """(2, N) float64: time on an accelerator, and on a CPU."""
    return np.stack((record.accelerator_ms, record.cpu_ms))


class UnitGraph(Block):
    """U units and M nets; max-load of a placement of units is max-load of the placement of ops that it stands for.

    A net is one op's output: it costs `net_ms` on the source's accelerator when a sink is elsewhere, and on every other
    accelerator with a sink. Nets of one source with the same sinks are one net, with their costs added up; outputs
    without readers elsewhere, and free transfers, are no nets.

    Attributes:
        num_accelerators: K; device K is the pooled CPUs.
        num_devices: K, or K + 1 where there are CPUs.
        capacity_bytes: of an accelerator.
        op_unit: (N,) int32, the unit of each op.
        accelerator_ms, cpu_ms, size_bytes: (U,) float64, sums over the unit's ops.
        supported: (U,) bool, whether an accelerator can run all of them.
        net_ms: (M,) float64.
        net_source: (M,) int32.
        net_offsets, net_sinks: CSR (M + 1,), (S,) int32 of each net's sinks, ascending, without its source.
        unit_offsets, unit_nets: CSR (U + 1,), (S + M,) int32 of each unit's nets, whether it is their source or a sink.
    """

    num_accelerators: int
    num_devices: int
    capacity_bytes: float
    op_unit: Ints
    accelerator_ms: Floats
    cpu_ms: Floats
    size_bytes: Floats
    supported: Bools
    net_ms: Floats
    net_source: Ints
    net_offsets: Ints
    net_sinks: Ints
    unit_offsets: Ints
    unit_nets: Ints

    @property
    def num_units(self) -> int:
        return len(self.accelerator_ms)

    def expand(self, devices: Ints) -> Ints:
        """Devices of ops (..., N) from devices of units (..., U)."""
        return np.ascontiguousarray(np.asarray(devices, dtype=np.int32)[..., self.op_unit])


def csr(count: int, keys: NDArray[np.integer], values: NDArray[np.integer]) -> tuple[Ints, Ints]:
    """CSR (count + 1,), (E,) int32: the values of each key 0..count-1, ascending."""
    offsets = np.concatenate(([0], np.cumsum(np.bincount(keys, minlength=count))))
    return offsets.astype(np.int32), values[np.lexsort((values, keys))].astype(np.int32)


def unit_graph(record: DnnPartitioning, op_unit: Ints) -> UnitGraph:
    """The units that `op_unit` (N,), numbered 0..U-1 without gaps, makes of the workload's ops."""
    count = int(op_unit.max()) + 1
    supported = np.ones(count, dtype=np.bool_)
    np.logical_and.at(supported, op_unit, record.supported)
    offsets, readers = record.graph.readers
    costs: dict[tuple[int, ...], float] = {}
    for op in np.flatnonzero(record.transfer_ms > 0).tolist():
        source = int(op_unit[op])
        sinks = set(op_unit[readers[offsets[op] : offsets[op + 1]]].tolist()) - {source}
        if sinks:
            key = (source, *sorted(sinks))
            costs[key] = costs.get(key, 0.0) + float(record.transfer_ms[op])
    keys = sorted(costs)
    ends = np.array([(unit, net) for net, key in enumerate(keys) for unit in key], dtype=np.int32).reshape(-1, 2)
    unit_offsets, unit_nets = csr(count, *ends.T)
    return UnitGraph(
        num_accelerators=record.num_accelerators,
        num_devices=record.num_devices,
        capacity_bytes=record.capacity_bytes,
        op_unit=np.ascontiguousarray(op_unit, dtype=np.int32),
        accelerator_ms=np.bincount(op_unit, weights=record.accelerator_ms, minlength=count).astype(np.float64),
        cpu_ms=np.bincount(op_unit, weights=record.cpu_ms, minlength=count).astype(np.float64),
        size_bytes=np.bincount(op_unit, weights=record.size_bytes, minlength=count).astype(np.float64),
        supported=supported,
        net_ms=np.array([costs[key] for key in keys], dtype=np.float64),
        net_source=np.array([key[0] for key in keys], dtype=np.int32),
        net_offsets=np.cumsum([0, *(len(key) - 1 for key in keys)]).astype(np.int32),
        net_sinks=np.array([sink for key in keys for sink in key[1:]], dtype=np.int32),
        unit_offsets=unit_offsets,
        unit_nets=unit_nets,
    )


@kernel
def fill_loads(
    devices: Ints,
    num_accelerators: int,
    work_ms: Floats,
    transfer_ms: Floats,
    reader_offsets: Ints,
    readers: Ints,
    load_ms: Floats,
) -> None:
    """Adds to `load_ms` (K + 1,) the loads of `devices` (N,).

    Args:
        devices: (N,); K is the pooled CPUs.
        num_accelerators: K.
        work_ms: (2, N), on an accelerator and on a CPU.
        transfer_ms: (N,)
        reader_offsets: (N + 1,), CSR of the readers of each op.
        readers: (E,)
        load_ms: (K + 1,) zeros.
    """
    seen = np.full(num_accelerators + 1, -1)
    for u in range(len(devices)):
        home = devices[u]
        load_ms[home] += work_ms[1, u] if home == num_accelerators else work_ms[0, u]
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


@kernel
def cut_device(devices: Ints, device: int, source_offsets: Ints, sources: Ints, depth: Ints, piece: Ints) -> None:
    """Fill `piece` (N,) for the ops on `device`: which of its pieces each is in, from 1.

    An op of the device whose paths from outside enter the device k times again is in piece k + 1.
    """
    n = len(devices)
    first, last = n, -1
    for v in range(n):
        if devices[v] == device:
            first = min(first, v)
            last = v
    for v in range(first, last + 1):
        inside = devices[v] == device
        deepest = 1 if inside else 0
        for edge in range(source_offsets[v], source_offsets[v + 1]):
            u = sources[edge]
            if u >= first:
                deepest = max(deepest, depth[u] + (1 if inside and devices[u] != device else 0))
        depth[v] = deepest
        if inside:
            piece[v] = deepest


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
    piece: Ints,
    number: Ints,
) -> float:
    """The latest finish of ops cut into `piece`, infinite where pieces wait for each other.

    A CPU op is a piece by itself. `number` (K N + N,) is -1 throughout, and is left so.
    """
    n, num_parts = len(devices), 0
    part = np.empty(n, dtype=np.int32)
    for v in range(n):
        if devices[v] == num_accelerators:
            part[v] = num_parts
            num_parts += 1
            continue
        key = devices[v] * n + piece[v] - 1
        if number[key] < 0:
            number[key] = num_parts
            num_parts += 1
        part[v] = number[key]
    for v in range(n):
        if devices[v] != num_accelerators:
            number[devices[v] * n + piece[v] - 1] = -1
    finish_ms = np.empty(num_parts)
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

    def loads_ms(self, devices: NDArray[np.int32]) -> NDArray[np.float64]:
        """(K + 1,) load of each accelerator and of the CPUs under one placement (N,), in milliseconds."""
        record, load_ms = self.record, np.zeros(self.record.num_accelerators + 1)
        args = self._work_ms, record.transfer_ms, *record.graph.readers
        fill_loads(devices, record.num_accelerators, *args, load_ms)
        return load_ms

    def _value_ms(self, devices: NDArray[np.int32]) -> float:
        return float(self.loads_ms(devices).max())


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

    def _value_ms(self, devices: NDArray[np.int32]) -> float:
        record, graph, count = self.record, self.record.graph, self.record.num_accelerators
        depth, piece = np.zeros_like(devices), np.zeros_like(devices)
        sources = graph.input_offsets, graph.input_tensors
        for device in range(count):
            cut_device(devices, device, *sources, depth, piece)
        args = self._work_ms, record.transfer_ms, *sources, *graph.readers
        number = np.full((count + 1) * len(devices), -1, dtype=np.int32)
        return float(finish_pieces(devices, count, *args, piece, number))
