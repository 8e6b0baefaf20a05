"""`scotch`: SCOTCH's mapping of the graph onto devices (Pellegrini 1996), where its program is installed."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import MissingExtra, RunnerError
from rlplace.search.rules.partition import SHARES, Undirected, score_cuts
from rlplace.search.task import Task

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
        graph: what is cut.
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
