"""Ranks of units: the longest paths ahead of them and behind them, and the orders that follow."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.paths import longest_after, longest_before
from rlplace.jit import Ints
from rlplace.search.schedule.host_resources import HostResources
from rlplace.search.schedule.units import Units


def mean_transfer_s(units: Units, resources: HostResources) -> NDArray[np.float64]:
    """(T,) float64: transfer time of each tensor, the mean over ordered pairs of distinct devices."""
    num_devices = units.time_s.shape[1]
    pairs = max(num_devices * (num_devices - 1), 1)
    latency_s, s_per_byte = float(resources.latency_s.sum()) / pairs, float(resources.s_per_byte.sum()) / pairs
    return np.asarray(latency_s + units.tensor_bytes * s_per_byte)


def upward(units: Units, resources: HostResources) -> NDArray[np.float64]:
    """(U,) float64: longest path from the start of each unit to the end (HEFT, equation 6), with mean times."""
    mean_s = np.asarray(units.time_s.mean(axis=1))
    return mean_s + longest_after(mean_s, *_edges(units, resources))


def downward(units: Units, resources: HostResources) -> NDArray[np.float64]:
    """(U,) float64: longest path from the start of the step to the start of each unit (HEFT, equation 8)."""
    return longest_before(np.asarray(units.time_s.mean(axis=1)), *_edges(units, resources))


def in_turn(units: Units, priority: NDArray[np.float64]) -> NDArray[np.float64]:
    """(U,) float64: `priority` with the op order of the problem in it; the same where the step is not cut."""
    return np.asarray(priority + units.turn * priority.max(initial=0.0))


def ready_order(units: Units, priority: NDArray[np.float64]) -> NDArray[np.int64]:
    """(U,) int64: units as a queue of ready ones gives them out, by `in_turn` of priorities, ties by index."""
    missing = np.diff(units.input_offsets).tolist()
    offsets, reader_offsets, readers = units.output_offsets.tolist(), units.reader_offsets.tolist(), units.readers
    keys = (-in_turn(units, priority)).tolist()
    ready = [(keys[unit], unit) for unit, count in enumerate(missing) if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, unit = heapq.heappop(ready)
        order.append(unit)
        for reader in readers[reader_offsets[offsets[unit]] : reader_offsets[offsets[unit + 1]]].tolist():
            missing[reader] -= 1
            if missing[reader] == 0:
                heapq.heappush(ready, (keys[reader], reader))
    return np.array(order, dtype=np.int64)


def _edges(units: Units, resources: HostResources) -> tuple[Ints, Ints, NDArray[np.float64]]:
    """Offsets, producers and mean transfer time of the edges into each unit."""
    tensors = units.input_tensors
    return units.input_offsets, units.tensor_unit[tensors], mean_transfer_s(units, resources)[tensors]
