"""Longest paths through the ops of a placement, every op and every transfer where it is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.paths import longest_after, longest_before
from rlplace.measure.problem import Problem


@dataclass(frozen=True, eq=False)
class PlacedPaths:
    """Of a placement's N ops, float64 seconds each.

    Attributes:
        op_s: (N,) each op where it is; 0 for sources.
        before_s: (N,) the longest path to its start.
        after_s: (N,) the longest path from its end.
    """

    op_s: NDArray[np.float64]
    before_s: NDArray[np.float64]
    after_s: NDArray[np.float64]


def placed_paths(problem: Problem, devices: NDArray[np.int32], *, transfers: bool = True) -> PlacedPaths:
    """The longest paths before and after each op.

    Args:
        problem: the ops.
        devices: (N,) where they are.
        transfers: whether what is read on another device counts its transfer.
    """
    graph = problem.graph
    op_s = np.where(graph.is_source, 0.0, problem.costs.op_time_s[np.arange(graph.num_ops), devices])
    producers = graph.tensor_op[graph.input_tensors]
    edge_s = np.zeros(len(producers))
    if transfers:
        pair = devices[producers], devices[graph.edge_op]
        bytes_s = graph.tensor_bytes[graph.input_tensors] * problem.transfer_s_per_byte[pair]
        edge_s = problem.transfer_latency_s[pair] + bytes_s
    edges = graph.input_offsets, producers, edge_s
    return PlacedPaths(op_s, longest_before(op_s, *edges), longest_after(op_s, *edges))
