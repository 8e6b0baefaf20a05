"""`carried_plan`: the plan of one graph of a model for another: other shapes, evaluation, the loss elsewhere.

An op is known by its role: phase, module, target, micro-batch, and which of several alike it is in the order of the
graph. What has a twin in the planned graph goes where the twin is, in its place in the order. What has none goes with
its module, or with what it reads.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from rlplace.graphs.interpreter import require_program
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.plan import Plan

Role = tuple[object, ...]


def carried_plan(graph: OpGraph, plan: Plan, other: OpGraph, *, last: Collection[int] = ()) -> Plan:
    """A plan for `other`, parameters and buffers where `plan` has them.

    Args:
        graph: of the same model as `other`, with its program.
        plan: of `graph`.
        other: with its program.
        last: ops of `other` that run after all others, and send what they make after all others; none of the others
            reads from them.
    """
    devices, keys = _carried(graph, plan, other)
    sources = require_program(other).sources
    for tensor, op in zip(other.input_tensors.tolist(), other.edge_op.tolist(), strict=True):
        source = int(other.tensor_op[tensor])
        if source in last and source in sources:  # has no twin, and may be wherever it is read
            devices[source] = devices[op]
    return _planned(other, devices, keys, frozenset(last))


def _carried(graph: OpGraph, plan: Plan, other: OpGraph) -> tuple[list[int], list[float]]:
    """Devices of the ops of `other`, and numbers that order them."""
    sequence = plan.sequence.tolist()
    position = {item: index for index, item in enumerate(sequence)}
    planned = plan.devices.tolist()
    twins = {role: op for op, role in enumerate(_roles(graph))}
    alike: dict[Role, list[int]] = defaultdict(list)
    for role, op in twins.items():
        alike[role[:-1]].append(op)
    of_module = {module: found.most_common(1)[0][0] for module, found in _by_module(graph, planned).items()}
    devices, keys = [0] * other.num_ops, [0.0] * other.num_ops
    offsets, inputs, producers = other.input_offsets.tolist(), other.input_tensors.tolist(), other.tensor_op.tolist()
    for op, role in enumerate(_roles(other)):
        read = [producers[tensor] for tensor in inputs[offsets[op] : offsets[op + 1]]]
        after = max((keys[each] for each in read), default=0.0)
        twin = twins.get(role, alike[role[:-1]][-1] if alike.get(role[:-1]) else None)
        if twin is not None:
            devices[op], keys[op] = planned[twin], max(float(position[twin]), after)
        else:
            near = devices[max(read, key=keys.__getitem__)] if read else 0
            devices[op], keys[op] = of_module.get((other.phases[op], other.modules[op]), near), after
    _keep_together(other, devices)
    return devices, keys


def _roles(graph: OpGraph) -> Iterator[Role]:
    """What each op is in the model, the last part telling those that are alike apart."""
    sources = require_program(graph).sources
    phases, micro_batches = graph.phases.tolist(), graph.micro_batch.tolist()
    seen: Counter[Role] = Counter()
    for op in range(graph.num_ops):
        source = sources.get(op)
        if source is not None and source.kind != "constant":
            kind: Role = (source.kind, source.key, micro_batches[op])
        else:
            kind = (phases[op], graph.modules[op], graph.targets[op], micro_batches[op])
        yield (*kind, seen[kind])
        seen[kind] += 1


def _by_module(graph: OpGraph, devices: Sequence[int]) -> dict[tuple[int, str], Counter[int]]:
    found: dict[tuple[int, str], Counter[int]] = defaultdict(Counter)
    for op, module in enumerate(graph.modules):
        found[int(graph.phases[op]), module][devices[op]] += 1
    return found


def _keep_together(graph: OpGraph, devices: list[int]) -> None:
    """Ops that live together go where the state among them is, which the model has in one place only."""
    members: dict[int, list[int]] = defaultdict(list)
    for op, together in enumerate(graph.colocation.tolist()):
        if together >= 0:
            members[together].append(op)
    for ops in members.values():
        state = [devices[op] for op in ops if graph.targets[op] in ("parameter", "buffer")]
        home = state[0] if state else Counter(devices[op] for op in ops).most_common(1)[0][0]
        for op in ops:
            if graph.targets[op] not in ("parameter", "buffer"):
                devices[op] = home


def _planned(graph: OpGraph, devices: list[int], keys: list[float], last: Collection[int]) -> Plan:
    """Ops by part and key, each transfer as soon as there is something to send; updates in place after all readers."""
    n, producers = graph.num_ops, graph.tensor_op.tolist()
    edges = list(zip(graph.input_tensors.tolist(), graph.edge_op.tolist(), strict=True))
    needed = sorted({(tensor, devices[op]) for tensor, op in edges if devices[op] != devices[producers[tensor]]})
    transfers = {key: n + index for index, key in enumerate(needed)}
    sent: dict[int, list[int]] = defaultdict(list)
    readers: dict[int, list[int]] = defaultdict(list)
    before: set[tuple[int, int]] = set()
    for (tensor, _), item in transfers.items():
        before.add((producers[tensor], item))
        sent[tensor].append(item)
    for tensor, op in edges:
        before.add((transfers.get((tensor, devices[op]), producers[tensor]), op))
        readers[tensor].append(op)
    updates = set(zip(graph.mutation_tensor.tolist(), graph.mutation_op.tolist(), strict=True))
    for tensor, op in updates:  # two of one tensor (a parameter that `forward` writes) go in the order of the graph
        waited = (item for item in (*readers[tensor], *sent[tensor]) if (tensor, item) not in updates or item < op)
        before |= {(item, op) for item in waited if item != op}
    ranks = [(op in last, keys[op]) for op in range(n)]
    ranks += [(producers[tensor] in last, keys[producers[tensor]]) for tensor, _ in needed]
    return Plan(
        devices=np.array(devices, dtype=np.int32),
        transfer_tensor=np.array([tensor for tensor, _ in needed], dtype=np.int32),
        transfer_destination=np.array([device for _, device in needed], dtype=np.int32),
        sequence=np.array(_ordered(ranks, before), dtype=np.int32),
    )


def _ordered(ranks: Sequence[tuple[bool, float]], before: Collection[tuple[int, int]]) -> list[int]:
    """All items, each after those that come before it, else by rank."""
    waiting, after = [0] * len(ranks), defaultdict[int, list[int]](list)
    for first, second in before:
        after[first].append(second)
        waiting[second] += 1
    ready = [(ranks[item], item) for item in range(len(ranks)) if not waiting[item]]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        item = heapq.heappop(ready)[1]
        order.append(item)
        for following in after[item]:
            waiting[following] -= 1
            if not waiting[following]:
                heapq.heappush(ready, (ranks[following], following))
    return order
