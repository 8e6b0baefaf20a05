"""How fast the simulator is, on seeded synthetic problems: python benchmarks/simulator.py [--quick].

Prints a JSON object a row: nanoseconds per (op + edge) and placements per second, with memory, shared links and the
dispatcher on. `plan` plans placements and times their plans, `retime` times plans that are there and checked. A row is
the median over batches of different placements, each at the best of three. `--quick`: two sizes, on 4 devices.
"""

from __future__ import annotations

import json
import os
import timeit
from collections.abc import Callable
from itertools import product

import numpy as np
from numpy.typing import NDArray
from record import argument, parse

from rlplace.graphs import Grouping, OpGraph
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator

SIZES, DEVICES = (100, 1_000, 10_000, 50_000, 100_000), (2, 4, 8)
QUICK_SIZES, QUICK_DEVICES = (1_000, 10_000), (4,)
NUM_BATCHES = 3


def main(sizes: tuple[int, ...], devices: tuple[int, ...], seed: int = 0) -> None:
    for num_ops, num_devices in product(sizes, devices):
        problem = synthetic_problem(num_ops, num_devices, seed=seed)
        for threads, kind in product(sorted({1, len(os.sched_getaffinity(0))}), ("random", "contiguous")):
            simulator = Simulator(problem, threads=threads)
            for mode, seconds in _seconds_each(simulator, num_ops, num_devices, kind, seed).items():
                row = {
                    "num_ops": num_ops,
                    "num_edges": problem.graph.num_edges,
                    "num_devices": num_devices,
                    "threads": threads,
                    "mode": mode,
                    "placements": kind,
                    "ns_per_op_edge": round(seconds / (num_ops + problem.graph.num_edges) * 1e9, 2),
                    "placements_per_s": round(1 / seconds, 1),
                }
                print(json.dumps(row), flush=True)


def _seconds_each(simulator: Simulator, num_ops: int, num_devices: int, kind: str, seed: int) -> dict[str, float]:
    """Seconds of one placement, by mode."""
    samples: dict[str, list[float]] = {"plan": [], "retime": []}
    for number in range(NUM_BATCHES):
        count = min(64, max(8, 1_000_000 // num_ops))  # 64 is a batch of the learner
        placements = synthetic_placements(
            num_ops, num_devices, count, contiguous=kind == "contiguous", seed=seed + number
        )
        plans = simulator.check_plans([simulator.plan(devices) for devices in placements])
        samples["plan"].append(_best_of_three(lambda p=placements: simulator.step_times(p)) / count)  # type: ignore[misc]
        samples["retime"].append(_best_of_three(lambda b=plans: simulator.retime_batch(b)) / count)  # type: ignore[misc]
    return {mode: float(np.median(seconds)) for mode, seconds in samples.items()}


def _best_of_three(call: Callable[[], object]) -> float:
    return min(timeit.repeat(call, number=1, repeat=3))


def synthetic_graph(num_ops: int, *, window: int = 30, seed: int = 0) -> OpGraph:
    """`num_ops` ops with one output each; each reads two tensors of the `window` ops before it, so E is about 2 N."""
    rng = np.random.default_rng(seed)
    reads = [rng.permutation(np.arange(max(0, i - window), i))[:2] for i in range(num_ops)]
    sizes = np.exp(rng.normal(np.log(4e5), 1.0, num_ops)).astype(np.int64)
    return OpGraph(
        names=tuple(f"op{i}" for i in range(num_ops)),
        targets=("aten.op",) * num_ops,
        modules=("",) * num_ops,
        signatures=("aten.op",) * num_ops,
        phases=np.zeros(num_ops, dtype=np.int8),
        flops=np.zeros(num_ops),
        bytes_moved=np.zeros(num_ops),
        parameter_bytes=np.zeros(num_ops, dtype=np.int64),
        gradient_bytes=np.zeros(num_ops, dtype=np.int64),
        state_bytes=np.zeros(num_ops, dtype=np.int64),
        workspace_bytes=rng.integers(0, 2, num_ops) * 100_000,
        colocation=np.full(num_ops, -1, dtype=np.int32),
        tensor_op=np.arange(num_ops, dtype=np.int32),
        tensor_output=np.zeros(num_ops, dtype=np.int32),
        tensor_bytes=sizes,
        tensor_shapes=tuple((size,) for size in sizes.tolist()),
        tensor_dtypes=("uint8",) * num_ops,
        input_offsets=np.cumsum([0, *(len(read) for read in reads)]).astype(np.int32),
        input_tensors=np.concatenate([np.sort(read) for read in reads]).astype(np.int32),
        mutation_op=np.empty(0, dtype=np.int32),
        mutation_tensor=np.empty(0, dtype=np.int32),
        output_tensors=np.array([num_ops - 1], dtype=np.int32),
    )


def synthetic_host(num_devices: int) -> Host:
    """GPUs on one PCIe switch, as in `4xV100-pcie`: route i -> j holds the way up of i and the way down of j.

    One Python thread launches everything, 5 us an op and 10 us a copy.
    """
    names = [f"cuda:{i}" for i in range(num_devices)]
    devices = [
        Device(name, "Tesla V100-PCIE-16GB", "simulated", 16 << 30, memory_granularity_bytes=512, dispatcher="python")
        for name in names
    ]
    links = [Link(f"{name} {way}", 12e9, 10e-6) for name in names for way in ("up", "down")]
    routes = [Route(i, j, (f"{i} up", f"{j} down")) for i in names for j in names if i != j]
    return Host(
        f"synthetic-{num_devices}xV100-pcie",
        tuple(devices),
        tuple(links),
        tuple(routes),
        dispatch_s=5e-6,
        copy_dispatch_s=10e-6,
    )


def synthetic_problem(num_ops: int, num_devices: int, *, seed: int = 0) -> Problem:
    """A synthetic graph on a synthetic host, with ops of about 100 us."""
    rng = np.random.default_rng(seed + 1)
    return Problem(
        synthetic_graph(num_ops, seed=seed),
        synthetic_host(num_devices),
        Costs(np.exp(rng.normal(np.log(1e-4), 1.0, (num_ops, 1))) * np.ones((1, num_devices)), "estimated"),
        Grouping(np.arange(num_ops, dtype=np.int32)),
    )


def synthetic_placements(
    num_ops: int, num_devices: int, count: int, *, contiguous: bool = False, seed: int = 0
) -> NDArray[np.int32]:
    """(count, N) int32: every op anywhere, or one block of ops a device, cut at random."""
    rng = np.random.default_rng(seed + 2)
    if not contiguous:
        return rng.integers(0, num_devices, (count, num_ops)).astype(np.int32)
    cuts = np.sort(rng.integers(0, num_ops + 1, (count, num_devices - 1)), axis=1)
    blocks: NDArray[np.int32] = np.sum(np.arange(num_ops)[None, :, None] >= cuts[:, None, :], axis=2, dtype=np.int32)
    return blocks


if __name__ == "__main__":
    is_quick = parse(__doc__, argument("--quick", action="store_true")).quick
    main(*((QUICK_SIZES, QUICK_DEVICES) if is_quick else (SIZES, DEVICES)))
