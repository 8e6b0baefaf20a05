"""Lower bounds on the step time of any placement: what no search can beat.

Each holds for every placement, order and delay under the rules of docs/step-time-model.md: co-running, contention,
launches and waiting updates only make a step longer. The argument of each stands where it is computed.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.bounds.figures import Figures, figures
from rlplace.measure.bounds.paths import heads_and_tails
from rlplace.measure.bounds.work import best_weights, class_s, even_weights, head_tail_s, work_of_labels_s
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.compiled import compile_problem


def lower_bounds(problem: Problem, objective: Literal["latency", "throughput"] = "latency") -> dict[str, float]:
    """Seconds of every bound, by name; 0 where a bound says nothing.

    Args:
        problem: what is placed.
        objective: `latency`, or `throughput`: seconds per step of a full pipeline, where only work counts, launches
            left out.

    Raises:
        InvalidValue: a host that cannot be simulated.
    """
    known = figures(problem)
    if objective == "throughput":
        known = _without_launches(problem, known)
        nothing = np.zeros(problem.graph.num_ops)
        return {
            "total work": float(work_of_labels_s(known, even_weights(known)).sum()),
            "unequal devices": float(work_of_labels_s(known, best_weights(known)).sum()),
            "co-location class": class_s(known, nothing, nothing),
        }
    weights = best_weights(known)
    heads, tails = heads_and_tails(problem.graph, known, with_transfers=True)
    return {
        "critical path": _longest(known, *heads_and_tails(problem.graph, known, with_transfers=False)),
        "total work": float(work_of_labels_s(known, even_weights(known)).sum()),
        "unequal devices": float(work_of_labels_s(known, weights).sum()),
        "path with transfers": _longest(known, heads, tails),
        "heads and tails": max(head_tail_s(known, heads, tails, each) for each in (even_weights(known), weights)),
        "co-location class": class_s(known, heads, tails),
        "dispatcher": _dispatcher_s(problem, known, tails),
        "memory-forced transfer": _forced_transfer_s(problem, known, heads, tails),
    }


def lower_bound_s(problem: Problem, objective: Literal["latency", "throughput"] = "latency") -> tuple[float, str]:
    """The best of `lower_bounds`, and its name."""
    bounds = lower_bounds(problem, objective)
    name = max(bounds, key=lambda key: bounds[key])
    return bounds[name], name


def critical_path_s(problem: Problem) -> float:
    """Seconds of the longest path, every op on its fastest device, every transfer free.

    Ops on a path run one after the other wherever they are, and none takes less than on its fastest device.
    """
    known = figures(problem)
    return _longest(known, *heads_and_tails(problem.graph, known, with_transfers=False))


def _without_launches(problem: Problem, known: Figures) -> Figures:
    time_s = np.where(known.is_job[:, None], problem.costs.op_time_s, 0.0)
    return known._replace(work_s=np.where(np.isinf(known.work_s), np.inf, time_s))


def _longest(known: Figures, heads: NDArray[np.float64], tails: NDArray[np.float64]) -> float:
    return float((heads + known.path_s.min(axis=1) + tails).max(initial=0.0, where=known.is_job))


def _dispatcher_s(problem: Problem, known: Figures, tails: NDArray[np.float64]) -> float:
    """Seconds to launch everything.

    Each op that can only run on devices with a dispatcher is launched by one; of K dispatchers, one launches at least
    1/K of them, one after the other, and the op that it launches last then runs, and what follows it.
    """
    compiled = compile_problem(problem)
    can_go = np.isfinite(known.work_s)
    launched = np.flatnonzero(known.is_job & ~(can_go & (compiled.dispatcher < 0)).any(axis=1))
    if not compiled.launches or not len(launched):
        return 0.0
    time_s = np.where(can_go[launched], problem.costs.op_time_s[launched], np.inf).min(axis=1)
    turns = -(-len(launched) // compiled.num_dispatchers)
    return float(turns * compiled.dispatch_s + (time_s + tails[launched]).min())


def _forced_transfer_s(
    problem: Problem, known: Figures, heads: NDArray[np.float64], tails: NDArray[np.float64]
) -> float:
    """Seconds of a path that must hold a transfer, where memory forces ops apart.

    Parameters, inputs and optimizer state of ops that hang together (by tensors or by co-location) stay all step long.
    Where no device has room for all of them, at least two devices share them, so some tensor goes from one device to
    another: its producer's head and time, its cheapest transfer, and the shortest of its readers' ways to the end.
    Every placement has such a tensor; the least over all of them is the bound.
    """
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    graph, compiled = problem.graph, compile_problem(problem)
    num_labels = int(known.label.max(initial=-1)) + 1
    producers = known.label[graph.tensor_op[graph.input_tensors]]
    readers = known.label[graph.edge_op]
    joined = coo_matrix((np.ones(len(readers)), (producers, readers)), shape=(num_labels, num_labels))
    count, part = connected_components(joined, directed=False)
    part = part[known.label]
    resident = np.where(graph.is_source, graph.output_bytes, 0) + graph.state_bytes
    resident_bytes = np.bincount(part, weights=resident, minlength=count)
    account = np.where(compiled.pool >= 0, compiled.pool, np.arange(compiled.num_devices))
    room_bytes = (compiled.capacity_bytes[account] - compiled.context_bytes).astype(np.float64)
    can_hold = np.ones((count, compiled.num_devices), dtype=np.bool_)
    np.logical_and.at(can_hold, part, np.isfinite(known.work_s))
    is_forced = ~(can_hold & (resident_bytes[:, None] <= room_bytes)).any(axis=1)
    apart = producers != readers
    tensor, reader = graph.input_tensors[apart], graph.edge_op[apart]
    producer = graph.tensor_op[tensor]
    least_s = known.path_s.min(axis=1)
    way_s = heads[producer] + least_s[producer] + known.tensor_s[tensor] + least_s[reader] + tails[reader]
    shortest_s = np.full(count, np.inf)
    np.minimum.at(shortest_s, part[reader], way_s)
    forced_s = shortest_s[is_forced & np.isfinite(shortest_s)]
    return float(forced_s.max(initial=0.0))
