"""`time_placement`: one placement of a workload, simulated or run, as `rlplace simulate` and `measure` report it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.graphs.grouping.constraints import Constraints
from rlplace.measure.bounds.bounds import lower_bound_s
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.hosts.host import Host
from rlplace.measure.placement import check_plan, load_placement
from rlplace.measure.run.race import RaceProtocol
from rlplace.measure.run.threads import one_thread_here
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timeline import Timeline
from rlplace.report import write_chrome_trace
from rlplace.report.progress import make_progress
from rlplace.runs.setup import graph_for, make_problem
from rlplace.search.rules import baselines
from rlplace.workloads import WorkloadSpec

ROUNDS = RaceProtocol(max_rounds=20, min_rounds=20)


@one_thread_here()
def time_placement(
    spec: WorkloadSpec,
    host: Host,
    path: Path | None,
    *,
    is_measured: bool,
    seed: int,
    timeline: Path | None,
    constraints: Constraints | None = None,
) -> dict[str, Any]:
    """What `--json` prints: placement, status, why, step_time_s, spread_s, peak_bytes, lower_bound_s.

    Args:
        spec: the workload.
        host: where.
        path: a placement file; None is the best single device.
        is_measured: run it here, instead of simulating it.
        seed: of the workload.
        timeline: where a Chrome trace goes.
        constraints: the user's pins and exclusions: the placement must keep them, and the bound counts on them.

    Raises:
        FingerprintMismatch: the placement was made for another graph or host.
        InvalidValue: a simulated host is to be measured, or a graph file on a host of this machine; or the placement
            breaks a constraint.
    """
    if is_measured and host.is_simulated:
        raise InvalidValue("host", host.name, "a host of this machine (`auto`, `cores`, `cuda`)", where="measure")
    placement = None if path is None else load_placement(path)
    progress = make_progress()
    graph = graph_for(spec, host, seed)
    if placement is not None:
        placement.require(graph, host)
        check_plan(graph, host.num_devices, placement.plan)
    problem = make_problem(graph, host, 256, progress, spec=spec, constraints=constraints)
    if placement is not None:
        problem.check_placement(placement.plan.devices)
    simulator = Simulator(problem)
    plan = placement.plan if placement is not None else simulator.plan(baselines.best_single(problem, simulator))
    measurement, traces = simulator.retime(plan), {"simulated": simulator.timeline(plan)}
    if is_measured:
        evaluator = Evaluator(problem, simulator)
        try:
            (outcome,) = evaluator.measure_plans([plan], ROUNDS)
            timelines = evaluator.trace(plan) if outcome.ok else []
        finally:
            evaluator.close()
        if timelines:
            traces = {"measured": timelines[len(timelines) // 2], **traces}
            peaks = counted_peaks(timelines[len(timelines) // 2], host.num_devices)
            outcome = dataclasses.replace(outcome, peak_bytes=tuple(peaks.tolist()))
        measurement = outcome
    if timeline is not None:
        write_chrome_trace(timeline, traces, graph, problem.host)
    bound_s, bound = lower_bound_s(problem)
    counts = np.bincount(plan.devices, minlength=host.num_devices)
    what = "everything" if np.count_nonzero(counts) == 1 else "everything that may be"
    return {
        "schema": 1,
        "placement": f"{what} on {host.devices[int(counts.argmax())].name}" if path is None else str(path),
        "kind": "measured" if is_measured else "simulated",
        "status": measurement.status,
        "why": measurement.why,
        "step_time_s": measurement.step_time_s,
        "spread_s": measurement.spread_s,
        "peak_bytes": list(measurement.peak_bytes),
        "lower_bound_s": bound_s,
        "lower_bound": bound,
        "costs": problem.costs.source,
    }


def counted_peaks(timeline: Timeline, num_devices: int) -> NDArray[np.int64]:
    """(D,) peak bytes of each device as a timeline's memory counters show them."""
    peaks = np.zeros(num_devices, dtype=np.int64)
    np.maximum.at(peaks, timeline.memory_device, timeline.memory_bytes)
    return peaks
