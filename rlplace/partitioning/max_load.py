"""`MaxLoad`: the throughput objective of the dnn-partitioning benchmark (Tarnawski et al. 2020, section 3)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.partitioning.kernel_objectives import max_loads
from rlplace.partitioning.problem import PublishedTimer


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
