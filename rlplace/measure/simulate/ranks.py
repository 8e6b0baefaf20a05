"""Priorities of ops: upward ranks, and the orders of micro-batches that are made of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.opgraph import FORWARD
from rlplace.graphs.paths import longest_after, ready_order
from rlplace.jit import Floats
from rlplace.measure.problem import Problem


def default_priorities(problem: Problem) -> NDArray[np.float64]:
    """(N,) float64, higher runs first: what `problem.op_order` says; upward ranks where nothing is cut."""
    rank = upward_ranks(problem)
    if problem.op_order == "rank" or problem.graph.num_micro_batches == 1:
        return rank
    return np.asarray(rank + turns(problem) * rank.max(initial=0.0))


def turns(problem: Problem) -> NDArray[np.float64]:
    """(N,) float64: how much earlier than its rank each op comes by `problem.op_order`, in multiples of the largest.

    `tilt` is -k/K for micro-batch k of K and 0 for shared ops, so that micro-batches follow each other through a
    pipeline; equal ranks run them in lock-step. With `backward-first` shared ops come first, then backward ops, then
    forward ones, each micro-batch before the next. Nothing where the step is not cut.
    """
    graph, count = problem.graph, problem.graph.num_micro_batches
    if problem.op_order == "rank" or count == 1:
        return np.zeros(graph.num_ops)
    micro_batch = graph.micro_batch.astype(np.float64)
    if problem.op_order == "tilt":
        return np.where(micro_batch >= 0, -micro_batch / count, 0.0)
    earlier = np.where(graph.phases == FORWARD, 0.0, count) + count - 1.0 - micro_batch
    return np.where(micro_batch >= 0, earlier, 2.0 * count)


def list_order(problem: Problem) -> NDArray[np.int64]:
    """(N,) int64: ops by `default_priorities`, ties by index, each after what it reads."""
    graph = problem.graph
    offsets, readers = graph.readers
    starts = offsets[graph.output_offsets]
    return np.asarray(ready_order(default_priorities(problem), np.diff(graph.input_offsets), starts, readers))


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
