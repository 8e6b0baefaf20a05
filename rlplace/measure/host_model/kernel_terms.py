"""What critical paths are made of: seconds, bytes and latencies, summed up by the factors that they depend on."""

from __future__ import annotations

from typing import NamedTuple

from rlplace.jit import Floats, Ints, Longs, kernel
from rlplace.measure.simulate.plan_batch import PlanBatch


class TermLayout(NamedTuple):
    """Where each item of a path is counted.

    Attributes:
        num_ops: N.
        op_term: (N, D) int32, the term of an op's seconds.
        op_s: (N, D) its seconds.
        overhead_term: counts ops; -1 for nowhere.
        tensor_op: (T,) int32, the producer of a tensor.
        tensor_bytes: (T,) int64.
        latency_term: (D, D) int32, counts latencies of a route; -1 where nothing is copied.
        bytes_term: (D, D) int32, counts bytes that are copied over it.
    """

    num_ops: int
    op_term: Ints
    op_s: Floats
    overhead_term: int
    tensor_op: Ints
    tensor_bytes: Longs
    latency_term: Ints
    bytes_term: Ints


@kernel
def add_terms(layout: TermLayout, batch: PlanBatch, items: Ints, offsets: Longs, terms: Floats) -> None:
    """Adds up the paths `items` (CSR by `offsets`) of the plans of `batch` into `terms` (B, Q)."""
    n = layout.num_ops
    for b in range(len(offsets) - 1):
        devices, row = batch.devices[b], terms[b]
        for a in range(offsets[b], offsets[b + 1]):
            item = items[a]
            if item < n:
                d = devices[item]
                row[layout.op_term[item, d]] += layout.op_s[item, d]
                if layout.overhead_term >= 0:
                    row[layout.overhead_term] += 1.0
            else:
                k = batch.transfer_offsets[b] + item - n
                t, destination = batch.transfer_tensor[k], batch.transfer_destination[k]
                source = devices[layout.tensor_op[t]]
                if layout.latency_term[source, destination] >= 0:
                    row[layout.latency_term[source, destination]] += 1.0
                    row[layout.bytes_term[source, destination]] += layout.tensor_bytes[t]
