"""`describe_graph`: figures of a graph."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.graphs.opgraph import PHASES, OpGraph
from rlplace.graphs.paths import longest_before


@dataclass(frozen=True, slots=True)
class TargetTotal:
    """All ops of one target together."""

    target: str
    num_ops: int
    flops: float
    bytes_moved: float
    cost_s: float
    """Seconds at the given costs; 0 without costs."""
    share: float
    """Part of the cost of all ops; of all FLOPs without costs."""


@dataclass(frozen=True, slots=True)
class GraphStatistics:
    """Figures of one graph; sums are over all ops."""

    num_ops: int
    num_tensors: int
    num_edges: int
    num_micro_batches: int
    """Slices that the batch is cut into; 1 where it is not."""
    num_shared: int
    """Ops that all micro-batches share; all of them where the batch is not cut."""
    num_sources: int
    """Parameters, buffers, inputs and constants: ops that are there when the step starts."""
    phases: dict[str, int]
    """Ops of each phase, sources among them."""
    flops: float
    bytes_moved: float
    output_bytes: int
    """Bytes of the outputs of ops that are no sources."""
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    workspace_bytes: int
    """The largest of any op: it is held only while that op runs."""
    widest_level: int
    """Most ops at one depth (longest path from the sources, in ops): none of them depends on another, so that many can
    run at once. The widest antichain is at least as wide."""
    critical_path_ops: int
    """Ops on the longest path, sources aside."""
    colocation_classes: int
    top_targets: tuple[TargetTotal, ...]
    """Dearest first."""


def describe_graph(graph: OpGraph, cost_s: NDArray[np.float64] | None = None, *, top: int = 10) -> GraphStatistics:
    """The figures of `graph`.

    Args:
        graph: N ops.
        cost_s: (N,) float64, seconds of each op; without, targets are ranked by FLOPs.
        top: how many targets to list.

    Raises:
        InvalidValue: `cost_s` has another length.

    Example:
        >>> import torch
        >>> from rlplace.graphs import capture
        >>> describe_graph(capture(torch.nn.Linear(2, 1), torch.ones(3, 2))).critical_path_ops
        1
    """
    if cost_s is not None and cost_s.shape != (graph.num_ops,):
        raise InvalidValue("cost_s", cost_s.shape, f"shape {(graph.num_ops,)}", where="describe_graph")
    depth = op_depths(graph)
    runs = ~graph.is_source
    levels = np.bincount(depth[runs]) if np.any(runs) else np.zeros(1, dtype=np.int64)
    return GraphStatistics(
        num_ops=graph.num_ops,
        num_tensors=graph.num_tensors,
        num_edges=graph.num_edges,
        num_micro_batches=graph.num_micro_batches,
        num_shared=int(np.sum(graph.micro_batch < 0)),
        num_sources=int(graph.is_source.sum()),
        phases={phase: int(np.sum(graph.phases == code)) for code, phase in enumerate(PHASES)},
        flops=float(graph.flops.sum()),
        bytes_moved=float(graph.bytes_moved.sum()),
        output_bytes=int(graph.output_bytes[runs].sum()),
        parameter_bytes=int(graph.parameter_bytes.sum()),
        gradient_bytes=int(graph.gradient_bytes.sum()),
        state_bytes=int(graph.state_bytes.sum()),
        workspace_bytes=int(graph.workspace_bytes.max(initial=0)),
        widest_level=int(levels.max()),
        critical_path_ops=int(depth.max(initial=0)),
        colocation_classes=len(np.unique(graph.colocation[graph.colocation >= 0])),
        top_targets=_top_targets(graph, cost_s, top),
    )


def op_depths(graph: OpGraph) -> NDArray[np.int64]:
    """(N,) int64: ops on the longest path that ends with each op, itself among them; 0 for sources."""
    counts = (~graph.is_source).astype(np.float64)
    producers = graph.tensor_op[graph.input_tensors]
    return (longest_before(counts, graph.input_offsets, producers, np.zeros(len(producers))) + counts).astype(np.int64)


def _top_targets(graph: OpGraph, cost_s: NDArray[np.float64] | None, top: int) -> tuple[TargetTotal, ...]:
    ops: dict[str, list[int]] = defaultdict(list)
    for op in np.flatnonzero(~graph.is_source).tolist():
        ops[graph.targets[op]].append(op)
    weight, seconds = (graph.flops, np.zeros(graph.num_ops)) if cost_s is None else (cost_s, cost_s)
    total = float(weight[~graph.is_source].sum())
    rows = [
        TargetTotal(
            target=target,
            num_ops=len(members),
            flops=float(graph.flops[members].sum()),
            bytes_moved=float(graph.bytes_moved[members].sum()),
            cost_s=float(seconds[members].sum()),
            share=float(weight[members].sum()) / total if total > 0 else 0.0,
        )
        for target, members in ops.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.share, row.target))[:top])
