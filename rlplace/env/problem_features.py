"""`ProblemFeatures`: what a policy sees of a problem if it is to work on others too: no width depends on G or D."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlplace.env.features import extreme_over_ops, path_lengths
from rlplace.env.group_arrays import FloatArray, GroupArrays
from rlplace.env.op_kinds import OP_KINDS, op_kind
from rlplace.graphs.opgraph import PHASES
from rlplace.measure.problem import Problem

NUM_WAVES = 8
"""Octaves in which a group's place in the order is told: down to one group in 256."""
LARGEST = 20.0
"""Features end here, whatever is divided by next to nothing."""

NODE_FEATURES = (
    *("cost", "load_share", "spread", "num_ops", "source_share", "held", "held_share", "parameters", "outputs"),
    *("in_s", "out_s", "in_edges", "out_edges", "mean_place", "first_place", "last_place"),
    *("path_before", "path_after", "criticality", "shared", "micro_batch"),
    *(f"is_{phase}" for phase in PHASES),
    *(f"kind_{kind}" for kind in OP_KINDS),
    *(f"{wave}_{octave}" for octave in range(NUM_WAVES) for wave in ("sin", "cos")),
)
EDGE_FEATURES = ("seconds", "bytes", "tensors")
DEVICE_FEATURES = ("speed", "tightness", "out_s", "in_s", "is_gang", "shares_memory", "launch_share")
PAIR_FEATURES = ("cost", "relative_cost", "fullness", "is_allowed", "fits")
LINK_FEATURES = ("latency", "seconds", "hands_over", "occupies")
SUMMARY = (
    *("log_devices", "log_groups", "transfer_share", "parallelism", "tightness", "spread", "launch_share"),
    *("log_micro_batches", "mean_edges"),
)


@dataclass(frozen=True, eq=False)
class ProblemFeatures:
    """A problem of G groups, K edges between them, and D devices, in numbers without a unit.

    Times count in mean costs of a group or in shares of the whole, bytes in shares of memory, so that a step that takes
    ten times as long looks the same; what does not fit on a scale is log(1 + x). Nothing is standardised over the
    graph: that would hide what tells problems apart. Costs are the problem's, so a fitted host model's scales are seen.

    Permuting the devices of a host permutes `devices`, `pairs` and `links` and changes nothing else.

    Attributes:
        nodes: (G, F) float32, `NODE_FEATURES`.
        edges: (K, 3) float32, `EDGE_FEATURES`.
        edge_source, edge_target: (K,) int64, groups of each edge.
        devices: (D, 7) float32, `DEVICE_FEATURES`.
        pairs: (G, D, 5) float32, `PAIR_FEATURES` of each group on each device.
        links: (D, D, 4) float32, `LINK_FEATURES` of the route from the first to the second; 0 on the diagonal.
        summary: (9,) float32, `SUMMARY` of the whole problem.
        allowed: (G, D) bool, devices where each group may be.
        arrays: the same in SI units.
    """

    nodes: NDArray[np.float32]
    edges: NDArray[np.float32]
    edge_source: NDArray[np.int64]
    edge_target: NDArray[np.int64]
    devices: NDArray[np.float32]
    pairs: NDArray[np.float32]
    links: NDArray[np.float32]
    summary: NDArray[np.float32]
    allowed: NDArray[np.bool_]
    arrays: GroupArrays

    @property
    def num_groups(self) -> int:
        return len(self.nodes)

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    def twins(self) -> NDArray[np.int64]:
        """(D,) how many devices before each one look the same by themselves; 0 where all differ.

        Example:
            Of four equal GPUs and a CPU the twins are 0, 1, 2, 3 and 0.
        """
        seen: dict[bytes, int] = {}
        count = np.zeros(self.num_devices, dtype=np.int64)
        looks = np.rint(self.devices.astype(np.float64) * 1e4).astype(np.int64)
        for device, look in enumerate(looks):
            count[device] = seen.get(look.tobytes(), 0)
            seen[look.tobytes()] = int(count[device]) + 1
        return count


def problem_features(problem: Problem) -> ProblemFeatures:
    """The features of a problem; nothing here depends on a placement."""
    arrays = GroupArrays.of(problem)
    edge_s = arrays.edge_s()
    pairs = _pairs(arrays)
    return ProblemFeatures(
        nodes=_columns(NODE_FEATURES, _nodes(problem, arrays, edge_s)),
        edges=_columns(
            EDGE_FEATURES,
            {
                "seconds": np.log1p(edge_s / arrays.unit_s),
                "bytes": np.log1p(_over_mean(arrays.edge_bytes)),
                "tensors": np.log1p(arrays.edge_tensors),
            },
        ),
        edge_source=arrays.edge_source,
        edge_target=arrays.edge_target,
        devices=_columns(DEVICE_FEATURES, _devices(problem, arrays)),
        pairs=_columns(PAIR_FEATURES, pairs),
        links=_columns(LINK_FEATURES, _links(problem, arrays)),
        summary=_columns(SUMMARY, _summary(problem, arrays, edge_s)),
        allowed=arrays.allowed,
        arrays=arrays,
    )


def _nodes(problem: Problem, arrays: GroupArrays, edge_s: FloatArray) -> dict[str, FloatArray]:
    graph, op_group, num_groups = problem.graph, problem.grouping.op_group, arrays.num_groups
    cost_s = arrays.cost_s.mean(axis=1)
    op_s = problem.costs.op_time_s.mean(axis=1)

    def over_ops(weights: NDArray[np.generic]) -> FloatArray:
        return np.bincount(op_group, weights.astype(np.float64), num_groups).astype(np.float64)

    def over_edges(ends: NDArray[np.int64], weights: FloatArray) -> FloatArray:
        return np.bincount(ends, weights, num_groups).astype(np.float64)

    weight = op_s + 1e-9 * arrays.unit_s  # a group of ops that take no time is what most of them are
    total = over_ops(weight)
    num_ops = np.bincount(op_group, minlength=num_groups).astype(np.float64)
    before_s, after_s = path_lengths(graph, op_s)
    longest_s = float(after_s.max(initial=0.0)) or 1.0
    spot = np.empty(num_groups)
    spot[arrays.order] = (np.arange(num_groups) + 0.5) / max(num_groups, 1)
    position = np.arange(graph.num_ops) / max(graph.num_ops, 1)
    is_cut = graph.micro_batch >= 0
    ones = np.ones(len(edge_s))
    columns = {
        "cost": np.log1p(cost_s / arrays.unit_s),
        "load_share": cost_s / arrays.share_s,
        "spread": _ratio(arrays.cost_s.max(axis=1), arrays.cost_s.min(axis=1)),
        "num_ops": np.log1p(_over_mean(num_ops)),
        "source_share": over_ops(graph.is_source) / num_ops,
        "held": np.log1p(_over_mean(arrays.held_bytes)),
        "held_share": arrays.held_bytes / arrays.room_bytes.mean(),
        "parameters": np.log1p(_over_mean(over_ops(graph.parameter_bytes))),
        "outputs": np.log1p(_over_mean(over_ops(graph.output_bytes))),
        "in_s": np.log1p(over_edges(arrays.edge_target, edge_s) / arrays.unit_s),
        "out_s": np.log1p(over_edges(arrays.edge_source, edge_s) / arrays.unit_s),
        "in_edges": np.log1p(over_edges(arrays.edge_target, ones)),
        "out_edges": np.log1p(over_edges(arrays.edge_source, ones)),
        "mean_place": over_ops(position) / num_ops,
        "first_place": spot,
        "last_place": extreme_over_ops(np.maximum, op_group, position, num_groups),
        "path_before": extreme_over_ops(np.minimum, op_group, before_s, num_groups) / longest_s,
        "path_after": extreme_over_ops(np.maximum, op_group, after_s, num_groups) / longest_s,
        "criticality": extreme_over_ops(np.maximum, op_group, before_s + after_s, num_groups) / longest_s,
        "shared": over_ops(weight * ~is_cut) / total,
        "micro_batch": over_ops(weight * np.maximum(graph.micro_batch, 0)) / total / graph.num_micro_batches,
    }
    for index, phase in enumerate(PHASES):
        columns[f"is_{phase}"] = over_ops(weight * (graph.phases == index)) / total
    kinds = np.array([OP_KINDS.index(op_kind(target)) for target in graph.targets], dtype=np.int64)
    for index, kind in enumerate(OP_KINDS):
        columns[f"kind_{kind}"] = over_ops(weight * (kinds == index)) / total
    for octave in range(NUM_WAVES):  # as in Vaswani et al. 2017, section 3.5, over the whole order
        columns[f"sin_{octave}"] = np.sin(np.pi * 2**octave * spot)
        columns[f"cos_{octave}"] = np.cos(np.pi * 2**octave * spot)
    return columns


def _devices(problem: Problem, arrays: GroupArrays) -> dict[str, FloatArray]:
    devices = problem.host.devices
    all_s = arrays.cost_s.sum(axis=0)
    others = max(arrays.num_devices - 1, 1)
    trip_s = _trip_s(arrays)
    pools = [device.memory_pool for device in devices]
    return {
        "speed": _ratio(np.full(len(devices), all_s.mean()), all_s),
        "tightness": np.log1p(arrays.held_bytes.sum() / arrays.num_devices / arrays.room_bytes),
        "out_s": np.log1p(trip_s.sum(axis=1) / others / arrays.unit_s),
        "in_s": np.log1p(trip_s.sum(axis=0) / others / arrays.unit_s),
        "is_gang": np.array([bool(device.members) for device in devices], dtype=np.float64),
        "shares_memory": np.array([pool != "" and pools.count(pool) > 1 for pool in pools], dtype=np.float64),
        "launch_share": np.array([_launch_share(problem, arrays) * bool(device.dispatcher) for device in devices]),
    }


def _pairs(arrays: GroupArrays) -> dict[str, FloatArray]:
    full = arrays.held_bytes[:, None] / arrays.room_bytes[None, :]
    return {
        "cost": np.log1p(arrays.cost_s / arrays.unit_s),
        "relative_cost": _ratio(arrays.cost_s, np.broadcast_to(arrays.cost_s.mean(axis=1)[:, None], full.shape)),
        "fullness": full,
        "is_allowed": arrays.allowed.astype(np.float64),
        "fits": (full <= 1.0).astype(np.float64),
    }


def _links(problem: Problem, arrays: GroupArrays) -> dict[str, FloatArray]:
    index = problem.host.device_index
    hands_over = np.zeros((arrays.num_devices, arrays.num_devices))
    for route in problem.host.routes:
        hands_over[index[route.source], index[route.destination]] = not route.links
    return {
        "latency": np.log1p(arrays.latency_s / arrays.unit_s),
        "seconds": np.log1p(_trip_s(arrays) / arrays.unit_s),
        "hands_over": hands_over,
        "occupies": (arrays.occupies & ~np.eye(arrays.num_devices, dtype=np.bool_)).astype(np.float64),
    }


def _summary(problem: Problem, arrays: GroupArrays, edge_s: FloatArray) -> dict[str, float]:
    total_s = arrays.share_s * arrays.num_devices
    longest_s = float(path_lengths(problem.graph, problem.costs.op_time_s.mean(axis=1))[1].max(initial=0.0)) or 1.0
    all_s = arrays.cost_s.sum(axis=0)
    return {
        "log_devices": math.log2(arrays.num_devices),
        "log_groups": math.log2(max(arrays.num_groups, 1)),
        "transfer_share": math.log1p(float(edge_s.sum()) / total_s),
        "parallelism": math.log1p(total_s / longest_s),
        "tightness": math.log1p(float(arrays.held_bytes.sum()) / float(arrays.room_bytes.sum())),
        "spread": float(_ratio(all_s.max(keepdims=True), all_s.min(keepdims=True))[0]),
        "launch_share": _launch_share(problem, arrays),
        "log_micro_batches": math.log2(problem.graph.num_micro_batches),
        "mean_edges": math.log1p(len(edge_s) / max(arrays.num_groups, 1)),
    }


def _trip_s(arrays: GroupArrays) -> FloatArray:
    """(D, D) seconds of a mean edge's bytes over each route."""
    mean_bytes = float(arrays.edge_bytes.mean()) if len(arrays.edge_bytes) else 0.0
    return arrays.latency_s + mean_bytes * arrays.s_per_byte


def _launch_share(problem: Problem, arrays: GroupArrays) -> float:
    """Seconds that launching takes one dispatcher, over the mean cost of the step, as log(1 + x)."""
    num_launched = int((~problem.graph.is_source).sum())
    return math.log1p(problem.host.dispatch_s * num_launched / (arrays.share_s * arrays.num_devices))


def _ratio(values: FloatArray, reference: FloatArray) -> FloatArray:
    """log(value / reference), 0 where either is 0."""
    is_known = (values > 0) & (reference > 0)
    return np.where(is_known, np.log(np.where(is_known, values, 1.0) / np.where(is_known, reference, 1.0)), 0.0)


def _over_mean(values: FloatArray) -> FloatArray:
    return values / (float(values.mean()) or 1.0) if values.size else values


def _columns(names: tuple[str, ...], columns: Mapping[str, ArrayLike]) -> NDArray[np.float32]:
    stacked = np.stack([np.asarray(columns[name], dtype=np.float64) for name in names], axis=-1)
    return np.clip(stacked, -LARGEST, LARGEST).astype(np.float32)
