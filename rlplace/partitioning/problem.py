"""What the two published objectives share: the workload as a `Problem` with its own host, and how values are told."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
