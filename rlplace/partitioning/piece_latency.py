"""`PieceLatency`: the latency objective of the dnn-partitioning benchmark (Tarnawski et al. 2020, section 4)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.graphs.formats.dnn_partitioning import DnnPartitioning
from rlplace.partitioning.kernel_objectives import piece_latencies
from rlplace.partitioning.problem import PublishedTimer


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
