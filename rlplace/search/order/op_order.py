"""`shorten` and `lighten`: better priorities for the ops of a placement, for a shorter step or a lower peak."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.ranks import default_priorities
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.order.memory_order import least_memory_order
from rlplace.search.placed_paths import placed_paths


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
    best, rule, best_s, spent = default_priorities(problem), _default_rule(problem), before.step_time_s, 1
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
        return _order(default_priorities(problem), _default_rule(problem), before, before)
    return _order(priorities, "least memory", before, after)


def _default_rule(problem: Problem) -> str:
    """What makes the default priorities, in words; what is not cut has one order."""
    is_cut = problem.graph.num_micro_batches > 1
    return problem.op_order if is_cut and problem.op_order != "rank" else "upward rank"


def _rules(problem: Problem, devices: NDArray[np.int32]) -> list[tuple[str, NDArray[np.float64]]]:
    paths, without = placed_paths(problem, devices), placed_paths(problem, devices, transfers=False)
    ahead = paths.op_s + paths.after_s
    return [
        ("critical path", ahead),
        ("critical path without transfers", without.op_s + without.after_s),
        ("longest path through", ahead + paths.before_s),
        ("given order", -np.arange(problem.graph.num_ops, dtype=np.float64)),
        ("least memory", _as_priorities(problem, least_memory_order(problem, devices))),
    ]


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
