"""Small random workloads of the published benchmark's kind, and plain references of its objectives."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlplace.graphs.formats.published import DnnPartitioning, parse_dnn_partitioning


def random_document(seed: int, *, num_nodes: int = 7, training: bool = False, devices: int = 2) -> dict[str, Any]:
    """A workload with classes, unsupported nodes and a tight memory, ids out of order; times are small integers."""
    draw = np.random.default_rng(seed)
    ids = (draw.permutation(num_nodes) * 3 + 1).tolist()
    nodes = [
        {
            "id": ids[i],
            "name": f"n{i}",
            "supportedOnFpga": bool(draw.random() < 0.9),
            "cpuLatency": float(draw.integers(0, 12)),
            "fpgaLatency": float(draw.integers(0, 6)),
            "isBackwardNode": bool(training and i >= num_nodes // 2),
            "size": float(draw.integers(0, 5)),
        }
        for i in range(num_nodes)
    ]
    for node in nodes:
        if draw.random() < 0.5:
            node["colorClass"] = int(draw.integers(4))
    cost = draw.integers(0, 4, size=num_nodes)
    edges = [
        {"sourceId": ids[i], "destId": ids[j], "cost": float(cost[i]), "size": 1.0}
        for i in range(num_nodes)
        for j in range(i + 1, num_nodes)
        if draw.random() < 0.35
    ]
    draw.shuffle(edges)  # type: ignore[arg-type]
    total = sum(float(node["size"]) for node in nodes)  # type: ignore[arg-type]
    return {
        "maxSizePerFPGA": float(math.ceil(total * draw.uniform(0.4, 1.1))),
        "maxFPGAs": devices,
        "maxCPUs": 1,
        "nodes": [nodes[i] for i in draw.permutation(num_nodes)],
        "edges": edges,
    }


def random_workload(seed: int, **options: Any) -> DnnPartitioning:
    return parse_dnn_partitioning(random_document(seed, **options))


def reads(record: DnnPartitioning) -> list[list[int]]:
    """Sources of each op."""
    graph = record.graph
    return [
        graph.input_tensors[graph.input_offsets[v] : graph.input_offsets[v + 1]].tolist() for v in range(record.num_ops)
    ]


def fits(record: DnnPartitioning, devices: list[int]) -> bool:
    held = [0.0] * (record.num_accelerators + 1)
    for op, device in enumerate(devices):
        held[device] += float(record.size_bytes[op])
    return all(bytes_ <= record.capacity_bytes for bytes_ in held[: record.num_accelerators])


def slow_max_load(record: DnnPartitioning, devices: list[int]) -> float:
    """The definition, set by set."""
    if not fits(record, devices):
        return math.inf
    edges = [(u, v) for v, sources in enumerate(reads(record)) for u in sources]
    loads = [sum(float(record.cpu_ms[v]) for v, d in enumerate(devices) if d == record.num_accelerators)]
    for device in range(record.num_accelerators):
        inside = {v for v, d in enumerate(devices) if d == device}
        out = {u for u, v in edges if u in inside and v not in inside}
        into = {u for u, v in edges if u not in inside and v in inside}
        loads.append(sum(float(record.accelerator_ms[v]) for v in inside))
        loads[-1] += sum(float(record.transfer_ms[u]) for u in out) + sum(float(record.transfer_ms[u]) for u in into)
    return max(loads)


def slow_piece_latency(record: DnnPartitioning, devices: list[int]) -> float:
    """The definition, by recursion over pieces; a piece that waits for itself is a cycle."""
    if not fits(record, devices):
        return math.inf
    sources = reads(record)
    edges = [(u, v) for v in range(record.num_ops) for u in sources[v]]
    piece: dict[int, tuple[int, int]] = {}
    for device in range(record.num_accelerators):
        depth: list[int] = []
        for v in range(record.num_ops):
            if devices[v] == device:
                depth.append(max([1, *(depth[u] + (devices[u] != device) for u in sources[v])]))
                piece[v] = (device, depth[v])
            else:
                depth.append(max([0, *(depth[u] for u in sources[v])]))
    for v in range(record.num_ops):
        piece.setdefault(v, (record.num_accelerators, v))
    done: dict[tuple[int, int], float] = {}

    def finish(part: tuple[int, int], waiting: frozenset[tuple[int, int]]) -> float:
        if part in waiting:
            return math.inf
        if part not in done:
            members = {v for v in piece if piece[v] == part}
            into = {u for u, v in edges if v in members and u not in members}
            start = max([0.0, *(finish(piece[u], waiting | {part}) for u in into)])
            if part[0] == record.num_accelerators:
                takes = sum(float(record.cpu_ms[v]) for v in members)
            else:
                out = {u for u, v in edges if u in members and v not in members}
                takes = sum(float(record.accelerator_ms[v]) for v in members)
                takes += sum(float(record.transfer_ms[u]) for u in into | out)
            done[part] = start + takes
        return done[part]

    return max(finish(part, frozenset()) for part in set(piece.values()))
