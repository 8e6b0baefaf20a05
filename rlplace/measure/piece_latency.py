"""`PieceLatency`: the latency objective of the dnn-partitioning benchmark (Tarnawski et al. 2020, section 4)."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.graphs.formats.dnn_partitioning import DnnPartitioning
from rlplace.measure.kernel_published import piece_latencies
from rlplace.measure.problem import Problem
from rlplace.measure.published import published_problem, work_ms


class PieceLatency:
    """Scores placements by the latest finish, accelerators running atomic contiguous pieces of their ops.

    A piece starts when all that it reads is there, and takes its transfers in, its work and its transfers out; all its
    ops finish with it. CPU ops run as soon as they can, without contention.

    Args:
        record: the workload, without backward nodes.
        memory_limit: whether a placement that does not fit an accelerator's memory has value infinity.

    Raises:
        InvalidValue: the workload is a training step, for which the objective is not defined.
    """

    def __init__(self, record: DnnPartitioning, *, memory_limit: bool = True) -> None:
        if record.is_training:
            raise InvalidValue(
                "objective", "piece-latency", "max-load: the workload has backward nodes, and latency is defined for "
                "inference only", where="workload")  # fmt: skip
        self.record = record
        self._capacity = record.capacity_bytes if memory_limit else np.inf
        self._work_ms = work_ms(record)

    @cached_property
    def problem(self) -> Problem:
        """The workload as a `Problem`."""
        return published_problem(self.record)

    def step_times(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
        """(B,) seconds for placements (B, N); infinite where memory does not suffice or pieces wait for each other.

        Raises:
            InvalidValue: a device out of range, a class torn apart, or an op where it cannot run.
        """
        return self.values_ms(placements) * 1e-3

    def values_ms(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
        """(B,) milliseconds; see `step_times`."""
        placements = self.problem.check_placement(np.atleast_2d(placements))
        record, values = self.record, np.empty(len(placements))
        graph = record.graph
        reader_offsets, readers = graph.readers
        piece_latencies(
            placements, record.num_accelerators, self._work_ms, record.transfer_ms, record.size_bytes, self._capacity,
            graph.input_offsets, graph.input_tensors, reader_offsets, readers, values,
        )  # fmt: skip
        return values
