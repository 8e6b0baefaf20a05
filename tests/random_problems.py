"""Random small problems that use every feature of the step-time model, and a few plain hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from micrographs import op_graph

from rlplace.graphs.grouping.groups import Grouping
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.costs import Costs, CostSource
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.problem import Problem

BIG = 1 << 50


def random_graph(rng: np.random.Generator, num_ops: int) -> OpGraph:
    """A DAG with sources, ops of several or no outputs, workspace, optimizer state and in-place updates."""
    targets, reads, tensor_op = [], [], []
    for i in range(num_ops):
        is_source = rng.random() < 0.15
        targets.append(str(rng.choice(["parameter", "input", "buffer", "constant"])) if is_source else "aten.op")
        first = int(rng.choice([0, max(0, len(tensor_op) - 8)]))
        count = 0 if is_source else int(rng.integers(0, 4))
        reads.append(sorted(set(rng.integers(first, len(tensor_op), count).tolist())) if len(tensor_op) > first else [])
        tensor_op += [i] * int(rng.choice([0, 1, 1, 1, 1, 2]))
    num_tensors = len(tensor_op)
    mutations = []
    for t in [t for t in range(num_tensors) if targets[tensor_op[t]] == "parameter" and rng.random() < 0.7]:
        latest = max([i for i in range(num_ops) if t in reads[i]], default=tensor_op[t])
        late = [i for i in range(latest, num_ops) if targets[i] == "aten.op" and i > tensor_op[t]]
        mutations += [(i, t) for i in late if rng.random() < 2 / len(late)]
    graph = op_graph([[] for _ in range(num_ops)], targets=targets)
    sizes = rng.integers(0, 9, num_tensors) * 100
    return replace(
        graph,
        tensor_op=np.array(tensor_op, dtype=np.int32),
        tensor_output=np.zeros(num_tensors, dtype=np.int32),
        tensor_bytes=sizes,
        tensor_shapes=((1,),) * num_tensors,
        tensor_dtypes=("uint8",) * num_tensors,
        input_offsets=np.cumsum([0, *(len(read) for read in reads)]),
        input_tensors=np.array([t for read in reads for t in read], dtype=np.int32),
        workspace_bytes=rng.integers(0, 3, num_ops) * 70,
        state_bytes=rng.integers(0, 2, num_ops) * 50,
        mutation_op=np.array([op for op, _ in mutations], dtype=np.int32),
        mutation_tensor=np.array([t for _, t in mutations], dtype=np.int32),
        output_tensors=rng.permutation(num_tensors)[: num_tensors // 10].astype(np.int32),
    )


def random_host(rng: np.random.Generator) -> Host:
    """Shared links, blocking and handed-over transfers, gangs, dispatchers of either kind, co-running, pools."""
    singles = int(rng.integers(1, 5))
    gangs = int(rng.integers(0, 3)) if singles > 1 and rng.random() < 0.4 else 0
    pooled = rng.random() < 0.3
    devices = []
    for d in range(singles + gangs):
        members = () if d < singles else tuple(f"d{m}" for m in sorted(rng.permutation(singles)[:2].tolist()))
        devices.append(
            Device(
                name=f"d{d}",
                kind="any",
                backend="simulated",
                memory_bytes=int(rng.choice([BIG, 2500])),
                memory_pool="ram" if pooled and rng.random() < 0.7 else "",
                memory_granularity_bytes=int(rng.choice([1, 64])),
                context_bytes=int(rng.integers(0, 2)) * 30,
                dispatcher=str(rng.choice(["", "one", "two"], p=[0.2, 0.6, 0.2])),
                members=members,
            )
        )
    links = tuple(
        Link(f"l{i}", float(rng.choice([50.0, 100.0, 300.0])), float(rng.choice([0.0, 0.5, 0.3])))
        for i in range(int(rng.integers(1, 7)))
    )
    blocking = rng.choice(["never", "always", "sometimes"], p=[0.4, 0.3, 0.3])
    routes = []
    for source in devices:
        for destination in devices:
            if source is destination:
                continue
            is_gang_pair = destination.name in source.members or source.name in destination.members
            count = 0 if is_gang_pair and rng.random() < 0.8 else int(rng.integers(1, 4))
            used = [links[i].name for i in rng.permutation(len(links))[:count]]
            blocks = [blocking == "always" or (blocking == "sometimes" and rng.random() < 0.4) for _ in range(2)]
            routes.append(Route(source.name, destination.name, tuple(used), bool(blocks[0]), bool(blocks[1])))
    launching = rng.random() < 0.6
    corun = ()
    if rng.random() < 0.4:
        corun = tuple(tuple(float(x) for x in rng.choice([0.0, 0.25, 0.3], len(devices))) for _ in devices)
    return Host(
        "random",
        tuple(devices),
        links,
        tuple(routes),
        dispatch_s=float(rng.choice([0.0, 0.4, 1.0])) if launching else 0.0,
        copy_dispatch_s=float(rng.choice([0.0, 0.6])) if launching else 0.0,
        dispatch_order=str(rng.choice(["plan", "request"])),
        run_ahead=int(rng.choice([1, 1, 2, 1000])),
        corun_slowdown=corun,
    )


def problem_of(
    graph: OpGraph, host: Host, op_s: Any = 1.0, *, source: CostSource = "estimated", **more: Any
) -> Problem:
    """Each op is a group of its own and takes `op_s`: the same everywhere, of each op, or of each op on each device."""
    seconds = np.array(op_s, dtype=np.float64)
    seconds = np.broadcast_to(seconds[:, None] if seconds.ndim == 1 else seconds, (graph.num_ops, host.num_devices))
    return Problem(graph, host, Costs(seconds.copy(), source), Grouping(np.arange(graph.num_ops)), **more)


def random_problem(rng: np.random.Generator, num_ops: int, host: Host | None = None) -> Problem:
    """A random graph on `host`, or on a random host; half of the time with costs that tie."""
    graph = random_graph(rng, num_ops)
    host = random_host(rng) if host is None else host
    shape = (num_ops, host.num_devices)
    op_time_s = rng.integers(0, 5, shape) / 2 if rng.random() < 0.5 else rng.uniform(0.1, 3.0, shape)
    return Problem(graph, host, Costs(op_time_s, "estimated"), Grouping(np.arange(num_ops)))


def random_priorities(rng: np.random.Generator, num_ops: int) -> np.ndarray:
    """Distinct, or with many ties."""
    return rng.integers(0, 4, num_ops).astype(float) if rng.random() < 0.3 else rng.permutation(num_ops).astype(float)


def plain_host(
    num_devices: int, bandwidth_bytes_per_s: float = 100.0, latency_s: float = 0.0, **options: object
) -> Host:
    """One link up and one link down a device; the route i -> j holds the way up of i and the way down of j."""
    names = [f"d{d}" for d in range(num_devices)]
    links = [Link(f"{way} {name}", bandwidth_bytes_per_s, latency_s) for name in names for way in ("up", "down")]
    routes = [Route(i, j, (f"up {i}", f"down {j}")) for i in names for j in names if i != j]
    devices = tuple(Device(name, "any", "simulated", BIG, dispatcher="python") for name in names)
    return Host("plain", devices, tuple(links), tuple(routes), **options)  # type: ignore[arg-type]
