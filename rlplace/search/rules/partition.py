"""What graph partitioners work on: the labels of units as nodes, bytes as edges, and what comes back as placements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import RunnerError
from rlplace.measure.problem import Problem
from rlplace.search.rules.baselines import plain_devices
from rlplace.search.schedule.units import Units, group_units, next_allowed, op_units
from rlplace.search.task import Task

SHARES = 1 << 20
"""Weights become whole numbers: the heaviest edge, and all nodes together, are this much."""


@dataclass(frozen=True, eq=False)
class Undirected:
    """An undirected graph as CSR, with whole weights; the edges of a node are in order.

    Attributes:
        offsets: (V + 1,) int64.
        neighbours: (2 E,) int64, every edge from both ends.
        edge_weights: (2 E,) int64, >= 1.
        node_weights: (V,) int64, >= 0.
    """

    offsets: NDArray[np.int64]
    neighbours: NDArray[np.int64]
    edge_weights: NDArray[np.int64]
    node_weights: NDArray[np.int64]


Cut = Callable[[Undirected, NDArray[np.float64]], NDArray[np.int64]]
"""From a graph and the share of each part, (K,) summing to 1, to the part of each node, (V,)."""


def score_cuts(task: Task, cut: Cut) -> None:
    """Scores the parts of ops and of groups, balanced by time and by memory, one part a device that is no gang.

    Fast devices get a larger share of the time, large memories of the memory. Nodes go on to the next device that may
    hold them. A graph on which the partitioner fails is passed over.

    Raises:
        RunnerError: the partitioner failed on every graph.
    """
    problem = task.problem
    devices = plain_devices(problem)
    rows: list[NDArray[np.int32]] = []
    failure: RunnerError | None = None
    levels = [op_units(problem)]
    if problem.grouping.num_groups < problem.graph.num_ops:
        levels.append(group_units(problem))
    for units in levels:
        for weights, shares in balances(problem, units, devices):
            try:
                parts = cut(undirected(units, weights), shares)
            except RunnerError as error:
                failure = error
                continue
            placed = next_allowed(units, np.array(devices, dtype=np.int32)[parts])[units.label]
            rows.append(placed if len(placed) == problem.graph.num_ops else problem.grouping.expand(placed))
    if failure is not None and not rows:
        raise failure
    found = np.stack(rows)
    task.score(found[np.sort(np.unique(found, axis=0, return_index=True)[1])])


def balances(
    problem: Problem, units: Units, devices: list[int]
) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """What parts may be balanced by: weights of labels (C,), and the share of each part (K,)."""
    time_s = np.zeros(len(units.label_allowed))
    np.add.at(time_s, units.label, units.time_s[:, devices].mean(axis=1))
    speed = 1.0 / np.maximum(units.time_s[:, devices].sum(axis=0), 1e-30)
    room = np.array([problem.host.devices[device].memory_bytes for device in devices], dtype=np.float64)
    memory = units.label_resident_bytes + units.label_output_bytes
    return [(time_s, speed / speed.sum()), (memory, room / room.sum())]


def undirected(units: Units, node_weight: NDArray[np.float64]) -> Undirected:
    """The graph over labels; an edge weighs the bytes of the tensors that go along it, in either direction."""
    count = len(node_weight)
    a = units.label[units.tensor_unit[units.input_tensors]].astype(np.int64)
    b = units.label[np.repeat(np.arange(len(units.label)), np.diff(units.input_offsets))].astype(np.int64)
    num_bytes = units.tensor_bytes[units.input_tensors]
    apart = a != b
    keys = np.concatenate(((a * count + b)[apart], (b * count + a)[apart]))
    pairs, which = np.unique(keys, return_inverse=True)
    weight = np.bincount(which, weights=np.tile(num_bytes[apart], 2), minlength=len(pairs))
    edge_weights = np.ceil(weight / max(float(weight.max(initial=0.0)), 1e-300) * SHARES).astype(np.int64)
    node_weights = np.round(node_weight / max(float(node_weight.sum()), 1e-300) * SHARES).astype(np.int64)
    offsets = np.searchsorted(pairs // count, np.arange(count + 1)).astype(np.int64)
    return Undirected(offsets, pairs % count, np.maximum(edge_weights, 1), node_weights)
