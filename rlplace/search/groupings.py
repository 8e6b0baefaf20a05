"""Groupings of a problem's ops for search, and facts about their groups.

`nested` and others: coarser and finer groupings that nest, so that placements carry over unchanged from coarse to fine.

`allowed_devices`, `majority_devices`, `main_labels`, `kept_bytes` and others: of each group, where it may be, where
most of it is, its module, its bytes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs import FORWARD, Grouping
from rlplace.graphs.grouping.coarsen import distinct
from rlplace.jit import Bytes, Floats, Ints, kernel
from rlplace.measure import Problem

CAP_SLACK = 1.5
"""A merged group may cost this many times an even share of the whole."""


def atoms(problem: Problem) -> Grouping:
    """The finest groups: ops of a co-location class; a source without one with its first reader; other ops alone.

    Each lies within one group of the problem's grouping.
    """
    graph = problem.graph
    label = np.where(graph.colocation >= 0, graph.num_ops + graph.colocation.astype(np.int64), np.arange(graph.num_ops))
    for op in np.flatnonzero(graph.is_source & (graph.colocation < 0)).tolist()[::-1]:
        if len(into := graph.readers_of(op)):
            label[op] = label[into.min()]
    return meet(problem.grouping, numbered(label, ""), "atoms")


def nested(problem: Problem) -> list[Grouping]:
    """Groupings that nest, coarse to fine: about 16 and 64 groups, the problem's own, about 256, 1024, and atoms.

    Those with fewer than a quarter more groups than the one before are left out.
    """
    own = problem.grouping
    ladder = [own]
    for count in (64, 16):
        if count < own.num_groups:
            ladder.insert(0, coarser(problem, ladder[0], count))
    for count in (256, 1024):
        if count > own.num_groups:
            ladder.append(finer(problem, ladder[-1], count))
    ladder.append(atoms(problem))
    kept = [ladder[0]]
    for grouping in ladder[1:]:
        if grouping is own or grouping.num_groups >= 1.25 * kept[-1].num_groups:
            kept.append(grouping)
    return kept


def coarser(problem: Problem, grouping: Grouping, num_groups: int) -> Grouping:
    """`grouping` with groups merged across the heaviest edges, to about `num_groups` where devices allow it."""
    return _merge(problem, grouping, None, num_groups)


def finer(problem: Problem, grouping: Grouping, num_groups: int) -> Grouping:
    """`grouping` with its groups cut into parts of about an even share of the cost for `num_groups` of them.

    Parts are atoms merged across the heaviest edges within a group of `grouping`.
    """
    return _merge(problem, atoms(problem), grouping, num_groups)


def by_module(problem: Problem, num_groups: int) -> Grouping:
    """Modules, cut into parts of about an even share of the cost for `num_groups` of them where they cost more.

    Ops that are unrolled over steps are one group so, as they would be by hand. Parts are atoms merged across the
    heaviest edges within a module; there are more than `num_groups` where there are as many small modules.
    """
    fine = atoms(problem)
    return _merge(problem, fine, numbered(main_modules(problem, fine)[fine.op_group], "modules"), num_groups)


def by_role(problem: Problem, num_groups: int) -> Grouping:
    """Ops that play one role in a module, cut into parts of an even share of the cost for about `num_groups` of them.

    Ops of one module, phase and target that give as many bytes play one role: for example the ops that compute the
    gradients of a layer's weights at every unrolled step, which no tensors join. A part is atoms of a role that follow
    each other and may be on the same devices; there are more than `num_groups` where there are as many roles.
    """
    graph, fine = problem.graph, atoms(problem)
    traits = (graph.modules, graph.phases, graph.targets, graph.output_bytes)
    numbers = np.stack([np.unique(np.asarray(trait), return_inverse=True)[1] for trait in traits])
    role = main_labels(problem, fine, np.unique(numbers, axis=1, return_inverse=True)[1].reshape(-1).astype(np.int64))
    rules, rule = np.unique(allowed_devices(problem, fine), axis=0, return_inverse=True)
    role = role * len(rules) + rule.reshape(-1)
    cost_s = np.bincount(fine.op_group, weights=problem.costs.op_time_s.mean(axis=1))
    whole_s = np.bincount(role, weights=cost_s)
    parts = np.maximum(np.rint(whole_s * num_groups / max(float(whole_s.sum()), 1e-30)), 1.0)
    order = np.argsort(role, kind="stable")
    before_s = np.cumsum(cost_s[order]) - cost_s[order]
    _, first, place = np.unique(role[order], return_index=True, return_inverse=True)
    part = np.empty(fine.num_groups, dtype=np.int64)
    part[order] = (before_s - before_s[first][place]) / np.maximum(whole_s / parts, 1e-30)[role[order]] + 1e-9
    part = np.minimum(part, parts[role].astype(np.int64) - 1)
    return numbered((role * (int(parts.max()) + 1) + part)[fine.op_group], f"roles cut to {num_groups}")


def meet(first: Grouping, second: Grouping, rule: str) -> Grouping:
    """Groups of ops that share a group in both groupings, numbered by their first op."""
    return numbered(first.op_group.astype(np.int64) * max(second.num_groups, 1) + second.op_group, rule)


def split(grouping: Grouping, devices: NDArray[np.int32]) -> Grouping:
    """`grouping` with its groups cut by where their ops are in `devices` (N,)."""
    label = grouping.op_group.astype(np.int64) * (int(devices.max(initial=0)) + 1) + devices
    return numbered(label, f"{grouping.rule}, split by device")


def _merge(problem: Problem, grouping: Grouping, within: Grouping | None, num_groups: int) -> Grouping:
    graph, op_group = problem.graph, grouping.op_group
    a, b = op_group[graph.tensor_op[graph.input_tensors]].astype(np.int64), op_group[graph.edge_op].astype(np.int64)
    keys, place = np.unique(np.minimum(a, b) * grouping.num_groups + np.maximum(a, b), return_inverse=True)
    weight = np.bincount(place, weights=graph.tensor_bytes[graph.input_tensors], minlength=len(keys))
    first_op = np.unique(op_group, return_index=True)[1]
    fence = np.zeros(grouping.num_groups, np.int32) if within is None else within.op_group[first_op]
    cost_s = np.bincount(op_group, weights=problem.costs.op_time_s.mean(axis=1)).astype(np.float64)
    parent = _kruskal(
        keys[np.argsort(-weight, kind="stable")],
        cost_s,
        fence,
        allowed_devices(problem, grouping).astype(np.int8),
        CAP_SLACK * float(cost_s.sum()) / num_groups,
        num_groups,
    )
    return numbered(parent[op_group].astype(np.int64), f"{grouping.rule} merged to {num_groups}")


def numbered(label: NDArray[np.int64], rule: str) -> Grouping:
    """Groups of equal labels (N,), numbered by their first op."""
    _, first_op, place = np.unique(label, return_index=True, return_inverse=True)
    return Grouping(np.argsort(np.argsort(first_op)).astype(np.int32)[place], rule=rule)


@kernel
def _kruskal(
    edges: NDArray[np.int64], cost_s: Floats, fence: Ints, allowed: Bytes, cap_s: float, num_groups: int
) -> Ints:
    """(G,) int32: the root that each group is merged into, over `edges` in order while costs are under the cap.

    Groups on two sides of a fence, or without a common device, stay apart. Stops at `num_groups` groups.
    """
    count = len(cost_s)
    parent = np.empty(count, np.int32)
    for group in range(count):
        parent[group] = group
    left = count
    for edge in edges:
        if left <= num_groups:
            break
        a, b = edge // count, edge % count
        while parent[a] != a:
            parent[a] = parent[parent[a]]
            a = parent[a]
        while parent[b] != b:
            parent[b] = parent[parent[b]]
            b = parent[b]
        if a == b or fence[a] != fence[b] or cost_s[a] + cost_s[b] > cap_s:
            continue
        shared = 0
        for device in range(allowed.shape[1]):
            shared |= allowed[a, device] & allowed[b, device]
        if shared == 0:
            continue
        parent[b] = a
        cost_s[a] += cost_s[b]
        for device in range(allowed.shape[1]):
            allowed[a, device] &= allowed[b, device]
        left -= 1
    for group in range(count):
        root = group
        while parent[root] != root:
            root = parent[root]
        parent[group] = root
    return parent


def allowed_devices(problem: Problem, grouping: Grouping) -> NDArray[np.bool_]:
    """(G, D) bool: devices where all the ops of each group of `grouping` may run."""
    table = np.ones((grouping.num_groups, problem.host.num_devices), dtype=np.bool_)
    if problem.allowed is not None:
        np.logical_and.at(table, grouping.op_group, problem.allowed)
    return table


def majority_devices(
    problem: Problem, devices: NDArray[np.int32], grouping: Grouping | None = None
) -> NDArray[np.int32]:
    """(G,) int32: of the devices where a group may be, the one that most of its mean time is on.

    The first of several that hold as much.

    Args:
        problem: the problem to place.
        devices: (N,) where its ops are.
        grouping: the groups that move; the problem's own groups by default.
    """
    grouping = problem.grouping if grouping is None else grouping
    weight = np.zeros((grouping.num_groups, problem.host.num_devices))
    # a group of ops that take no time goes where most of them are
    np.add.at(weight, (grouping.op_group, devices), problem.costs.op_time_s.mean(axis=1) + 1e-12)
    weight[~allowed_devices(problem, grouping)] = -1.0
    return np.asarray(weight.argmax(axis=1), dtype=np.int32)


def main_modules(problem: Problem, grouping: Grouping) -> NDArray[np.int64]:
    """(G,) int64: the module that most of each group's mean time is in, numbered in order of first appearance."""
    number: dict[str, int] = {}
    modules = [number.setdefault(name, len(number)) for name in problem.graph.modules]
    return main_labels(problem, grouping, np.array(modules, dtype=np.int64))


def main_labels(problem: Problem, grouping: Grouping, label_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """(G,) int64: the label that most of each group's mean time has; the smallest where several have as much.

    Args:
        problem: the problem to place.
        grouping: its groups, or finer or coarser ones.
        label_N: (N,) a label of each op, 0 or more.
    """
    count = int(label_N.max(initial=0)) + 1
    keys, place = np.unique(grouping.op_group.astype(np.int64) * count + label_N, return_inverse=True)
    time_s = np.bincount(place, weights=problem.costs.op_time_s.mean(axis=1))
    heaviest_last = np.lexsort((-keys, time_s, keys // count))
    labels = np.zeros(grouping.num_groups, dtype=np.int64)
    labels[keys[heaviest_last] // count] = keys[heaviest_last] % count
    return labels


def group_time_s(problem: Problem, grouping: Grouping) -> NDArray[np.float64]:
    """(G, D) float64: seconds of each group's ops on each device."""
    table = np.zeros((grouping.num_groups, problem.host.num_devices))
    np.add.at(table, grouping.op_group, problem.costs.op_time_s)
    return table


def edges_between_groups(
    problem: Problem, grouping: Grouping
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Source, reader, bytes and number of tensors of each edge between groups; a tensor goes to a group once."""
    graph, count, op_group = problem.graph, max(grouping.num_groups, 1), grouping.op_group.astype(np.int64)
    reads = distinct(graph.input_tensors.astype(np.int64) * count + op_group[graph.edge_op])
    tensor, reader = reads // count, reads % count
    producer = op_group[graph.tensor_op[tensor]]
    outside = producer != reader
    pairs, inverse = np.unique(producer[outside] * count + reader[outside], return_inverse=True)
    edge_bytes = np.bincount(inverse, graph.tensor_bytes[tensor[outside]], len(pairs)).astype(np.float64)
    edge_tensors = np.bincount(inverse, minlength=len(pairs)).astype(np.float64)
    return pairs // count, pairs % count, edge_bytes, edge_tensors


def joined_groups(
    source: NDArray[np.int64], reader: NDArray[np.int64], edge_bytes: NDArray[np.float64], num_groups: int
) -> tuple[Ints, Ints, NDArray[np.float64], NDArray[np.bool_]]:
    """Edges as CSR over groups: each group that one reads or that reads it, the bytes, and whether it reads them."""
    this, other = np.concatenate((reader, source)), np.concatenate((source, reader))
    order = np.lexsort((other, this))
    offsets = np.searchsorted(this[order], np.arange(num_groups + 1)).astype(np.int32)
    num_bytes = np.concatenate((edge_bytes, edge_bytes))[order]
    return offsets, other[order].astype(np.int32), num_bytes, order < len(source)


def kept_bytes(problem: Problem, grouping: Grouping) -> NDArray[np.float64]:
    """(G,) float64: bytes that a group keeps where it is: parameters, gradients, optimizer state, forward outputs."""
    graph = problem.graph
    outputs = np.where(graph.phases == FORWARD, graph.output_bytes, 0)
    kept = np.where(graph.is_source, np.maximum(graph.parameter_bytes, outputs), graph.parameter_bytes + outputs)
    kept = kept + graph.gradient_bytes + graph.state_bytes
    return np.bincount(grouping.op_group, weights=kept, minlength=grouping.num_groups).astype(np.float64)


def held_bytes(problem: Problem, grouping: Grouping) -> NDArray[np.float64]:
    """(G,) float64: parameters, gradients, optimizer state and forward outputs, in which parameters weigh twice.

    Features and orders of list schedulers are made of it, and learned weights know no other.
    """
    graph = problem.graph
    held = graph.parameter_bytes + graph.gradient_bytes + graph.state_bytes
    held = held + np.where(graph.phases == FORWARD, graph.output_bytes, 0)
    return np.bincount(grouping.op_group, weights=held, minlength=grouping.num_groups).astype(np.float64)


def room_bytes(problem: Problem) -> NDArray[np.float64]:
    """(D,) float64: bytes of each device beside its context, at least 1."""
    return np.array([max(float(one.memory_bytes - one.context_bytes), 1.0) for one in problem.host.devices])


def fullness(
    held: NDArray[np.float64], room: NDArray[np.float64], placements: NDArray[np.int32]
) -> NDArray[np.float64]:
    """(B,) float64: bytes held on the fullest device over its room, for `placements` (B, G) of groups."""
    table = np.zeros((len(placements), len(room)))
    np.add.at(table, (np.arange(len(placements))[:, None], placements), held[None, :])
    return np.asarray((table / room).max(axis=1))


def balanced(problem: Problem) -> NDArray[np.int32]:
    """(G,) int32: groups, most bytes first, each on the device that it leaves least full."""
    held = held_bytes(problem, problem.grouping)
    return heaviest_first(held, room_bytes(problem), problem.group_allowed).astype(np.int32)


def heaviest_first(
    weights: NDArray[np.float64], room: NDArray[np.float64], allowed: NDArray[np.bool_] | None = None
) -> NDArray[np.int64]:
    """(V,) int64: the part of each item, heaviest first, that the item leaves least full.

    Args:
        weights: (V,) of items.
        room: (K,) of parts, in any unit.
        allowed: (V, K) the parts that an item may go to; all by default.
    """
    part = np.zeros(len(weights), dtype=np.int64)
    choices = np.ones((len(weights), len(room)), dtype=np.bool_) if allowed is None else allowed
    filled = np.zeros(len(room))
    for item in np.argsort(-weights, kind="stable").tolist():
        part[item] = np.argmin(np.where(choices[item], (filled + weights[item]) / room, np.inf))
        filled[part[item]] += weights[item]
    return part
