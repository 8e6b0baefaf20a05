"""METIS (Karypis & Kumar 1998) in a process of its own: balanced parts with few bytes cut, where it is installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import MissingExtra, RunnerError

SHARES = 1 << 20
"""Weights become whole numbers: the heaviest edge, and all nodes together, are about this much."""
PROGRAM = """
import json, sys
import pymetis
ask = json.load(sys.stdin)
graph = pymetis.CSRAdjacency(ask.pop("xadj"), ask.pop("adjncy"))
parts = pymetis.part_graph(ask.pop("nparts"), graph, options=pymetis.Options(seed=0), **ask)[1]
sys.stdout.write("\\n" + json.dumps([int(part) for part in parts]) + "\\n")
"""
"""Run by a Python of its own: METIS writes warnings to the standard output, and crashes on some graphs."""
TIMEOUT_S = 300.0


def check_installed() -> None:
    """Nothing, where METIS can be had.

    Raises:
        MissingExtra: pymetis is not installed.
    """
    if importlib.util.find_spec("pymetis") is None:
        raise MissingExtra("pymetis", "metis")


def run_metis(
    num_parts: int,
    offsets: NDArray[np.int64],
    neighbours: NDArray[np.int64],
    node_weights: list[int],
    edge_weights: list[int],
    shares: NDArray[np.float64] | None = None,
    *,
    program: str = PROGRAM,
) -> NDArray[np.int64]:
    """(V,) int64: the part of each node; some parts may be empty. Always the same for the same graph.

    Args:
        num_parts: how many parts.
        offsets, neighbours: CSR of an undirected graph, every edge from both ends.
        node_weights: (V,) what the parts are balanced by.
        edge_weights: (2 E,) what cutting an edge costs, >= 1.
        shares: (num_parts,) of all weight that each part aims at, summing to 1; even ones by default.
        program: Python that reads the question as JSON and writes the parts as its last line.

    Raises:
        MissingExtra: pymetis is not installed.
        RunnerError: METIS crashed, or did not finish.
    """
    check_installed()
    question: dict[str, Any] = {
        "nparts": num_parts,
        "xadj": offsets.tolist(),
        "adjncy": neighbours.tolist(),
        "vweights": node_weights,
        "eweights": edge_weights,
    }
    if shares is not None:
        question |= {"tpwgts": shares.tolist(), "recursive": False}
    command = [sys.executable, "-c", program]
    try:
        done = subprocess.run(
            command, input=json.dumps(question), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunnerError(f"metis: it could not finish: {error}") from error
    if done.returncode != 0:
        raise RunnerError(f"metis: it ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return np.array(json.loads(done.stdout.splitlines()[-1]), dtype=np.int64)


def metis_parts(
    num_nodes: int,
    source: NDArray[np.int64],
    target: NDArray[np.int64],
    edge_weight: NDArray[np.float64],
    node_weight: NDArray[np.float64],
    num_parts: int,
) -> NDArray[np.int64]:
    """(num_nodes,) int64: the part of each node of an undirected graph; some parts may be empty.

    Args:
        num_nodes: in all.
        source, target: (K,) ends of each edge, in any direction, never the same.
        edge_weight: (K,) what cutting it costs; parallel edges add up.
        node_weight: (num_nodes,) what the parts are balanced by.
        num_parts: how many parts.

    Raises:
        MissingExtra: pymetis is not installed.
        RunnerError: METIS failed.
    """
    check_installed()
    if num_parts >= num_nodes:
        return np.arange(num_nodes, dtype=np.int64)
    keys = np.concatenate((source * num_nodes + target, target * num_nodes + source))
    pairs, inverse = np.unique(keys, return_inverse=True)
    weight = np.bincount(inverse, weights=np.concatenate((edge_weight, edge_weight)), minlength=len(pairs))
    edge_shares = np.ceil(weight / max(float(weight.max(initial=0.0)), 1e-300) * SHARES).astype(np.int64)
    even = max(float(node_weight.sum()), 1e-300) / num_parts
    # a node beyond an even share fills a part: METIS fails, aloud, where it would have to leave others empty
    node_shares = 1 + np.round(np.minimum(node_weight / even, 1.0) * (SHARES // num_parts)).astype(np.int64)
    offsets = np.searchsorted(pairs // num_nodes, np.arange(num_nodes + 1))
    return run_metis(num_parts, offsets, pairs % num_nodes, node_shares.tolist(), np.maximum(edge_shares, 1).tolist())
