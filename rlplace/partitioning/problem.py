"""What the two published objectives share: the workload as a `Problem` with its own host, and how values are told.

`UnitGraph`: a published workload as units that move together and nets that pay when they are cut.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.formats.dnn_partitioning import TRANSFER_BYTES_PER_MS, DnnPartitioning
from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.problem import Problem

HOST_MEMORY_BYTES = 1 << 60
"""CPUs hold anything."""


def published_host(record: DnnPartitioning) -> Host:
    """The workload's own host: its accelerators, each with one link up and one down, and the pooled CPUs.

    Between accelerators a transfer goes through host memory: the source's link up and the destination's link down.
    """
    count = record.num_accelerators
    accelerators = [f"accelerator:{k}" for k in range(count)]
    capacity = max(int(record.capacity_bytes), 1)
    devices = [Device(name, "accelerator", "simulated", capacity) for name in accelerators]
    if record.num_cpus:
        devices.append(Device("cpu", f"{record.num_cpus} cpus", "simulated", HOST_MEMORY_BYTES))
    rate = TRANSFER_BYTES_PER_MS * 1e3
    links = [Link(f"{way}:{k}", rate) for k in range(count) for way in ("up", "down")]
    routes = []
    for i, source in enumerate(devices):
        for j, destination in enumerate(devices):
            if i != j:
                hops = (f"up:{i}",) * (i < count) + (f"down:{j}",) * (j < count)
                routes.append(Route(source.name, destination.name, hops))
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
    """Scores placements of a workload by a published objective; a `StepTimer`.

    Args:
        record: the workload.
        memory_limit: whether a placement that does not fit an accelerator's memory has value infinity.
    """

    def __init__(self, record: DnnPartitioning, *, memory_limit: bool = True) -> None:
        self.record = record
        self._capacity = record.capacity_bytes if memory_limit else np.inf
        self._work_ms = work_ms(record)

    @cached_property
    def problem(self) -> Problem:
        """The workload as a `Problem`."""
        return published_problem(self.record)

    def step_times(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
        """(B,) seconds for placements (B, N); infinite where one is not feasible.

        Raises:
            InvalidValue: a device out of range, a class torn apart, or an op where it cannot run.
        """
        return self.values_ms(placements) * 1e-3

    def values_ms(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
        """(B,) milliseconds; see `step_times`."""
        placements = self.problem.check_placement(np.atleast_2d(placements))
        values = np.empty(len(placements))
        self._score(placements, values)
        return values

    @abstractmethod
    def _score(self, placements: NDArray[np.int32], values_ms: NDArray[np.float64]) -> None:
        """Fills `values_ms` (B,) for checked placements (B, N)."""


def work_ms(record: DnnPartitioning) -> NDArray[np.float64]:
    """(2, N) float64: time on an accelerator, and on a CPU."""
    return np.stack((record.accelerator_ms, record.cpu_ms))


Ints = NDArray[np.int32]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class UnitGraph:
    """U units and M nets; max-load of a placement of units is max-load of the placement of ops that it stands for.

    A net is one op's output: it costs `net_ms` on the source's accelerator when a sink is elsewhere, and on every other
    accelerator with a sink. Nets of one source with the same sinks are one net, with their costs added up; outputs
    that nobody else reads, or that move in no time, are no nets.

    Attributes:
        record: the workload.
        op_unit: (N,) int32, the unit of each op.
        accelerator_ms, cpu_ms, size_bytes: (U,) float64, sums over the unit's ops.
        supported: (U,) bool, whether an accelerator can run all of them.
        net_ms: (M,) float64.
        net_source: (M,) int32.
        net_offsets, net_sinks: CSR (M + 1,), (S,) int32 of each net's sinks, ascending, without its source.
    """

    record: DnnPartitioning
    op_unit: Ints
    accelerator_ms: Floats
    cpu_ms: Floats
    size_bytes: Floats
    supported: NDArray[np.bool_]
    net_ms: Floats
    net_source: Ints
    net_offsets: Ints
    net_sinks: Ints

    @property
    def num_units(self) -> int:
        return len(self.accelerator_ms)

    @cached_property
    def unit_nets(self) -> tuple[Ints, Ints]:
        """CSR (U + 1,), (S + M,): the nets of each unit, whether it is their source or a sink."""
        sinks_net = np.repeat(np.arange(len(self.net_ms)), np.diff(self.net_offsets))
        unit = np.concatenate((self.net_source, self.net_sinks))
        net = np.concatenate((np.arange(len(self.net_ms)), sinks_net))
        order = np.lexsort((net, unit))
        counts = np.bincount(unit, minlength=self.num_units)
        return np.concatenate(([0], np.cumsum(counts))).astype(np.int32), net[order].astype(np.int32)

    def expand(self, devices: Ints) -> Ints:
        """Devices of ops (..., N) from devices of units (..., U)."""
        return np.ascontiguousarray(np.asarray(devices, dtype=np.int32)[..., self.op_unit])

    def shrink(self, placement: Ints) -> Ints:
        """Devices of units (U,) from devices of ops (N,), each unit where its first op is."""
        devices = np.empty(self.num_units, dtype=np.int32)
        devices[self.op_unit[::-1]] = np.asarray(placement, dtype=np.int32)[::-1]
        return devices


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
    return UnitGraph(
        record=record,
        op_unit=np.ascontiguousarray(op_unit, dtype=np.int32),
        accelerator_ms=np.bincount(op_unit, weights=record.accelerator_ms, minlength=count).astype(np.float64),
        cpu_ms=np.bincount(op_unit, weights=record.cpu_ms, minlength=count).astype(np.float64),
        size_bytes=np.bincount(op_unit, weights=record.size_bytes, minlength=count).astype(np.float64),
        supported=supported,
        net_ms=np.array([costs[key] for key in keys], dtype=np.float64),
        net_source=np.array([key[0] for key in keys], dtype=np.int32),
        net_offsets=np.cumsum([0, *(len(key) - 1 for key in keys)]).astype(np.int32),
        net_sinks=np.array([sink for key in keys for sink in key[1:]], dtype=np.int32),
    )
