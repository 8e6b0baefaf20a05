"""`MaxLoad`: the throughput objective of the dnn-partitioning benchmark (Tarnawski et al. 2020, section 3)."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.formats.dnn_partitioning import DnnPartitioning
from rlplace.measure.kernel_published import max_loads
from rlplace.measure.problem import Problem
from rlplace.measure.published import published_problem, work_ms


class MaxLoad:
    """Scores placements by the largest load: of each accelerator its work and transfers, of the CPUs their work.

    An accelerator's load is the work of its ops, the transfer of each of its ops that someone elsewhere reads, and the
    transfer of each op elsewhere that it reads, once however many read it. The CPUs' pooled load is their work alone.

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
        """(B,) seconds for placements (B, N); infinite where memory does not suffice.

        Raises:
            InvalidValue: a device out of range, a class torn apart, or an op where it cannot run.
        """
        return self.values_ms(placements) * 1e-3

    def values_ms(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
        """(B,) milliseconds; see `step_times`."""
        placements = self.problem.check_placement(np.atleast_2d(placements))
        values = np.empty(len(placements))
        self._run(placements, np.empty(self.record.num_accelerators + 1), values)
        return values

    def loads_ms(self, placement: NDArray[np.int32]) -> NDArray[np.float64]:
        """(D,) load of each device under one placement (N,), in milliseconds."""
        load_ms = np.empty(self.record.num_accelerators + 1)
        self._run(self.problem.check_placement(placement)[None], load_ms, np.empty(1))
        return load_ms[: self.record.num_devices]

    def _run(self, placements: NDArray[np.int32], load_ms: NDArray[np.float64], values: NDArray[np.float64]) -> None:
        record, count = self.record, self.record.num_accelerators
        reader_offsets, readers = record.graph.readers
        max_loads(
            placements, count, self._work_ms, record.transfer_ms, record.size_bytes, self._capacity, reader_offsets,
            readers, load_ms, np.empty(count + 1, dtype=np.int64), values,
        )  # fmt: skip
