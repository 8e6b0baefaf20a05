"""`metis_parts`: balanced parts with few bytes cut, by METIS (Karypis & Kumar 1998), where it is installed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import MissingExtra

SHARES = 1 << 20
"""Weights become whole numbers: the heaviest edge, and all nodes together, are about this much."""


def metis_parts(
    num_nodes: int, source: NDArray[np.int64], target: NDArray[np.int64], edge_weight: NDArray[np.float64],
    node_weight: NDArray[np.float64], num_parts: int,
) -> NDArray[np.int64]:  # fmt: skip
    """(num_nodes,) int64: the part of each node of an undirected graph; some parts may be empty.

    Args:
        num_nodes: in all.
        source, target: (K,) ends of each edge, in any direction, never the same.
        edge_weight: (K,) what cutting it costs; parallel edges add up.
        node_weight: (num_nodes,) what the parts are balanced by.
        num_parts: how many parts.

    Raises:
        MissingExtra: pymetis is not installed.
    """
    try:
        import pymetis
    except ImportError as error:
        raise MissingExtra("pymetis", "metis") from error

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
    _, parts = pymetis.part_graph(
        num_parts, pymetis.CSRAdjacency(offsets.tolist(), (pairs % num_nodes).tolist()), vweights=node_shares.tolist(),
        eweights=np.maximum(edge_shares, 1).tolist(), options=pymetis.Options(seed=0),
    )  # fmt: skip
    return np.asarray(parts, dtype=np.int64)
