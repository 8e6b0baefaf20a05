"""Priorities of ops: upward ranks, and the orders of micro-batches that are made of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.paths import longest_after
from rlplace.jit import Floats
from rlplace.measure.problem import Problem


def default_priorities(problem: Problem) -> NDArray[np.float64]:
    """(N,) float64, higher runs first: what `problem.op_order` says."""
    return upward_ranks(problem)


def upward_ranks(problem: Problem) -> NDArray[np.float64]:
    """(N,) float64 seconds: the longest remaining path from the start of each op to the end of the step.

    Ops count with their mean time over devices, tensors with their mean transfer time over ordered pairs of distinct
    devices (HEFT: Topcuoglu, Hariri, Wu 2002, equation 6). Source ops take no time.
    """
    graph, num_devices = problem.graph, problem.host.num_devices
    pairs = max(num_devices * (num_devices - 1), 1)
    latency_s = float(problem.transfer_latency_s.sum()) / pairs
    s_per_byte = float(problem.transfer_s_per_byte.sum()) / pairs
    transfer_s: Floats = latency_s + graph.tensor_bytes.astype(np.float64) * s_per_byte
    op_s: Floats = np.mean(problem.costs.op_time_s, axis=1, dtype=np.float64) * ~graph.is_source
    producers = graph.tensor_op[graph.input_tensors]
    return op_s + longest_after(op_s, graph.input_offsets, producers, transfer_s[graph.input_tensors])
