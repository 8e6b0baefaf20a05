"""The optimum of small published workloads, by trying every placement of units, or every contiguous split."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from random_published import reads

from rlplace.graphs.formats.published import DnnPartitioning
from rlplace.graphs.opgraph import BACKWARD

Value = Callable[[DnnPartitioning, list[int]], float]


def best_placement_ms(record: DnnPartitioning, value: Value) -> float:
    """The least value over all placements of units on devices that can run them."""
    units = record.units.tolist()
    best = math.inf
    for devices in itertools.product(range(record.num_devices), repeat=max(units) + 1):
        placement = [devices[unit] for unit in units]
        if all(record.allowed[op, device] for op, device in enumerate(placement)):
            best = min(best, value(record, placement))
    return best


def is_contiguous(record: DnnPartitioning, devices: list[int]) -> bool:
    """Whether devices can be put in an order in which no edge of the forward graph goes back.

    The forward graph of an inference workload is its graph over units; then every device holds a difference of two
    nested down-closed sets. Not for training graphs.
    """
    assert not any(phase == BACKWARD for phase in record.graph.phases.tolist())
    used = sorted(set(devices))
    edges = {(devices[u], devices[v]) for v, sources in enumerate(reads(record)) for u in sources}
    return any(all(order.index(a) <= order.index(b) for a, b in edges) for order in itertools.permutations(used))


def best_contiguous_ms(record: DnnPartitioning, value: Value) -> float:
    """The least value over contiguous placements of an inference workload."""
    return best_placement_ms(record, lambda r, row: value(r, row) if is_contiguous(r, row) else math.inf)
