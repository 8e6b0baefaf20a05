"""What the micro-batches of a step have in common: the roles of their ops."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.opgraph import OpGraph


def roles(graph: OpGraph) -> NDArray[np.int32]:
    """(N,) int32: ops that do the same for different micro-batches have the same role, 0..R-1; others each their own.

    Copies keep their order, so the r-th op of one micro-batch answers to the r-th of another with the same target,
    module and phase. Roles are numbered by the first op that has them.
    """
    seen: dict[tuple[str, str, int, int, int], int] = {}
    found = np.empty(graph.num_ops, dtype=np.int32)
    count: dict[tuple[int, str, str, int], int] = {}
    labels = zip(graph.micro_batch.tolist(), graph.targets, graph.modules, graph.phases.tolist(), strict=True)
    for op, (micro_batch, target, module, phase) in enumerate(labels):
        if micro_batch < 0:
            key = ("", "", 0, op, -1)
        else:
            nth = count.get((micro_batch, target, module, phase), 0)
            count[micro_batch, target, module, phase] = nth + 1
            key = (target, module, phase, nth, 0)
        found[op] = seen.setdefault(key, len(seen))
    return found
