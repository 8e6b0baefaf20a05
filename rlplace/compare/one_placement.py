"""`time_placement`: one placement of a workload, simulated or run, as `rlplace simulate` and `measure` report it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import FingerprintMismatch, InvalidValue, UserError
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.bounds import lower_bound_s
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.hosts.host import Host
from rlplace.measure.placement import PlacedCut, Placement, check_plan, load_placement
from rlplace.measure.plan import Timeline
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timing.race import RaceProtocol
from rlplace.measure.timing.threads import one_thread_here
from rlplace.report import save_timeline_png, write_chrome_trace
from rlplace.report.console import make_progress
from rlplace.search.rules import baselines
from rlplace.session.cut import CutOptions, Loss, number_only
from rlplace.session.prepare import COUNTS, describe_cut, judged
from rlplace.session.setup import Setup
from rlplace.session.steps import Steps, make_problem
from rlplace.store.log import check_store, measuring
from rlplace.workloads import WorkloadSpec

ROUNDS = RaceProtocol(max_rounds=20, min_rounds=20)


@one_thread_here()
def time_placement(setup: Setup, path: Path | None, *, is_measured: bool, timeline: Path | None) -> dict[str, Any]:
    """What `--json` prints: placement, status, why, step_time_s, spread_s, peak_bytes, lower_bound_s.

    Args:
        setup: the step. A placement must keep its constraints, and the bound counts on them. A batch that is cut
            `auto` is cut as the placement was made for; without one it is chosen. A measured step time is kept in the
            store, and measured afresh.
        path: a placement file; None is the best single device.
        is_measured: run it here, instead of simulating it.
        timeline: where a Chrome trace goes; or a picture, where it is called `.png`.

    Raises:
        FileProblem: a store was named that cannot be opened.
        RunnerError: another search measures here, and nobody wants to wait.
        FingerprintMismatch: the placement was made for another graph or host.
        InvalidValue: a simulated host is to be measured, or a graph file on a host of this machine; or the placement
            breaks a constraint.
    """
    spec, host = setup.spec, setup.host
    if is_measured and host.is_simulated:
        raise InvalidValue("host", host.name, "a host of this machine (`auto`, `cores`, `cuda`)", where="measure")
    if is_measured:
        check_store(setup.store)
    placement = None if path is None else load_placement(path)
    progress = make_progress()
    graph, count = _graph_of(placement, spec, host, setup.workload_seed, setup.asked)
    if placement is not None:
        _require(placement, graph, host)
        check_plan(graph, host.num_devices, placement.plan)
    alone = measuring(host, setup.store, workload=str(spec), say=progress.say, is_waiting=setup.is_waiting)
    with alone if is_measured else nullcontext() as log:
        problem = make_problem(
            graph,
            host,
            setup.num_groups,
            progress.say,
            spec=spec,
            count=count,
            constraints=setup.constraints,
            isolated=setup.isolated,
        )
        for line in judged(graph):
            progress.say(line)
        if placement is not None:
            problem.check_placement(placement.plan.devices)
            if placement.cut is not None:
                problem = dataclasses.replace(problem, op_order=placement.cut.op_order)
        simulator = Simulator(problem)
        plan = placement.plan if placement is not None else simulator.plan(baselines.best_single(problem, simulator))
        measurement, traces = simulator.retime(plan), {"simulated": simulator.timeline(plan)}
        if is_measured:
            evaluator = Evaluator(problem, simulator, seed=setup.seed, log=log, isolated=setup.isolated)
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
        "workload_seed": setup.workload_seed,
        **({"seed": setup.seed} if is_measured else {}),
        "micro_batches": describe_cut(graph, setup.asked),
    }


def _graph_of(
    placement: Placement | None, spec: WorkloadSpec, host: Host, seed: int, asked: CutOptions
) -> tuple[OpGraph, int]:
    """The step and its micro-batches, cut as asked; where that is `auto`, as the placement was made for."""
    cut = None if placement is None else placement.cut
    loss = "" if cut is None or spec.is_file else cut.loss
    if not isinstance(asked.count, str):
        count = asked.count
        if cut is not None and cut.count == count:
            asked = _as_placed(asked, count, loss)
        try:
            return Steps(spec, host, seed, asked).graph(count), count
        except UserError as error:
            if cut is not None and (cut.count, cut.loss) != (count, asked.loss):
                error.add_note(f"The placement was made for {cut}.")
            raise
    if placement is None:
        hint = "`auto` is chosen by a search (`train`, `compare`), or found for a placement file."
        raise number_only(asked.count, hint)
    if cut is not None:
        # a graph file may hold a step that was cut when it was captured, and is read as it is
        for count in (1, cut.count) if spec.is_file else (cut.count,):
            graph = Steps(spec, host, seed, _as_placed(asked, count, loss)).graph(count)
            if graph.fingerprint == placement.graph_fingerprint:
                break
        return graph, count
    steps = Steps(spec, host, seed, asked)
    for count in COUNTS:
        try:
            graph = steps.graph(count)
        except UserError:
            if count == 1:
                raise
            break  # larger counts cannot be had either
        if graph.fingerprint == placement.graph_fingerprint:
            return graph, count
    return steps.graph(1), 1


def _as_placed(asked: CutOptions, count: int, loss: str) -> CutOptions:
    """What was asked for beside `auto`, with the number and the loss of a placement file."""
    if count == 1:
        return CutOptions(1, is_exact=asked.is_exact)
    kind = loss if asked.loss == "auto" and loss else asked.loss
    return dataclasses.replace(asked, count=count, loss=cast("Loss", kind))


def _require(placement: Placement, graph: OpGraph, host: Host) -> None:
    """Refuses a placement of another graph or host; says how its batch was cut, where that may be why.

    Raises:
        FingerprintMismatch: it was made for another.
    """
    try:
        placement.require(graph, host)
    except FingerprintMismatch as error:
        if error.kind == "graph":
            error.add_note(_other_cut(placement, graph))
        raise


def _other_cut(placement: Placement, graph: OpGraph) -> str:
    """How the batch of a placed step was cut, beside that of another graph; and what to ask for."""
    cut = placement.cut
    if cut is None:
        return "If its step was cut into micro-batches, give `--micro-batches` again; `auto` finds how many."
    micro = None if graph.program is None else graph.program.origin.micro
    mine = PlacedCut(graph.num_micro_batches, "" if micro is None else micro.loss)
    if cut.count != mine.count:
        ask = "leave `--micro-batches` out" if cut.count == 1 else f"give `--micro-batches {cut.count}`"
        return f"It places {cut}, yours is {mine}: {ask}, or `--micro-batches auto`."
    if cut.loss != mine.loss and cut.loss:
        return f"It places {cut}, yours is {mine}: give `--loss {cut.loss}`."
    return "" if cut.count == 1 else f"Both are {cut}: the batch may be cut along other dimensions (`--batch-dims`)."


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
