"""`GraphFeatures`: what a policy sees of a problem, computed once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.opgraph import PHASES, OpGraph
from rlplace.graphs.paths import longest_after, longest_before
from rlplace.measure.problem import Problem

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class GraphFeatures:
    """The graph of G groups, K edges between them, and D devices, as a policy sees it.

    Node and edge features have mean 0 and variance 1 over the graph (a constant feature is 0 everywhere).

    Attributes:
        node_features: (G, F) float32.
        edge_features: (K, 2) float32: bytes, and seconds of a mean transfer against the mean group's cost.
        edge_source, edge_target: (K,) int64, groups of each edge, by source, then target.
        group_cost: (G, D) float32, seconds of each group on each device, in mean group costs.
        allowed: (G, D) bool, devices where each group may be.
        names: F names.
    """

    node_features: NDArray[np.float32]
    edge_features: NDArray[np.float32]
    edge_source: NDArray[np.int64]
    edge_target: NDArray[np.int64]
    group_cost: NDArray[np.float32]
    allowed: NDArray[np.bool_]
    names: tuple[str, ...]

    @property
    def num_groups(self) -> int:
        return len(self.group_cost)

    @property
    def num_devices(self) -> int:
        return int(self.group_cost.shape[1])


def graph_features(problem: Problem) -> GraphFeatures:
    """The static features of a problem's group graph; nothing here depends on a placement."""
    graph, num_groups = problem.graph, problem.grouping.num_groups
    op_group = problem.grouping.op_group
    source, target, edge_bytes, edge_tensors = group_edges(problem)
    op_time_s = problem.costs.op_time_s
    cost_GD = np.stack([np.bincount(op_group, column, num_groups) for column in op_time_s.T], axis=1).astype(np.float64)
    mean_cost_s = float(cost_GD.mean()) or 1.0
    latency_s, s_per_byte = (_mean_route(table) for table in (problem.transfer_latency_s, problem.transfer_s_per_byte))
    edge_s = (edge_tensors * latency_s + edge_bytes * s_per_byte) / mean_cost_s

    def over_ops(weights: NDArray[np.generic]) -> FloatArray:
        return np.bincount(op_group, weights.astype(np.float64), num_groups).astype(np.float64)

    def over_edges(ends: NDArray[np.int64], weights: FloatArray) -> FloatArray:
        return np.bincount(ends, weights, num_groups).astype(np.float64)

    num_ops = np.bincount(op_group, minlength=num_groups)
    before_s, after_s = path_lengths(graph, op_time_s.mean(axis=1))
    position = np.arange(graph.num_ops) / max(graph.num_ops, 1)
    columns: dict[str, FloatArray] = {f"log_cost_{d}": _log(cost_GD[:, d]) for d in range(cost_GD.shape[1])}
    columns |= {
        "log_ops": _log(num_ops.astype(np.float64)),
        "is_source": over_ops(graph.is_source) / num_ops,
        "log_parameter_bytes": _log(over_ops(graph.parameter_bytes)),
        "log_output_bytes": _log(over_ops(graph.output_bytes)),
        "log_in_bytes": _log(over_edges(target, edge_bytes)),
        "log_out_bytes": _log(over_edges(source, edge_bytes)),
        "log_in_edges": np.log1p(over_edges(target, np.ones(len(target)))),
        "log_out_edges": np.log1p(over_edges(source, np.ones(len(source)))),
        "mean_position": over_ops(position) / num_ops,
        "first_position": extreme_over_ops(np.minimum, op_group, position, num_groups),
        "last_position": extreme_over_ops(np.maximum, op_group, position, num_groups),
        "path_before": extreme_over_ops(np.minimum, op_group, before_s, num_groups),
        "path_after": extreme_over_ops(np.maximum, op_group, after_s, num_groups),
        "criticality": extreme_over_ops(np.maximum, op_group, before_s + after_s, num_groups),
    }
    for index, phase in enumerate(PHASES):
        columns[f"is_{phase}"] = over_ops(graph.phases == index) / num_ops
    return GraphFeatures(
        node_features=_standardise(np.stack(list(columns.values()), axis=1)),
        edge_features=_standardise(np.stack([_log(edge_bytes), _log(edge_s)], axis=1)),
        edge_source=source,
        edge_target=target,
        group_cost=(cost_GD / mean_cost_s).astype(np.float32),
        allowed=problem.group_allowed,
        names=tuple(columns),
    )


def group_edges(problem: Problem) -> tuple[NDArray[np.int64], NDArray[np.int64], FloatArray, FloatArray]:
    """Source, target, bytes and number of tensors of each edge between groups; a tensor goes to a group once."""
    graph, num_groups = problem.graph, problem.grouping.num_groups
    op_group = problem.grouping.op_group.astype(np.int64)
    reads = np.unique(graph.input_tensors.astype(np.int64) * max(num_groups, 1) + op_group[graph.edge_op])
    tensor, reader = reads // max(num_groups, 1), reads % max(num_groups, 1)
    producer = op_group[graph.tensor_op[tensor]]
    outside = producer != reader
    pairs, inverse = np.unique(producer[outside] * num_groups + reader[outside], return_inverse=True)
    edge_bytes = np.bincount(inverse, graph.tensor_bytes[tensor[outside]], len(pairs)).astype(np.float64)
    edge_tensors = np.bincount(inverse, minlength=len(pairs)).astype(np.float64)
    return pairs // num_groups, pairs % num_groups, edge_bytes, edge_tensors


def path_lengths(graph: OpGraph, cost_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(N,) seconds of the longest path that ends before each op, and of the longest that starts with it."""
    producers = graph.tensor_op[graph.input_tensors]
    edges = graph.input_offsets, producers, np.zeros(len(producers))
    return longest_before(cost_s, *edges), cost_s + longest_after(cost_s, *edges)


def _mean_route(table_DD: FloatArray) -> float:
    """Mean over ordered pairs of different devices; 0 on a host of one device."""
    num_devices = len(table_DD)
    return float(table_DD.sum()) / (num_devices * (num_devices - 1)) if num_devices > 1 else 0.0


def extreme_over_ops(reduce: np.ufunc, op_group: NDArray[np.int32], values: FloatArray, num_groups: int) -> FloatArray:
    """(G,) least or largest of (N,) values of the ops of each group: `reduce` is `np.minimum` or `np.maximum`."""
    result = np.full(num_groups, np.inf if reduce is np.minimum else -np.inf)
    reduce.at(result, op_group, values)
    return result


def _log(values: FloatArray) -> FloatArray:
    """log(1 + value / mean), so that the unit does not matter."""
    if not values.size:
        return values
    logs: FloatArray = np.log1p(values / (float(values.mean()) or 1.0))
    return logs


def _standardise(values: FloatArray) -> NDArray[np.float32]:
    if not values.size:
        return values.astype(np.float32)
    spread = values.std(axis=0)
    scaled: FloatArray = (values - values.mean(axis=0)) / np.where(spread > 1e-12, spread, 1.0)
    return scaled.astype(np.float32)
