"""The features of a problem that policies see.

`ProblemFeatures` suit any problem: no width depends on G or D. `GraphFeatures` are of one problem, standardised.
`GroupArrays` is a problem in terms of its groups, in SI units. `GraphObservation` is the observation of one-shot envs.
`op_kind` is the kind of an op, in a small vocabulary that does not change with PyTorch's names for its ops.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike, NDArray

from rlplace.errors import check_known
from rlplace.graphs import PHASES, OpGraph
from rlplace.graphs.opgraph import RESIDENT_TARGETS, SOURCE_TARGETS
from rlplace.graphs.paths import longest_after, longest_before
from rlplace.measure import Problem
from rlplace.measure.simulate.compiled_problem import list_order, mean_route
from rlplace.search.groupings import edges_between_groups, group_time_s, held_bytes, joined_groups, room_bytes
from rlplace.search.schedule.list_schedule import busy_devices

OP_KINDS = (
    "parameter",
    "input",
    "matmul",
    "attention",
    "convolution",
    "norm",
    "pool",
    "loss",
    "embedding",
    "reduction",
    "movement",
    "random",
    "update",
    "elementwise",
    "other",
)
"""Every kind, in the order of the features of groups; weights of trained policies depend on it."""

_MATMUL = re.compile(r"^([a-z]*mm|mv|addmv|dot|vdot|matmul|linear|bilinear|einsum|gemm|addr|ger|outer|lstm|gru|rnn)$")
_PARTS = (
    ("attention", ("attention",)),
    ("convolution", ("conv",)),
    ("loss", ("softmax", "logsumexp", "loss", "entropy")),
    ("norm", ("norm",)),
    ("pool", ("pool", "upsample", "interpolate")),
    ("embedding", ("embedding", "index", "gather", "scatter")),
    ("random", ("dropout", "bernoulli", "rand", "normal", "uniform", "multinomial")),
)
"""Parts of a name that tell its kind, the first that fits."""
_WORDS = {
    "reduction": {
        *("sum", "mean", "prod", "max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "cumsum", "cumprod"),
        *("topk", "sort", "argsort", "var", "std", "median", "any", "all", "nonzero", "bincount", "unique"),
    },
    "movement": {
        *("cat", "stack", "split", "chunk", "copy", "clone", "slice", "select", "pad", "zeros", "ones", "full"),
        *("empty", "fill", "view", "reshape", "permute", "transpose", "expand", "repeat", "roll", "flip", "tril"),
        *("triu", "arange", "squeeze", "unsqueeze", "unbind", "diagonal", "strided", "concat", "flatten", "tile"),
    },
}
"""Words of a name, between underscores, that tell its kind."""
_ELEMENTWISE = re.compile(
    r"^(add|sub|rsub|mul|div|pow|sqrt|rsqrt|exp|log|neg|abs|tanh|sigmoid|relu|gelu|silu|where|erf|clip|clamp|sign|lerp)"
)


def op_kind(target: str) -> str:
    """The kind, one of `OP_KINDS`, of an op with that target; the backward of an op is of the op's kind.

    >>> op_kind("aten.convolution_backward.default"), op_kind("aten.addmm.default"), op_kind("update.adam")
    ('convolution', 'matmul', 'update')
    """
    if target in SOURCE_TARGETS:
        return "parameter" if target in RESIDENT_TARGETS else "input"
    if target.startswith("update."):
        return "update"
    namespace, _, rest = target.lower().rpartition("::")[2].partition(".")
    name = (rest or namespace).partition(".")[0].strip("_")
    words = set(name.split("_"))
    if "attention" not in name and any(_MATMUL.match(word) for word in words):
        return "matmul"
    kinds = [kind for kind, parts in _PARTS if any(part in name for part in parts)]
    kinds += [kind for kind, listed in _WORDS.items() if words & listed]
    return [*kinds, "elementwise" if namespace == "aten" or _ELEMENTWISE.match(name) else "other"][0]


NUM_WAVES = 8
"""Octaves in which a group's place in the order is told: down to one group in 256."""
LARGEST = 20.0
"""Features are clipped here: a divisor may be close to 0."""

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
    ten times as long looks the same; figures without a scale are log(1 + x). Nothing is standardised over the
    graph: that would hide differences between problems. Costs are the problem's, so a fitted host model's scales are
        seen.

    Permuting the devices of a host permutes `devices`, `pairs` and `links` and changes nothing else.

    Attributes:
        nodes: (G, F) float32, `NODE_FEATURES`.
        edges: (K, 3) float32, `EDGE_FEATURES`.
        devices: (D, 7) float32, `DEVICE_FEATURES`.
        pairs: (G, D, 5) float32, `PAIR_FEATURES` of each group on each device.
        links: (D, D, 4) float32, `LINK_FEATURES` of the route from the first to the second; 0 on the diagonal.
        summary: (9,) float32, `SUMMARY` of the whole problem.
        arrays: the same in SI units, the groups of each edge, and the devices where each group may be.
    """

    nodes: NDArray[np.float32]
    edges: NDArray[np.float32]
    devices: NDArray[np.float32]
    pairs: NDArray[np.float32]
    links: NDArray[np.float32]
    summary: NDArray[np.float32]
    arrays: GroupArrays

    @property
    def allowed(self) -> NDArray[np.bool_]:
        """(G, D) bool: devices where each group may be."""
        return self.arrays.allowed

    def twins(self) -> NDArray[np.int64]:
        """(D,) how many devices before each one look the same by themselves; 0 where all differ.

        Example:
            Of four equal GPUs and a CPU the twins are 0, 1, 2, 3 and 0.
        """
        looks = np.rint(self.devices.astype(np.float64) * 1e4).astype(np.int64)
        return np.asarray(np.tril((looks[:, None] == looks).all(axis=-1), -1).sum(axis=1))


def problem_features(problem: Problem) -> ProblemFeatures:
    """The features of a problem; nothing here depends on a placement."""
    arrays = GroupArrays.of(problem)
    edge_s = arrays.edge_s()
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
        devices=_columns(DEVICE_FEATURES, _devices(problem, arrays)),
        pairs=_columns(PAIR_FEATURES, _pairs(arrays)),
        links=_columns(LINK_FEATURES, _links(problem, arrays)),
        summary=_columns(SUMMARY, _summary(problem, arrays, edge_s)),
        arrays=arrays,
    )


def _nodes(problem: Problem, arrays: GroupArrays, edge_s: FloatArray) -> dict[str, FloatArray]:
    graph, op_group, num_groups = problem.graph, problem.grouping.op_group, arrays.num_groups
    cost_s = arrays.cost_s.mean(axis=1)
    op_s = problem.costs.op_time_s.mean(axis=1)
    over_ops = partial(_sums, op_group, num_groups)
    weight = op_s + 1e-9 * arrays.unit_s  # a group of ops that take no time is what most of them are
    total = over_ops(weight)
    num_ops = np.bincount(op_group, minlength=num_groups).astype(np.float64)
    before_s, after_s = path_lengths(graph, op_s)
    longest_s = float(after_s.max(initial=0.0)) or 1.0
    spot = np.empty(num_groups)
    spot[arrays.order] = (np.arange(num_groups) + 0.5) / max(num_groups, 1)
    position, ones = np.arange(graph.num_ops) / max(graph.num_ops, 1), np.ones(len(edge_s))
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
        "in_s": np.log1p(_sums(arrays.edge_target, num_groups, edge_s) / arrays.unit_s),
        "out_s": np.log1p(_sums(arrays.edge_source, num_groups, edge_s) / arrays.unit_s),
        "in_edges": np.log1p(_sums(arrays.edge_target, num_groups, ones)),
        "out_edges": np.log1p(_sums(arrays.edge_source, num_groups, ones)),
        "mean_place": over_ops(position) / num_ops,
        "first_place": spot,
        "last_place": extreme_over_ops(np.maximum, op_group, position, num_groups),
        "path_before": extreme_over_ops(np.minimum, op_group, before_s, num_groups) / longest_s,
        "path_after": extreme_over_ops(np.maximum, op_group, after_s, num_groups) / longest_s,
        "criticality": extreme_over_ops(np.maximum, op_group, before_s + after_s, num_groups) / longest_s,
        "shared": over_ops(weight * (graph.micro_batch < 0)) / total,
        "micro_batch": over_ops(weight * np.maximum(graph.micro_batch, 0)) / total / graph.num_micro_batches,
    }
    kinds = np.array([OP_KINDS.index(op_kind(target)) for target in graph.targets], dtype=np.int64)
    columns |= {f"is_{name}": over_ops(weight * (graph.phases == index)) / total for index, name in enumerate(PHASES)}
    columns |= {f"kind_{name}": over_ops(weight * (kinds == index)) / total for index, name in enumerate(OP_KINDS)}
    # as in Vaswani et al. 2017, section 3.5, over the whole order
    columns |= {f"sin_{octave}": np.sin(np.pi * 2**octave * spot) for octave in range(NUM_WAVES)}
    return columns | {f"cos_{octave}": np.cos(np.pi * 2**octave * spot) for octave in range(NUM_WAVES)}


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


def graph_features(problem: Problem) -> GraphFeatures:
    """The static features of a problem's group graph; nothing here depends on a placement."""
    graph, op_group, arrays = problem.graph, problem.grouping.op_group, GroupArrays.of(problem)
    source, target, edge_bytes, num_groups = (
        arrays.edge_source,
        arrays.edge_target,
        arrays.edge_bytes,
        arrays.num_groups,
    )
    over_ops = partial(_sums, op_group, num_groups)
    num_ops = np.bincount(op_group, minlength=num_groups)
    before_s, after_s = path_lengths(graph, problem.costs.op_time_s.mean(axis=1))
    position = np.arange(graph.num_ops) / max(graph.num_ops, 1)
    columns: dict[str, FloatArray] = {f"log_cost_{d}": _log(cost_s) for d, cost_s in enumerate(arrays.cost_s.T)}
    columns |= {
        "log_ops": _log(num_ops.astype(np.float64)),
        "is_source": over_ops(graph.is_source) / num_ops,
        "log_parameter_bytes": _log(over_ops(graph.parameter_bytes)),
        "log_output_bytes": _log(over_ops(graph.output_bytes)),
        "log_in_bytes": _log(_sums(target, num_groups, edge_bytes)),
        "log_out_bytes": _log(_sums(source, num_groups, edge_bytes)),
        "log_in_edges": np.log1p(_sums(target, num_groups, np.ones(len(target)))),
        "log_out_edges": np.log1p(_sums(source, num_groups, np.ones(len(source)))),
        "mean_position": over_ops(position) / num_ops,
        "first_position": extreme_over_ops(np.minimum, op_group, position, num_groups),
        "last_position": extreme_over_ops(np.maximum, op_group, position, num_groups),
        "path_before": extreme_over_ops(np.minimum, op_group, before_s, num_groups),
        "path_after": extreme_over_ops(np.maximum, op_group, after_s, num_groups),
        "criticality": extreme_over_ops(np.maximum, op_group, before_s + after_s, num_groups),
    }
    columns |= {f"is_{name}": over_ops(graph.phases == index) / num_ops for index, name in enumerate(PHASES)}
    return GraphFeatures(
        node_features=_standardise(np.stack(list(columns.values()), axis=1)),
        edge_features=_standardise(np.stack([_log(edge_bytes), _log(arrays.edge_s() / arrays.unit_s)], axis=1)),
        edge_source=source,
        edge_target=target,
        group_cost=(arrays.cost_s / arrays.unit_s).astype(np.float32),
        allowed=problem.group_allowed,
        names=tuple(columns),
    )


def path_lengths(graph: OpGraph, cost_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(N,) seconds of the longest path that ends before each op, and of the longest that starts with it."""
    producers = graph.tensor_op[graph.input_tensors]
    edges = graph.input_offsets, producers, np.zeros(len(producers))
    return longest_before(cost_s, *edges), cost_s + longest_after(cost_s, *edges)


def _sums(groups: NDArray[np.integer], num_groups: int, weights: NDArray[np.generic]) -> FloatArray:
    """(G,) sums of the weights of each group's ops or edges."""
    return np.bincount(groups, weights.astype(np.float64), num_groups).astype(np.float64)


def extreme_over_ops(reduce: np.ufunc, op_group: NDArray[np.int32], values: FloatArray, num_groups: int) -> FloatArray:
    """(G,) least or largest of (N,) values of the ops of each group: `reduce` is `np.minimum` or `np.maximum`."""
    result = np.full(num_groups, np.inf if reduce is np.minimum else -np.inf)
    reduce.at(result, op_group, values)
    return result


def _log(values: FloatArray) -> FloatArray:
    """log(1 + value / mean), so that the unit does not matter."""
    return np.asarray(np.log1p(_over_mean(values)))


def _standardise(values: FloatArray) -> NDArray[np.float32]:
    if not values.size:
        return values.astype(np.float32)
    spread = values.std(axis=0)
    return np.asarray((values - values.mean(axis=0)) / np.where(spread > 1e-12, spread, 1.0), dtype=np.float32)


LongArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class GroupArrays:
    """G groups, K edges between them, and D devices.

    Attributes:
        cost_s: (G, D) seconds of all ops of each group on each device.
        held_bytes: (G,) bytes that each group keeps where it is.
        room_bytes: (D,) bytes of each device.
        allowed: (G, D) bool, devices where each group may be.
        edge_source, edge_target: (K,) int64, groups of each edge, by source, then target.
        edge_bytes: (K,) bytes that go over each edge where its ends are on different devices.
        edge_tensors: (K,) tensors that do.
        latency_s: (D, D) of each route, 0 on the diagonal.
        s_per_byte: (D, D) of each route, 0 on the diagonal.
        occupies: (D, D) bool, the devices that each device keeps busy: itself, and a gang its members.
        order: (G,) int64, groups by their first op in list order; groups of sources alone come last.
        unit_s: the mean cost of a group on a device.
        share_s: the mean cost of all groups, over D: the work of each device in an even split.
    """

    cost_s: FloatArray
    held_bytes: FloatArray
    room_bytes: FloatArray
    allowed: NDArray[np.bool_]
    edge_source: LongArray
    edge_target: LongArray
    edge_bytes: FloatArray
    edge_tensors: FloatArray
    latency_s: FloatArray
    s_per_byte: FloatArray
    occupies: NDArray[np.bool_]
    order: LongArray
    unit_s: float
    share_s: float

    @classmethod
    def of(cls, problem: Problem) -> GroupArrays:
        """Those of the problem's own grouping."""
        grouping = problem.grouping
        cost_s = group_time_s(problem, grouping)
        source, target, edge_bytes, edge_tensors = edges_between_groups(problem, grouping)
        return cls(
            cost_s=cost_s,
            held_bytes=held_bytes(problem, grouping),
            room_bytes=room_bytes(problem),
            allowed=problem.group_allowed,
            edge_source=source,
            edge_target=target,
            edge_bytes=edge_bytes,
            edge_tensors=edge_tensors,
            latency_s=problem.transfer_latency_s,
            s_per_byte=problem.transfer_s_per_byte,
            occupies=busy_devices(problem.host),
            order=_group_order(problem),
            unit_s=float(cost_s.mean()) or 1.0,
            share_s=float(cost_s.mean(axis=1).sum()) / problem.host.num_devices or 1.0,
        )

    @property
    def num_groups(self) -> int:
        return len(self.cost_s)

    @property
    def num_devices(self) -> int:
        return int(self.cost_s.shape[1])

    def joined(self) -> tuple[NDArray[np.int32], NDArray[np.int32], FloatArray, NDArray[np.bool_]]:
        """The edges as CSR over groups, see `joined_groups`."""
        return joined_groups(self.edge_source, self.edge_target, self.edge_bytes, self.num_groups)

    def edge_s(self) -> FloatArray:
        """(K,) seconds that each edge takes on the mean route; 0 on a host of one device."""
        return self.edge_tensors * mean_route(self.latency_s) + self.edge_bytes * mean_route(self.s_per_byte)


def _group_order(problem: Problem) -> LongArray:
    graph, grouping = problem.graph, problem.grouping
    place = np.empty(graph.num_ops, dtype=np.int64)
    place[list_order(problem)] = np.arange(graph.num_ops)
    place += np.where(graph.is_source, graph.num_ops, 0)  # sources are there from the start, wherever they are listed
    first = np.full(grouping.num_groups, 2 * graph.num_ops)
    np.minimum.at(first, grouping.op_group, place)
    return np.argsort(first, kind="stable").astype(np.int64)


OBSERVATIONS = ("index", "graph")


class GraphObservation:
    """The one observation of a problem: nothing about a graph changes from one episode to the next.

    With `index`, the default, it is `graph`, always 0: it only points to the graph, so that a rollout buffer need not
    keep a copy a step; the policy holds the features. With `graph` it is the features, float32 arrays made flat, for
    policies that read observations and know nothing else. They count in shares of the whole and in logarithms, so that
    they look alike on every problem:

    - `groups`, (G * F,): `NODE_FEATURES` of each group, then `PAIR_FEATURES` of it on each device;
    - `adjacency`, (G * G,): log(1 + x) of the transfer seconds from each group to each other one, over the largest:
    0..1;
    - `devices`, (D * 7,): `DEVICE_FEATURES` of each device.

    Attributes:
        space: of the observation of one env.
    """

    def __init__(self, problem: Problem, kind: str = "index") -> None:
        """The observation of `problem`.

        Args:
            problem: the problem to place.
            kind: one of `OBSERVATIONS`.

        Raises:
            UnknownName: no observation has that name.
        """
        check_known("observation", kind, OBSERVATIONS)
        self._arrays, self.space = _flat_features(problem) if kind == "graph" else {}, index_space()
        if kind == "graph":
            limits = {name: (0.0, 1.0) if name == "adjacency" else (-LARGEST, LARGEST) for name in self._arrays}
            self.space = spaces.Dict(
                {name: spaces.Box(*limits[name], one.shape, np.float32) for name, one in self._arrays.items()}
            )

    def one(self) -> dict[str, Any]:
        """The observation space of one env; new arrays every time."""
        return {name: array.copy() for name, array in self._arrays.items()} or {"graph": np.int64(0)}

    def batch(self, num_envs: int) -> dict[str, NDArray[Any]]:
        """The observation space of `num_envs` envs, with a leading axis of envs; new arrays every time."""
        rows = {name: np.tile(array, (num_envs, 1)) for name, array in self._arrays.items()}
        return rows or {"graph": np.zeros(num_envs, dtype=np.int64)}


def index_space() -> spaces.Dict:
    """A dictionary with `graph`, the index of the graph to be placed: always 0."""
    return spaces.Dict({"graph": spaces.Discrete(1)})


def _flat_features(problem: Problem) -> dict[str, NDArray[np.float32]]:
    features, num_groups = problem_features(problem), problem.grouping.num_groups
    arrays = features.arrays
    groups = np.concatenate([features.nodes, features.pairs.reshape(num_groups, -1)], axis=1)
    adjacency = np.zeros((num_groups, num_groups), dtype=np.float32)
    sent = features.edges[:, EDGE_FEATURES.index("seconds")]
    adjacency[arrays.edge_source, arrays.edge_target] = sent / (float(sent.max(initial=0.0)) or 1.0)
    return {"groups": groups.reshape(-1), "adjacency": adjacency.reshape(-1), "devices": features.devices.reshape(-1)}
