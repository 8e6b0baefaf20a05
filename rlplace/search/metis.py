"""`metis`: balanced parts with few bytes between them (Karypis and Kumar 1998), one a device."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import MissingExtra
from rlplace.search.partition import Undirected, score_cuts
from rlplace.search.task import Task


def solve_metis(task: Task) -> None:
    """Scores METIS's parts of ops and of groups, balanced by time and by memory.

    Raises:
        MissingExtra: pymetis is not installed.
    """
    _load()
    score_cuts(task, metis_parts)


def metis_parts(graph: Undirected, shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """(V,) int64: the part of each node.

    Args:
        graph: what is cut.
        shares: (K,) of the weight of all nodes that each part aims at, summing to 1.

    Raises:
        MissingExtra: pymetis is not installed.
    """
    pymetis = _load()
    count = len(graph.node_weights)
    if len(shares) == 1:
        return np.zeros(count, dtype=np.int64)
    if count <= len(shares):
        return np.arange(count, dtype=np.int64)
    _, parts = pymetis.part_graph(
        len(shares),
        pymetis.CSRAdjacency(graph.offsets.tolist(), graph.neighbours.tolist()),
        vweights=graph.node_weights.tolist(),
        eweights=graph.edge_weights.tolist(),
        tpwgts=(shares / shares.sum()).tolist(),
        options=pymetis.Options(seed=0),
    )
    return np.asarray(parts, dtype=np.int64)


def _load() -> Any:
    try:
        import pymetis
    except ImportError:
        raise MissingExtra("pymetis", "metis") from None
    return pymetis
