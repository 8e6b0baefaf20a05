"""The input of graph partitioners: the labels of units as nodes, bytes as edges, and their results as placements.

`metis`: balanced parts with few bytes between them (Karypis and Kumar 1998), one a device.

`scotch`: SCOTCH's mapping of the graph onto devices (Pellegrini 1996), where its program is installed.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import MissingExtra, RunnerError
from rlplace.graphs.grouping.groups import check_installed, run_metis
from rlplace.measure import Problem
from rlplace.search.rules.baselines import plain_devices
from rlplace.search.schedule.list_schedule import Units, group_units, next_allowed, op_units
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
    task.score_distinct(np.stack(rows))


def balances(
    problem: Problem, units: Units, devices: list[int]
) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """The weights by which parts may be balanced: weights of labels (C,), and the share of each part (K,)."""
    time_s = np.bincount(units.label, weights=units.time_s[:, devices].mean(axis=1)).astype(np.float64)
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


LEAST_NODES = 4
"""Nodes a part that METIS needs; fewer are dealt out."""
ROUNDS = 64
"""How often weights are evened out; each round halves the excess."""


def solve_metis(task: Task) -> None:
    """Scores METIS's parts of ops and of groups, balanced by time and by memory.

    Raises:
        MissingExtra: pymetis is not installed.
        RunnerError: METIS failed on every graph.
    """
    check_installed()
    score_cuts(task, metis_parts)


def metis_parts(graph: Undirected, shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """(V,) int64: the part of each node.

    Args:
        graph: the graph to cut.
        shares: (K,) of the weight of all nodes that each part aims at, summing to 1.

    Raises:
        MissingExtra: pymetis is not installed.
        RunnerError: METIS crashed, or did not finish.
    """
    check_installed()
    count = len(graph.node_weights)
    if len(shares) == 1:
        return np.zeros(count, dtype=np.int64)
    if count < LEAST_NODES * len(shares):
        return _dealt(graph.node_weights, shares)
    weights = _even_weights(graph.node_weights, float(shares.min()))
    return run_metis(
        len(shares), graph.offsets, graph.neighbours, weights, graph.edge_weights.tolist(), shares / shares.sum()
    )


def _dealt(node_weights: NDArray[np.int64], shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """(V,) int64: heaviest nodes first, each to the part that is then fullest least."""
    parts = np.zeros(len(node_weights), dtype=np.int64)
    filled = np.zeros(len(shares))
    for node in np.argsort(-node_weights, kind="stable").tolist():
        parts[node] = int(np.argmin((filled + node_weights[node]) / np.maximum(shares, 1e-12)))
        filled[parts[node]] += node_weights[node]
    return parts


def _even_weights(node_weights: NDArray[np.int64], share: float) -> list[int]:
    """Weights that leave no part empty: none above half of the least part, none below a tenth of the mean.

    Where one node outweighs a part, METIS's bisections run out of nodes.
    """
    weights = node_weights.astype(np.float64)
    for _ in range(ROUNDS):
        weights = np.maximum(weights, 0.1 * weights.mean())
        weights = np.minimum(weights, 0.5 * share * weights.sum())
    whole = weights / max(float(weights.sum()), 1e-300) * SHARES
    return [max(int(weight), 1) for weight in whole.tolist()]


PROGRAMS = ("gmap", "scotch_gmap")
TIMEOUT_S = 300.0


def solve_scotch(task: Task) -> None:
    """Scores SCOTCH's parts of ops and of groups, balanced by time and by memory.

    Raises:
        MissingExtra: its program is not installed.
        RunnerError: the program failed.
    """
    find_program()
    score_cuts(task, scotch_parts)


def find_program() -> str:
    """Path of SCOTCH's `gmap`.

    Raises:
        MissingExtra: it is not installed.
    """
    for name in PROGRAMS:
        if (path := shutil.which(name)) is not None:
            return path
    raise MissingExtra("scotch (its program gmap)", how="install it with the system's packages: apt install scotch")


def scotch_parts(graph: Undirected, shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """(V,) int64: the part of each node; the target is a complete graph of parts weighted by `shares`.

    Args:
        graph: the graph to cut.
        shares: (K,) of the weight of all nodes that each part aims at, summing to 1.

    Raises:
        MissingExtra: its program is not installed.
        RunnerError: the program failed, or answered nonsense.
    """
    program = find_program()
    count = len(graph.node_weights)
    if len(shares) == 1:
        return np.zeros(count, dtype=np.int64)
    with tempfile.TemporaryDirectory(prefix="rlplace-scotch-") as folder:
        source, target, mapping = (Path(folder) / name for name in ("graph.grf", "parts.tgt", "mapping.map"))
        source.write_text(graph_text(graph), encoding="ascii")
        weights = np.maximum(np.round(shares * SHARES / 64), 1).astype(np.int64)
        target.write_text(f"cmpltw {len(shares)} {' '.join(map(str, weights.tolist()))}\n", encoding="ascii")
        command = [program, str(source), str(target), str(mapping)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RunnerError(f"scotch: {program} could not finish: {error}") from error
        if done.returncode != 0 or not mapping.exists():
            raise RunnerError(f"scotch: {program} exited with {done.returncode}: {done.stderr.strip()[:500]}")
        return _parts(mapping.read_text(encoding="ascii"), count, len(shares), program)


def graph_text(graph: Undirected) -> str:
    """A graph in SCOTCH's source format, version 0: weights of vertices and of edges, numbered from 0."""
    lines = ["0", f"{len(graph.node_weights)} {len(graph.neighbours)}", "0 011"]
    for node, weight in enumerate(graph.node_weights.tolist()):
        first, last = graph.offsets[node], graph.offsets[node + 1]
        edges = zip(graph.edge_weights[first:last].tolist(), graph.neighbours[first:last].tolist(), strict=True)
        lines.append(" ".join([str(weight), str(last - first), *(f"{load} {other}" for load, other in edges)]))
    return "\n".join(lines) + "\n"


def _parts(text: str, num_nodes: int, num_parts: int, program: str) -> NDArray[np.int64]:
    """The mapping that the program wrote: how many nodes, then a node and its part on every line."""
    parts = np.full(num_nodes, -1, dtype=np.int64)
    try:
        table = np.array([line.split() for line in text.splitlines()[1:] if line.strip()], dtype=np.int64)
        parts[table[:, 0]] = table[:, 1]
    except (ValueError, IndexError) as error:
        raise RunnerError(f"scotch: {program} wrote a mapping that cannot be read: {error}") from error
    if np.any(parts < 0) or np.any(parts >= num_parts):
        raise RunnerError(f"scotch: {program} left nodes without one of {num_parts} parts")
    return parts
