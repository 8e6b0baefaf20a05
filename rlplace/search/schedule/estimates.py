"""`Estimator`: what can be told of a placement without simulating it: when its list schedule ends, and its totals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.jit import Bools, Floats, Ints, Longs, kernel
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.ranks import list_order
from rlplace.search.schedule.eft import device_rules

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
