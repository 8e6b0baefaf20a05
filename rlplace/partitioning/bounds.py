"""Proven lower bounds on the two published objectives."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from rlplace.graphs.formats.dnn_partitioning import DnnPartitioning
from rlplace.graphs.paths import longest_after, longest_before
from rlplace.partitioning.unit_graph import UnitGraph, unit_graph


def largest_unit_ms(units: UnitGraph) -> float:
    """The longest unit where it is fastest: a unit is on one device, whose load is at least the unit's work."""
    return float(np.max(np.minimum(_accelerator_ms(units), _cpu_ms(units)), initial=0.0))


def shared_work_ms(units: UnitGraph) -> float:
    """All work shared out without remainder and without transfers.

    With a share `x_u` of each unit on the CPUs, the K accelerators' loads are at least `sum p_u (1 - x_u)` together, so
    the largest is at least a K-th of that; the CPUs' load is at least `sum q_u x_u`; what is on accelerators fits in K
    memories. Every placement is such shares of 0 and 1, so the linear program's least maximum bounds them all. It
    contains the memory-forced work of the CPUs: where K memories do not hold everything, the shares cannot be 0.
    """
    record = units.record
    count, k = units.num_units, record.num_accelerators
    if not record.num_cpus:
        return float(units.accelerator_ms.sum()) / k
    low = np.where(units.supported & (k > 0), 0.0, 1.0)
    scale = max(k * record.capacity_bytes, 1.0)
    table = np.zeros((3, count + 1))
    table[0, :count], table[0, count] = -units.accelerator_ms, -k
    table[1, :count], table[1, count] = units.cpu_ms, -1.0
    table[2, :count] = -units.size_bytes / scale
    room = np.array([-units.accelerator_ms.sum(), 0.0, (k * record.capacity_bytes - units.size_bytes.sum()) / scale])
    goal = np.zeros(count + 1)
    goal[count] = 1.0
    limits = np.stack((np.append(low, 0.0), np.append(np.ones(count), np.inf)), axis=1)
    answer = linprog(goal, A_ub=table, b_ub=room, bounds=limits, method="highs")
    return float(answer.fun) * (1 - 1e-9) if answer.status == 0 else 0.0


def longest_path_ms(record: DnnPartitioning) -> float:
    """The longest path, every op where it is fastest, every transfer free.

    An op finishes at least its own time after its sources: on a CPU by definition; in a piece of an accelerator, all
    members finish together, after the work of all of them, so the work of a path's members inside the piece, which come
    one after the other, lies between the finish before the piece and its own.
    """
    return float(np.max(_through_ms(record, _fastest_ms(record)), initial=0.0))


def forced_work_ms(record: DnnPartitioning) -> float:
    """The least latency whose forced work fits on the accelerators.

    With a latency L, an op whose longest path, itself on a CPU and all others where they are fastest, is longer than L
    is on an accelerator. The pieces of one accelerator run one after the other (each has a path from the one before
    it), so the forced work is at most K L, and the forced memory fits in K memories. The forced set shrinks as L grows,
    so an L that fails is a bound, and bisection finds the largest to within 1e-6 of itself.
    """
    k = record.num_accelerators
    fastest = _fastest_ms(record)
    through = _through_ms(record, fastest)
    cpu_ms = record.cpu_ms if record.num_cpus else np.full(record.num_ops, np.inf)
    on_cpu = through - fastest + cpu_ms
    cpu_only = ~record.supported

    def fails(latency_ms: float) -> bool:
        forced = on_cpu > latency_ms * (1 + 1e-9)
        work, size = float(record.accelerator_ms[forced].sum()), float(record.size_bytes[forced].sum())
        return bool(np.any(forced & cpu_only)) or work > k * latency_ms or size > k * record.capacity_bytes

    low, high = 0.0, float(record.cpu_ms.sum() + record.accelerator_ms.sum()) + 1.0
    if fails(high):
        return 0.0
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if fails(middle) else (low, middle)
    return low


def lower_bound_ms(record: DnnPartitioning, objective: str) -> tuple[float, str]:
    """The best bound on `objective` (`max-load` or `piece-latency`) in milliseconds, and its name."""
    if objective == "max-load":
        units = unit_graph(record, record.units)
        bounds = {"shared work": shared_work_ms(units), "largest unit": largest_unit_ms(units)}
    else:
        bounds = {"longest path": longest_path_ms(record), "forced work": forced_work_ms(record)}
    name = max(bounds, key=lambda key: bounds[key])
    return bounds[name], name


def _accelerator_ms(units: UnitGraph) -> NDArray[np.float64]:
    can = units.supported & (units.record.num_accelerators > 0) & (units.size_bytes <= units.record.capacity_bytes)
    return np.where(can, units.accelerator_ms, np.inf)


def _cpu_ms(units: UnitGraph) -> NDArray[np.float64]:
    return units.cpu_ms if units.record.num_cpus else np.full(units.num_units, np.inf)


def _fastest_ms(record: DnnPartitioning) -> NDArray[np.float64]:
    """(N,) each op's time on the fastest device that can run it."""
    accelerator = np.where(record.supported & (record.num_accelerators > 0), record.accelerator_ms, np.inf)
    return np.minimum(accelerator, record.cpu_ms) if record.num_cpus else accelerator


def _through_ms(record: DnnPartitioning, op_ms: NDArray[np.float64]) -> NDArray[np.float64]:
    """(N,) the longest path through each op."""
    graph = record.graph
    producers = graph.tensor_op[graph.input_tensors]
    edges = graph.input_offsets, producers, np.zeros(len(producers))
    return op_ms + longest_before(op_ms, *edges) + longest_after(op_ms, *edges)
