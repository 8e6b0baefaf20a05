"""`Figures`: what every lower bound is made of: least times of ops, who holds what, and who waits for whom."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.jit import Floats, Ints
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.compiled import compile_problem


class Figures(NamedTuple):
    """A problem as lower bounds see it. Sources take no time; a device where an op may not run takes for ever.

    Attributes:
        path_s: (N, D) float64, from when an op's inputs are on the device to its end, at least.
        work_s: (N, D) float64, for how long an op keeps all that the device holds from other ops, at least.
        holds: (D, A) float64, 1 where a device holds a single device.
        is_job: (N,) bool, ops that are not sources.
        label: (N,) int32: ops of one label share a device; every op has one.
        tensor_s: (T,) float64, least time from one device to another; infinite where there is no other.
    """

    path_s: Floats
    work_s: Floats
    holds: Floats
    is_job: NDArray[np.bool_]
    label: Ints
    tensor_s: Floats


def figures(problem: Problem) -> Figures:
    """The figures of a problem.

    With `run_ahead=1` a device launches an op only when the one before it has ended, so that its launch is work of the
    device; where launches are served by request, its inputs must be there as well, so that it is on every path too.
    """
    graph, compiled = problem.graph, compile_problem(problem)
    num_ops, num_devices = graph.num_ops, compiled.num_devices
    classes = graph.colocation.astype(np.int64)
    key = np.where(classes >= 0, classes, classes.max(initial=-1) + 1 + np.arange(num_ops))
    label = np.unique(key, return_inverse=True)[1].astype(np.int32)
    allowed = np.ones((int(label.max(initial=-1)) + 1, num_devices), dtype=np.bool_)
    if problem.allowed is not None:
        np.logical_and.at(allowed, label, problem.allowed)
    allowed[~allowed.any(axis=1)] = True
    is_job = ~graph.is_source
    time_s = np.where(is_job[:, None], problem.costs.op_time_s, 0.0)
    time_s = np.where(allowed[label], time_s, np.inf)
    launch_s = np.where(compiled.dispatcher >= 0, compiled.dispatch_s, 0.0) * (compiled.run_ahead == 1)
    work_s = np.where(is_job[:, None], time_s + launch_s, time_s)
    holds = ((compiled.atoms[:, None] >> np.arange(num_devices)) & 1).astype(np.float64)
    return Figures(
        path_s=work_s if compiled.by_request else time_s,
        work_s=work_s,
        holds=holds[:, holds.any(axis=0)],
        is_job=is_job,
        label=label,
        tensor_s=_least_transfer_s(problem),
    )


def _least_transfer_s(problem: Problem) -> NDArray[np.float64]:
    num_devices, num_bytes = problem.host.num_devices, problem.graph.tensor_bytes.astype(np.float64)
    apart = ~np.eye(num_devices, dtype=np.bool_)
    routes = np.stack((problem.transfer_latency_s[apart], problem.transfer_s_per_byte[apart]), axis=1)
    least_s = np.full(len(num_bytes), np.inf)
    for latency_s, s_per_byte in np.unique(routes, axis=0).tolist():
        least_s = np.minimum(least_s, latency_s + num_bytes * s_per_byte)
    return least_s
