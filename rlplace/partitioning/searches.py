"""`MaxLoadSearch`, `PieceLatencySearch`: the two objectives as searches see them, over units."""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import UnknownName
from rlplace.graphs.formats.dnn_partitioning import DnnPartitioning
from rlplace.partitioning.dp import Contraction, contract
from rlplace.partitioning.kernel_anneal import LoadGraph, Loads, PieceGraph, anneal_latency, anneal_loads
from rlplace.partitioning.objectives import MaxLoad, PieceLatency
from rlplace.partitioning.problem import UnitGraph, unit_graph, work_ms

Objective = Literal["max-load", "piece-latency"]
OBJECTIVES: tuple[Objective, ...] = ("max-load", "piece-latency")

Ints = NDArray[np.int32]


class Search(Protocol):
    """One objective on one workload: scores placements of units, and anneals them."""

    @property
    def units(self) -> UnitGraph:
        """What moves together: colour classes, and ops without one."""

    @property
    def order(self) -> Ints:
        """(U,) units in a topological order of the contracted graph."""

    @property
    def hot(self) -> float:
        """Temperature that annealing begins with, as a share of the value."""

    @property
    def cold(self) -> float:
        """Temperature that it ends with."""

    def values_ms(self, devices: Ints) -> NDArray[np.float64]:
        """(B,) milliseconds of placements of units (B, U) or (U,); infinite where infeasible."""

    def anneal(self, start: Ints, seed: int, steps: int, hot: float, cold: float) -> tuple[Ints, float]:
        """The best placement (U,) met in `steps` moves from `start`, which fits, and its value in milliseconds."""


class MaxLoadSearch:
    """Max-load; see `kernel_max_load`."""

    hot = 0.02
    cold = 2e-5
    _DOUBLINGS = 5

    def __init__(self, record: DnnPartitioning) -> None:
        self.units = unit_graph(record, record.units)
        self.order = _unit_order(self.units, contract(record))
        self._timer = MaxLoad(record)
        units = self.units
        self._graph = LoadGraph(
            record.num_accelerators,
            record.num_devices,
            record.capacity_bytes,
            units.accelerator_ms,
            units.cpu_ms,
            units.size_bytes,
            units.supported,
            units.net_ms,
            units.net_source,
            units.net_offsets,
            units.net_sinks,
            *units.unit_nets,
            self.order,
            _places(self.order),
        )

    def values_ms(self, devices: Ints) -> NDArray[np.float64]:
        """(B,) milliseconds; see `Search`."""
        return self._timer.values_ms(self.units.expand(np.atleast_2d(devices)))

    def anneal(self, start: Ints, seed: int, steps: int, hot: float, cold: float) -> tuple[Ints, float]:
        """The best placement met and its value; see `Search`."""
        width, best = self.units.record.num_accelerators + 1, np.empty(self.units.num_units, dtype=np.int32)
        counts = np.zeros((len(self.units.net_ms), width), dtype=np.int32)
        loads = Loads(np.array(start, dtype=np.int32), np.zeros(width), np.zeros(width), counts)
        value = anneal_loads(self._graph, loads, best, _random_state(seed), steps, hot, cold, self._DOUBLINGS)
        return best, value


class PieceLatencySearch:
    """Piece-latency; see `kernel_latency`.

    Raises:
        InvalidValue: the workload has backward nodes.
    """

    hot = 0.02
    cold = 3e-4

    def __init__(self, record: DnnPartitioning) -> None:
        self._timer = PieceLatency(record)
        self.units = unit_graph(record, record.units)
        self.order = _unit_order(self.units, contract(record))
        units, graph = self.units, record.graph
        ops = np.argsort(units.op_unit, kind="stable").astype(np.int32)
        offsets = np.concatenate(([0], np.cumsum(np.bincount(units.op_unit)))).astype(np.int32)
        self._graph = PieceGraph(
            record.num_accelerators,
            record.num_devices,
            record.capacity_bytes,
            work_ms(record),
            record.transfer_ms,
            graph.input_offsets,
            graph.input_tensors,
            *graph.readers,
            units.op_unit,
            offsets,
            ops,
            units.size_bytes,
            units.supported,
            self.order,
            _places(self.order),
        )

    def values_ms(self, devices: Ints) -> NDArray[np.float64]:
        """(B,) milliseconds; see `Search`."""
        return self._timer.values_ms(self.units.expand(np.atleast_2d(devices)))

    def anneal(self, start: Ints, seed: int, steps: int, hot: float, cold: float) -> tuple[Ints, float]:
        """The best placement met and its value; see `Search`."""
        best = np.empty(self.units.num_units, dtype=np.int32)
        devices = np.array(start, dtype=np.int32)
        value = anneal_latency(self._graph, devices, best, _random_state(seed), steps, hot, cold)
        return best, value


def make_search(record: DnnPartitioning, objective: str) -> Search:
    """The search for `objective`.

    Raises:
        UnknownName: no such objective.
        InvalidValue: piece-latency of a training step.
    """
    if objective == "max-load":
        return MaxLoadSearch(record)
    if objective == "piece-latency":
        return PieceLatencySearch(record)
    raise UnknownName("objective", objective, OBJECTIVES)


def _unit_order(units: UnitGraph, contraction: Contraction) -> Ints:
    """(U,) units by the contracted unit of their first op, then by that op."""
    first = np.unique(units.op_unit, return_index=True)[1]
    return np.lexsort((first, contraction.units.op_unit[first])).astype(np.int32)


def _places(order: Ints) -> Ints:
    places = np.empty_like(order)
    places[order] = np.arange(len(order), dtype=np.int32)
    return places


def _random_state(seed: int) -> NDArray[np.uint64]:
    """(1,) a state of the kernels' generator, never 0."""
    return np.random.SeedSequence(seed).generate_state(1, dtype=np.uint64) | np.uint64(1)
