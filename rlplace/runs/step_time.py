"""`time_placement`: one placement of a workload, simulated or run, as `rlplace simulate` and `measure` report it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import FingerprintMismatch, InvalidValue, UserError
from rlplace.graphs.grouping.constraints import Constraints
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.bounds.bounds import lower_bound_s
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.hosts.host import Host
from rlplace.measure.placement import Placement, check_plan, load_placement
from rlplace.measure.problem import Problem
from rlplace.measure.run.race import RaceProtocol
from rlplace.measure.run.threads import one_thread_here
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timeline import Timeline
from rlplace.report import save_timeline_png, write_chrome_trace
from rlplace.report.progress import make_progress
from rlplace.runs.micro_batches import WHOLE, CutOptions, number_only
from rlplace.runs.prepared import COUNTS, describe_cut, judged
from rlplace.runs.setup import Steps, make_problem
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
    asked: CutOptions = WHOLE,
) -> dict[str, Any]:
    """What `--json` prints: placement, status, why, step_time_s, spread_s, peak_bytes, lower_bound_s.

    Args:
        spec: the workload.
        host: where.
        path: a placement file; None is the best single device.
        is_measured: run it here, instead of simulating it.
        seed: of the workload.
        timeline: where a Chrome trace goes; or a picture, where it is called `.png`.
        constraints: the user's pins and exclusions: the placement must keep them, and the bound counts on them.
        asked: how the batch is cut; `auto` is what the placement was made for, without one it is chosen.

    Raises:
        FingerprintMismatch: the placement was made for another graph or host.
        InvalidValue: a simulated host is to be measured, or a graph file on a host of this machine; or the placement
            breaks a constraint.
    """
    if is_measured and host.is_simulated:
        raise InvalidValue("host", host.name, "a host of this machine (`auto`, `cores`, `cuda`)", where="measure")
    placement = None if path is None else load_placement(path)
    progress = make_progress()
    graph = _graph_of(placement, Steps(spec, host, seed, asked))
    if placement is not None:
        placement.require(graph, host)
        check_plan(graph, host.num_devices, placement.plan)
    count = 1 if isinstance(asked.count, str) else asked.count
    problem = make_problem(graph, host, 256, progress, spec=spec, count=count, constraints=constraints)
    for line in judged(graph):
        progress.say(line)
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
        _keep(timeline, traces, problem)
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
        "micro_batches": describe_cut(graph, asked),
    }


def _graph_of(placement: Placement | None, steps: Steps) -> OpGraph:
    """The step cut as asked; where that is `auto`, as the placement was made for."""
    asked = steps.asked.count
    if not isinstance(asked, str):
        graph = steps.graph(asked)
        if placement is not None and placement.graph_fingerprint != graph.fingerprint and asked == 1:
            error = FingerprintMismatch("graph", placement.graph_fingerprint, graph.fingerprint)
            error.add_note(
                "If its step was cut into micro-batches, give `--micro-batches` again; `auto` finds how many."
            )
            raise error
        return graph
    if placement is None:
        raise number_only(asked, "`auto` is chosen by a search (`train`, `compare`), or found for a placement file.")
    for count in COUNTS:
        try:
            graph = steps.graph(count)
        except UserError:
            if count == 1:
                raise
            break  # larger counts cannot be had either
        if graph.fingerprint == placement.graph_fingerprint:
            return graph
    return steps.graph(1)


def _keep(path: Path, traces: Mapping[str, Timeline], problem: Problem) -> None:
    """Writes timelines as a Chrome trace, or the first of them as a picture, as the ending of `path` says."""
    if path.suffix.lower() == ".png":
        name, first = next(iter(traces.items()))
        save_timeline_png(path, first, problem.graph, problem.host, f"One step on {problem.host.name}, {name}")
    else:
        write_chrome_trace(path, traces, problem.graph, problem.host)


def counted_peaks(timeline: Timeline, num_devices: int) -> NDArray[np.int64]:
    """(D,) peak bytes of each device as a timeline's memory counters show them."""
    peaks = np.zeros(num_devices, dtype=np.int64)
    np.maximum.at(peaks, timeline.memory_device, timeline.memory_bytes)
    return peaks
