"""`metis`: balanced parts with few bytes between them (Karypis and Kumar 1998), one a device."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.grouping.metis import check_installed, run_metis
from rlplace.search.rules.partition import SHARES, Undirected, score_cuts
from rlplace.search.task import Task

LEAST_NODES = 4
"""Nodes a part that METIS needs; fewer are dealt out."""
ROUNDS = 64
"""How often weights are evened out; each round halves what is too much."""


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
        graph: what is cut.
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
