"""The plainest planner there is: one topological order of ops and transfers, no thought of time."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.problem import Plan


def naive_plan(graph: OpGraph, devices: NDArray[np.int32], generator: np.random.Generator | None = None) -> Plan:
    """A plan for (N,) `devices`: ops by index, each transfer right after its producer; or in a random order.

    An op that updates a tensor in place comes after every other reader and every transfer of it.
    """
    n, devices = graph.num_ops, np.asarray(devices)
    needed = sorted(
        {
            (int(tensor), int(devices[op]))
            for tensor, op in zip(graph.input_tensors, graph.edge_op, strict=True)
            if devices[op] != devices[graph.tensor_op[tensor]]
        }
    )
    transfer_of = {key: n + k for k, key in enumerate(needed)}
    before: set[tuple[int, int]] = {(int(graph.tensor_op[tensor]), item) for (tensor, _), item in transfer_of.items()}
    for tensor, op in zip(graph.input_tensors.tolist(), graph.edge_op.tolist(), strict=True):
        before.add((transfer_of.get((tensor, int(devices[op])), int(graph.tensor_op[tensor])), op))
    for op, tensor in zip(graph.mutation_op.tolist(), graph.mutation_tensor.tolist(), strict=True):
        readers = graph.edge_op[graph.input_tensors == tensor].tolist()
        updaters = set(graph.mutation_op[graph.mutation_tensor == tensor].tolist())
        before |= {(reader, op) for reader in readers if reader != op and (reader not in updaters or reader < op)}
        before |= {(item, op) for (moved, _), item in transfer_of.items() if moved == tensor}
    total = n + len(needed)
    keys = [float(op) for op in range(n)] + [float(graph.tensor_op[tensor]) + 0.5 for tensor, _ in needed]
    if generator is not None:
        keys = generator.random(total).tolist()
    return Plan(
        devices=devices,
        transfer_tensor=np.array([tensor for tensor, _ in needed], dtype=np.int32),
        transfer_destination=np.array([device for _, device in needed], dtype=np.int32),
        sequence=np.array(topological(total, before, keys), dtype=np.int32),
    )


def random_devices(graph: OpGraph, num_devices: int, generator: np.random.Generator) -> NDArray[np.int32]:
    """(N,) a random device for every op, one for ops that live together."""
    devices = generator.integers(0, num_devices, graph.num_ops, dtype=np.int32)
    of_class = generator.integers(0, num_devices, int(graph.colocation.max(initial=-1)) + 1, dtype=np.int32)
    together = graph.colocation >= 0
    devices[together] = of_class[graph.colocation[together]]
    return devices


def topological(total: int, before: set[tuple[int, int]], keys: list[float]) -> list[int]:
    """All items, each after those that come before it, else by key."""
    waiting, after = [0] * total, [[] for _ in range(total)]
    for first, second in before:
        after[first].append(second)
        waiting[second] += 1
    ready = [(keys[item], item) for item in range(total) if not waiting[item]]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        item = heapq.heappop(ready)[1]
        order.append(item)
        for successor in after[item]:
            waiting[successor] -= 1
            if not waiting[successor]:
                heapq.heappush(ready, (keys[successor], successor))
    assert len(order) == total, "a cycle"
    return order
