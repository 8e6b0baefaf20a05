"""Ranks of units: the longest paths ahead of them and behind them, and the orders that follow."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from rlplace.jit import Floats, Ints, kernel
from rlplace.search.schedule.inputs import Units, Wires


def mean_transfer_s(units: Units, wires: Wires) -> NDArray[np.float64]:
    """(T,) float64: transfer time of each tensor, the mean over ordered pairs of distinct devices."""
    num_devices = units.time_s.shape[1]
    pairs = max(num_devices * (num_devices - 1), 1)
    latency_s, s_per_byte = float(wires.latency_s.sum()) / pairs, float(wires.s_per_byte.sum()) / pairs
    return np.asarray(latency_s + units.tensor_bytes * s_per_byte)


def upward(units: Units, wires: Wires) -> NDArray[np.float64]:
    """(U,) float64: longest path from the start of each unit to the end (HEFT, equation 6), with mean times."""
    mean_s = np.asarray(units.time_s.mean(axis=1))
    return _upward(mean_s, mean_transfer_s(units, wires), units.output_offsets, units.reader_offsets, units.readers)


def downward(units: Units, wires: Wires) -> NDArray[np.float64]:
    """(U,) float64: longest path from the start of the step to the start of each unit (HEFT, equation 8)."""
    mean_s = np.asarray(units.time_s.mean(axis=1))
    transfer_s = mean_transfer_s(units, wires)
    return _downward(mean_s, transfer_s, units.tensor_unit, units.input_offsets, units.input_tensors)


def ready_order(units: Units, priority: NDArray[np.float64]) -> NDArray[np.int64]:
    """(U,) int64: units as a queue of ready ones gives them out, highest priority first, ties by index."""
    missing = np.diff(units.input_offsets).tolist()
    offsets, reader_offsets, readers = units.output_offsets.tolist(), units.reader_offsets.tolist(), units.readers
    keys = (-priority).tolist()
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


@kernel
def _upward(unit_s: Floats, transfer_s: Floats, output_offsets: Ints, reader_offsets: Ints, readers: Ints) -> Floats:
    ranks = np.zeros(len(unit_s))
    for i in range(len(unit_s) - 1, -1, -1):
        longest = 0.0
        for t in range(output_offsets[i], output_offsets[i + 1]):
            for a in range(reader_offsets[t], reader_offsets[t + 1]):
                longest = max(longest, transfer_s[t] + ranks[readers[a]])
        ranks[i] = unit_s[i] + longest
    return ranks


@kernel
def _downward(
    unit_s: Floats, transfer_s: Floats, tensor_unit: Ints, input_offsets: Ints, input_tensors: Ints
) -> Floats:
    ranks = np.zeros(len(unit_s))
    for i in range(len(unit_s)):
        for edge in range(input_offsets[i], input_offsets[i + 1]):
            tensor = input_tensors[edge]
            producer = tensor_unit[tensor]
            ranks[i] = max(ranks[i], ranks[producer] + unit_s[producer] + transfer_s[tensor])
    return ranks
