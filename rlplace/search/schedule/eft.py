"""`eft`: earliest-finish-time list scheduling (HEFT without insertion; Topcuoglu et al. 2002), with busy copies."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.jit import Bools, Floats, Ints, Longs, kernel
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.ranks import list_order
from rlplace.search.task import Task


def eft(problem: Problem, priorities: NDArray[np.float64] | None = None) -> NDArray[np.int32]:
    """(N,) int32: ops in order of priority, each on the device where it would end first.

    A parameter or input goes where its first reader goes, and ops that live together follow the first of them; ops go
    only where they may. A copy takes its route's time; where it blocks the destination it takes the device's time too.

    Args:
        problem: gangs take part as devices that occupy their members.
        priorities: (N,) larger first, higher for an op than for its readers; the order of the problem by default.
    """
    graph, host = problem.graph, problem.host
    order = list_order(problem)
    if priorities is not None:
        order = np.lexsort((np.arange(graph.num_ops), -priorities)).astype(np.int64)
    blocks, occupies = device_rules(host)
    return np.asarray(
        _schedule(
            order,
            graph.is_source,
            graph.colocation,
            graph.tensor_op,
            graph.tensor_bytes.astype(np.float64),
            graph.input_offsets,
            graph.input_tensors,
            problem.costs.op_time_s,
            problem.transfer_latency_s,
            problem.transfer_s_per_byte,
            blocks,
            occupies,
            _allowed(problem),
        )
    )


def device_rules(host: Host) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """(D, D) where a copy from a device keeps the other busy, and (D, D) which devices a device keeps busy.

    A device keeps itself busy, and a gang its members.
    """
    blocks = np.zeros((host.num_devices, host.num_devices), dtype=np.bool_)
    for route in host.routes:
        if route.links and route.blocks_destination:
            blocks[host.device_index[route.source], host.device_index[route.destination]] = True
    occupies = np.eye(host.num_devices, dtype=np.bool_)
    for index, device in enumerate(host.devices):
        for member in device.members:
            occupies[index, host.device_index[member]] = True
    return blocks, occupies


def solve_eft(task: Task) -> None:
    """Scores `eft`."""
    task.score(eft(task.problem))


def _allowed(problem: Problem) -> NDArray[np.bool_]:
    """(N, D): where an op and all that live with it may run."""
    classes = problem.graph.colocation
    table = np.ones((problem.graph.num_ops, problem.host.num_devices), dtype=np.bool_)
    if problem.allowed is not None:
        together = np.ones((int(classes.max(initial=-1)) + 1, problem.host.num_devices), dtype=np.bool_)
        members = classes >= 0
        np.logical_and.at(together, classes[members], problem.allowed[members])
        table[:] = problem.allowed
        table[members] = together[classes[members]]
    return table


@kernel
def _schedule(
    order: Longs,
    is_source: Bools,
    colocation: Ints,
    tensor_op: Ints,
    tensor_bytes: Floats,
    input_offsets: Ints,
    input_tensors: Ints,
    op_time_s: Floats,
    latency_s: Floats,
    s_per_byte: Floats,
    blocks: Bools,
    occupies: Bools,
    allowed: Bools,
) -> Ints:
    num_ops, num_devices = op_time_s.shape
    num_classes = 1
    for op in range(num_ops):
        num_classes = max(num_classes, colocation[op] + 1)
    class_device = np.full(num_classes, -1, np.int32)
    placed = np.full(num_ops, -1, np.int32)
    ready_s = np.full((len(tensor_op), num_devices), -1.0)  # when a copy is there, -1 where there is none
    end_s = np.zeros(num_ops)
    free_s = np.zeros(num_devices)
    for position in range(num_ops):
        op = order[position]
        if is_source[op]:
            continue
        fixed = class_device[colocation[op]] if colocation[op] >= 0 else -1
        best, best_end = -1, np.inf
        for device in range(num_devices):
            if (fixed >= 0 and device != fixed) or not allowed[op, device]:
                continue
            available = 0.0
            for other in range(num_devices):
                if occupies[device, other] or occupies[other, device]:
                    available = max(available, free_s[other])
            arrival, busy = 0.0, 0.0
            for edge in range(input_offsets[op], input_offsets[op + 1]):
                tensor = input_tensors[edge]
                producer = tensor_op[tensor]
                home = placed[producer]
                if home < 0 and colocation[producer] >= 0:
                    home = class_device[colocation[producer]]
                if home < 0 or home == device:
                    arrival = max(arrival, end_s[producer])
                elif ready_s[tensor, device] >= 0.0:
                    arrival = max(arrival, ready_s[tensor, device])
                else:
                    cost = latency_s[home, device] + tensor_bytes[tensor] * s_per_byte[home, device]
                    if blocks[home, device]:
                        busy += cost
                        arrival = max(arrival, end_s[producer])
                    else:
                        arrival = max(arrival, end_s[producer] + cost)
            end = max(available, arrival) + busy + op_time_s[op, device]
            if end < best_end:
                best, best_end = device, end
        start = best_end - op_time_s[op, best]
        for edge in range(input_offsets[op], input_offsets[op + 1]):
            tensor = input_tensors[edge]
            producer = tensor_op[tensor]
            if placed[producer] < 0:  # a source that nobody has read yet
                if colocation[producer] >= 0:
                    if class_device[colocation[producer]] < 0:
                        class_device[colocation[producer]] = _first_allowed(allowed[producer], best)
                    placed[producer] = class_device[colocation[producer]]
                else:
                    placed[producer] = _first_allowed(allowed[producer], best)
            if placed[producer] != best and ready_s[tensor, best] < 0.0:
                ready_s[tensor, best] = start
        placed[op] = best
        if colocation[op] >= 0 and class_device[colocation[op]] < 0:
            class_device[colocation[op]] = best
        end_s[op] = best_end
        for other in range(num_devices):
            if occupies[best, other]:
                free_s[other] = best_end
    for op in range(num_ops):
        if placed[op] < 0:
            fixed = class_device[colocation[op]] if colocation[op] >= 0 else -1
            placed[op] = fixed if fixed >= 0 else _first_allowed(allowed[op], 0)
    return placed


@kernel
def _first_allowed(allowed: Bools, wanted: int) -> int:
    """`wanted` if it is allowed, else the first device that is."""
    if allowed[wanted]:
        return wanted
    for device in range(len(allowed)):
        if allowed[device]:
            return device
    return wanted
