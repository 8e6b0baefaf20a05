"""Lower bounds on the step time of any placement: what no search can beat."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rlplace.measure.problem import Problem


def critical_path_s(problem: Problem) -> float:
    """Seconds of the longest path, every op on its fastest device, every transfer free.

    Ops on a path run one after the other wherever they are, and none takes less than on its fastest device.
    """
    graph = problem.graph
    fastest_s = np.where(graph.is_source, 0.0, problem.costs.op_time_s.min(axis=1))
    return float(_longest_path(fastest_s, graph.input_offsets, graph.input_tensors, graph.tensor_op))


def total_work_s(problem: Problem) -> float:
    """Seconds of all work, spread evenly over the devices that are not gangs.

    An op keeps each member of a gang busy, so on a gang of m devices it is m times its time of work; it is counted
    where it is least work. Devices do at most one second of work a second.
    """
    host = problem.host
    sizes = np.array([max(len(device.members), 1) for device in host.devices], dtype=np.float64)
    work_s = (problem.costs.op_time_s * sizes).min(axis=1)
    num_plain = sum(not device.members for device in host.devices) or 1
    return float(work_s[~problem.graph.is_source].sum() / num_plain)


def lower_bound_s(problem: Problem) -> tuple[float, str]:
    """The best bound on a step's latency, and its name."""
    bounds = {"critical path": critical_path_s(problem), "total work": total_work_s(problem)}
    name = max(bounds, key=lambda key: bounds[key])
    return bounds[name], name


@njit(cache=True)
def _longest_path(  # type: ignore[no-untyped-def]
    op_s: NDArray[np.float64], input_offsets, input_tensors, tensor_op
):
    end_s = np.zeros(len(op_s))
    longest = 0.0
    for op in range(len(op_s)):
        start = 0.0
        for edge in range(input_offsets[op], input_offsets[op + 1]):
            start = max(start, end_s[tensor_op[input_tensors[edge]]])
        end_s[op] = start + op_s[op]
        longest = max(longest, end_s[op])
    return longest
