"""`eft`: earliest-finish-time list scheduling (HEFT without insertion; Topcuoglu et al. 2002), with busy copies.

`Estimator`: what can be told of a placement without simulating it: when its list schedule ends, and its totals.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.jit import Bools, Floats, Ints, Longs, kernel
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.compiled_problem import list_order
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


ESTIMATES = ("finish", "load", "link", "cut", "copies", "memory")
"""What is told of a placement:

- `finish`: seconds until the last op of its list schedule ends: ops in the order of the problem, copies sent as soon as
  their tensors exist, links without queues, launches for nothing (what `Greedy` reckons with);
- `load`: seconds that the busiest device computes;
- `link`: seconds that the busiest link sends;
- `cut`: seconds that all copies take;
- `copies`: how many there are;
- `memory`: bytes kept over room, on the fullest device.
"""


@dataclass(frozen=True, eq=False)
class Estimator:
    """A problem laid out for `of`."""

    order: Longs
    is_source: Bools
    tensor_op: Ints
    tensor_bytes: Floats
    input_offsets: Ints
    input_tensors: Ints
    op_time_s: Floats
    latency_s: Floats
    s_per_byte: Floats
    blocks: Bools
    occupies: Bools
    links: Bools
    held: Floats
    room: Floats

    @classmethod
    def of_problem(cls, problem: Problem, held: Floats, room: Floats) -> Estimator:
        """The estimator of a problem.

        Args:
            problem: what is placed.
            held: (N,) bytes that each op keeps where it is.
            room: (D,) bytes that each device has for them.
        """
        graph = problem.graph
        blocks, occupies = device_rules(problem.host)
        return cls(
            order=list_order(problem),
            is_source=graph.is_source,
            tensor_op=graph.tensor_op,
            tensor_bytes=graph.tensor_bytes.astype(np.float64),
            input_offsets=graph.input_offsets,
            input_tensors=graph.input_tensors,
            op_time_s=problem.costs.op_time_s,
            latency_s=problem.transfer_latency_s,
            s_per_byte=problem.transfer_s_per_byte,
            blocks=blocks,
            occupies=occupies,
            links=_links(problem),
            held=held,
            room=room,
        )

    def of(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
        """(B, 6) `ESTIMATES` of placements (B, N)."""
        found = np.zeros((len(placements), len(ESTIMATES)))
        for row, devices in enumerate(placements):
            held = np.bincount(devices, weights=self.held, minlength=len(self.room))
            found[row, 5] = (held / self.room).max()
            _estimate(
                found[row],
                devices,
                self.order,
                self.is_source,
                self.tensor_op,
                self.tensor_bytes,
                self.input_offsets,
                self.input_tensors,
                self.op_time_s,
                self.latency_s,
                self.s_per_byte,
                self.blocks,
                self.occupies,
                self.links,
            )
        return found


def _links(problem: Problem) -> Bools:
    """(D, D, L) bool: the links that each route holds."""
    host = problem.host
    number = {link.name: place for place, link in enumerate(host.links)}
    table = np.zeros((host.num_devices, host.num_devices, max(len(number), 1)), dtype=np.bool_)
    for route in host.routes:
        for link in route.links:
            table[host.device_index[route.source], host.device_index[route.destination], number[link]] = True
    return table


@kernel
def _estimate(
    found: Floats,
    devices: Ints,
    order: Longs,
    is_source: Bools,
    tensor_op: Ints,
    tensor_bytes: Floats,
    input_offsets: Ints,
    input_tensors: Ints,
    op_time_s: Floats,
    latency_s: Floats,
    s_per_byte: Floats,
    blocks: Bools,
    occupies: Bools,
    links: Bools,
) -> None:
    num_devices = len(occupies)
    ready_s = np.full((len(tensor_op), num_devices), -1.0)  # when a copy is there, -1 where there is none
    end_s = np.zeros(len(order))
    free_s, load_s, link_s = np.zeros(num_devices), np.zeros(num_devices), np.zeros(links.shape[2])
    cut_s, copies = 0.0, 0
    for op in order:
        if is_source[op]:
            continue
        device = devices[op]
        start, busy = 0.0, 0.0
        for other in range(num_devices):
            if occupies[device, other] or occupies[other, device]:
                start = max(start, free_s[other])
        for edge in range(input_offsets[op], input_offsets[op + 1]):
            tensor = input_tensors[edge]
            producer = tensor_op[tensor]
            home = devices[producer]
            if home == device:
                start = max(start, end_s[producer])
                continue
            if ready_s[tensor, device] < 0.0:
                transfer_s = latency_s[home, device] + tensor_bytes[tensor] * s_per_byte[home, device]
                ready_s[tensor, device] = end_s[producer] + transfer_s
                cut_s += transfer_s
                copies += 1
                for link in range(links.shape[2]):
                    if links[home, device, link]:
                        link_s[link] += transfer_s
                if blocks[home, device]:
                    busy += transfer_s
                    start = max(start, end_s[producer])
                    continue
            start = max(start, ready_s[tensor, device])
        end_s[op] = start + busy + op_time_s[op, device]
        for other in range(num_devices):
            if occupies[device, other]:
                free_s[other] = end_s[op]
                load_s[other] += op_time_s[op, device]
    found[0], found[1], found[2] = end_s.max(), load_s.max(), link_s.max()
    found[3], found[4] = cut_s, copies
