"""`shorten` and `lighten`: better priorities for the ops of a placement, for a shorter step or a lower peak."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.jit import Floats, Ints, kernel
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.ranks import upward_ranks
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.order.memory_order import least_memory_order


@dataclass(frozen=True, eq=False)
class OpOrder:
    """Priorities, and what they gain over the default ones.

    Attributes:
        priorities: (N,) float64 for the simulator, higher runs first.
        rule: what made them.
        step_before_s, step_after_s: step time; infinite where memory does not suffice.
        peak_before_bytes, peak_after_bytes: (D,) peak of each device.
    """

    priorities: NDArray[np.float64]
    rule: str
    step_before_s: float
    step_after_s: float
    peak_before_bytes: tuple[int, ...]
    peak_after_bytes: tuple[int, ...]


def shorten(problem: Problem, devices: NDArray[np.int32], *, evaluations: int = 300, seed: int = 0) -> OpOrder:
    """Priorities for the shortest step found; never worse than the default ones.

    Rules first: the longest path ahead with the actual times and transfers of this placement (Kahn's list scheduling by
    critical path), the same without transfers, the longest path through an op, the given order, the order that needs
    least memory. Then random keys (Bean 1994): the priorities of a few ops at a time are moved, and the move is kept if
    the step is no longer.

    Args:
        problem: the ops.
        devices: (N,) where they are.
        evaluations: plans that may be simulated.
        seed: of the random keys.

    Raises:
        InvalidValue: a placement that does not fit the problem, or no evaluations.
    """
    if evaluations < 1:
        raise InvalidValue("evaluations", evaluations, "at least 1", where="op order")
    simulator = Simulator(problem, threads=1)
    devices = problem.check_placement(devices)
    before = simulator.plan_and_time(devices)[1]
    best, rule, best_s, spent = upward_ranks(problem), "upward rank", before.step_time_s, 1
    for name, priorities in _rules(problem, devices):
        if spent >= evaluations:
            break
        step_s = float(simulator.step_times(devices[None], priorities)[0])
        spent += 1
        if step_s < best_s:
            best, rule, best_s = priorities, name, step_s
    keys, start_s = _keys(best), best_s
    generator = np.random.default_rng(seed)
    jobs = np.flatnonzero(~problem.graph.is_source)
    while spent < evaluations and len(jobs) > 1:
        count = int(min(len(jobs), 1 + generator.geometric(0.3)))
        moved = keys.copy()
        chosen = generator.choice(jobs, count, replace=False)
        moved[chosen] += generator.normal(0.0, 0.5 * generator.random() ** 2, count)
        step_s = float(simulator.step_times(devices[None], moved)[0])
        spent += 1
        if step_s <= best_s:
            keys, best_s = moved, step_s
    if best_s < start_s:
        best, rule = keys, f"random keys from {rule}"
    return _order(best, rule, before, simulator.plan_and_time(devices, best)[1])


def lighten(problem: Problem, devices: NDArray[np.int32], *, max_states: int | None = None) -> OpOrder:
    """Priorities for the lowest peak found, as a share of its device's memory; the default ones if they need no more.

    Args:
        problem: the ops.
        devices: (N,) where they are.
        max_states: as in `least_memory_order`.

    Raises:
        InvalidValue: a placement that does not fit the problem.
    """
    simulator = Simulator(problem, threads=1)
    devices = problem.check_placement(devices)
    before = simulator.plan_and_time(devices)[1]
    priorities = _as_priorities(problem, least_memory_order(problem, devices, max_states))
    after = simulator.plan_and_time(devices, priorities)[1]
    if _fullness(problem, after) >= _fullness(problem, before):
        return _order(upward_ranks(problem), "upward rank", before, before)
    return _order(priorities, "least memory", before, after)


def placed_ranks(problem: Problem, devices: NDArray[np.int32], *, transfers: bool = True) -> NDArray[np.float64]:
    """(N,) float64 seconds: longest remaining path from the start of each op, every op and tensor where it is.

    Args:
        problem: the ops.
        devices: (N,) where they are.
        transfers: whether what is read on another device counts its transfer.
    """
    graph = problem.graph
    op_s = np.where(graph.is_source, 0.0, problem.costs.op_time_s[np.arange(graph.num_ops), devices])
    latency_s, s_per_byte = problem.transfer_latency_s * transfers, problem.transfer_s_per_byte * transfers
    offsets, readers = graph.readers
    tensor_bytes = graph.tensor_bytes.astype(np.float64)
    return _placed_ranks(op_s, devices, tensor_bytes, latency_s, s_per_byte, graph.output_offsets, offsets, readers)


def _rules(problem: Problem, devices: NDArray[np.int32]) -> list[tuple[str, NDArray[np.float64]]]:
    ahead = placed_ranks(problem, devices)
    return [
        ("critical path", ahead),
        ("critical path without transfers", placed_ranks(problem, devices, transfers=False)),
        ("longest path through", ahead + _heads(problem, devices)),
        ("given order", -np.arange(problem.graph.num_ops, dtype=np.float64)),
        ("least memory", _as_priorities(problem, least_memory_order(problem, devices))),
    ]


def _heads(problem: Problem, devices: NDArray[np.int32]) -> NDArray[np.float64]:
    """(N,) seconds: longest path to the start of each op, as long as transfers are."""
    graph = problem.graph
    producers, readers = graph.tensor_op[graph.input_tensors], graph.edge_op
    source, destination = devices[producers], devices[readers]
    num_bytes = graph.tensor_bytes[graph.input_tensors]
    op_s = np.where(graph.is_source, 0.0, problem.costs.op_time_s[np.arange(graph.num_ops), devices])
    way_s = problem.transfer_latency_s[source, destination]
    way_s = way_s + num_bytes * problem.transfer_s_per_byte[source, destination]
    return _longest_to(op_s, graph.input_offsets, producers, way_s)


def _as_priorities(problem: Problem, order: NDArray[np.int64]) -> NDArray[np.float64]:
    priorities = np.zeros(problem.graph.num_ops)
    priorities[order] = np.arange(len(order), 0, -1)
    return priorities


def _keys(priorities: NDArray[np.float64]) -> NDArray[np.float64]:
    """The same order, as keys evenly spread over 0..1."""
    keys = np.empty(len(priorities))
    keys[np.argsort(-priorities, kind="stable")] = np.linspace(1.0, 0.0, len(priorities))
    return keys


def _fullness(problem: Problem, measured: Measurement) -> float:
    """Largest share of its memory that a device's peak takes."""
    capacity = [device.memory_bytes for device in problem.host.devices]
    return max(peak / size for peak, size in zip(measured.peak_bytes, capacity, strict=True))


def _order(priorities: NDArray[np.float64], rule: str, before: Measurement, after: Measurement) -> OpOrder:
    return OpOrder(priorities, rule, before.step_time_s, after.step_time_s, before.peak_bytes, after.peak_bytes)


@kernel
def _placed_ranks(
    op_s: Floats,
    devices: Ints,
    tensor_bytes: Floats,
    latency_s: Floats,
    s_per_byte: Floats,
    output_offsets: Ints,
    reader_offsets: Ints,
    readers: Ints,
) -> Floats:
    ranks = np.zeros(len(op_s))
    for i in range(len(op_s) - 1, -1, -1):
        longest = 0.0
        for t in range(output_offsets[i], output_offsets[i + 1]):
            for a in range(reader_offsets[t], reader_offsets[t + 1]):
                source, destination = devices[i], devices[readers[a]]
                way_s = latency_s[source, destination] + tensor_bytes[t] * s_per_byte[source, destination]
                longest = max(longest, way_s + ranks[readers[a]])
        ranks[i] = op_s[i] + longest
    return ranks


@kernel
def _longest_to(op_s: Floats, input_offsets: Ints, producers: Ints, way_s: Floats) -> Floats:
    heads = np.zeros(len(op_s))
    for i in range(len(op_s)):
        for edge in range(input_offsets[i], input_offsets[i + 1]):
            heads[i] = max(heads[i], heads[producers[edge]] + op_s[producers[edge]] + way_s[edge])
    return heads
