"""How fast the simulator is, on seeded synthetic problems."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.simulate.synthetic import synthetic_placements, synthetic_problem

SIZES = (100, 1_000, 10_000, 50_000, 100_000)
DEVICES = (2, 4, 8)
NUM_BATCHES = 3


def bench_simulator(
    *, is_quick: bool = False, seed: int = 0, on_row: Callable[[dict[str, Any]], None] | None = None
) -> dict[str, Any]:
    """`{"rows": [...]}`: nanoseconds per (op + edge) and placements per second, everything on.

    Memory, shared links and the dispatcher are on. `plan` plans placements and times their plans, `retime` times plans
    that are there and checked. A row is the median over batches of different placements, each at the best of three.

    Args:
        is_quick: 1,000 and 10,000 ops on 4 devices only.
        seed: of graphs, costs and placements.
        on_row: called with each row as it comes.
    """
    rows: list[dict[str, Any]] = []
    for num_ops in (1_000, 10_000) if is_quick else SIZES:
        for num_devices in (4,) if is_quick else DEVICES:
            problem = synthetic_problem(num_ops, num_devices, seed=seed)
            work = num_ops + problem.graph.num_edges
            for threads in sorted({1, len(os.sched_getaffinity(0))}):
                simulator = Simulator(problem, threads=threads)
                for kind in ("random", "contiguous"):
                    for mode, seconds in _seconds_each(simulator, num_ops, num_devices, kind, seed).items():
                        row = {
                            "num_ops": num_ops,
                            "num_edges": problem.graph.num_edges,
                            "num_devices": num_devices,
                            "threads": threads,
                            "mode": mode,
                            "placements": kind,
                            "ns_per_op_edge": round(seconds / work * 1e9, 2),
                            "placements_per_s": round(1 / seconds, 1),
                        }
                        rows.append(row)
                        if on_row is not None:
                            on_row(row)
    return {"rows": rows}


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
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
