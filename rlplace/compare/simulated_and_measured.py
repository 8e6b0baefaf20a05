"""The simulator beside this machine: `time_placement` on one placement, `run_fidelity` on many.

They are the commands `rlplace simulate`, `measure` and `fidelity`.
"""

from __future__ import annotations

import dataclasses
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import FingerprintMismatch, UserError, refuse_if
from rlplace.graphs import OpGraph
from rlplace.measure import Host, Placement, Plan, Problem, RaceProtocol, Simulator, Timeline, load_placement
from rlplace.measure.bounds import lower_bound_s
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.host_model import describe
from rlplace.measure.hosts.resolve import check_runs_here
from rlplace.measure.measurement import MeasurementLog
from rlplace.measure.placement import PlacedCut, PlacedSplit, check_plan
from rlplace.measure.prediction_error import Fidelity, draw_mix, judge_fidelity
from rlplace.measure.timing.race import idle_share
from rlplace.measure.timing.threads import one_thread_here
from rlplace.report import save_fidelity_png, save_timeline_png, write_chrome_trace
from rlplace.report.console import make_progress
from rlplace.search import Budget, anneal_from, eft
from rlplace.search.groupings import majority_devices
from rlplace.search.rules import baselines
from rlplace.session.calibrate import Known, calibrate_on, measure_all, plans_of, step_times
from rlplace.session.prepare import COUNTS, Steps, describe_cut, judged, make_problem, prepare, versions
from rlplace.session.setup import AUTO, NO_SPLIT, CutOptions, Loss, Setup, check_named, number_only
from rlplace.store.log import check_store, measuring
from rlplace.workloads import WorkloadSpec

ROUNDS = RaceProtocol(max_rounds=20, min_rounds=20)


@one_thread_here()
def time_placement(setup: Setup, path: Path | None, *, is_measured: bool, timeline: Path | None) -> dict[str, Any]:
    """The object that `--json` prints:  placement, status, why, step_time_s, spread_s, peak_bytes, lower_bound_s.

    Args:
        setup: the step. A placement must keep its constraints, and the bound counts on them. A batch that is cut
            `auto` is cut as the placement was made for; without one it is chosen. A measured step time is kept in the
            store, and measured afresh.
        path: a placement file; None is the best single device.
        is_measured: run it here, instead of simulating it.
        timeline: where a Chrome trace goes; or a picture, where it is called `.png`.

    Raises:
        FileProblem: a store was named that cannot be opened.
        RunnerError: another search measures here, and waiting was not asked for.
        FingerprintMismatch: the placement was made for another graph or host.
        InvalidValue: a simulated host is to be measured, or a graph file on a host of this machine; or the placement
            breaks a constraint.
    """
    spec, host = setup.spec, setup.host
    if is_measured:
        check_runs_here(host)
        check_store(setup.store)
    placement = None if path is None else load_placement(path)
    progress = make_progress()
    graph, count = _graph_of(placement, spec, host, setup.workload_seed, setup.asked)
    if placement is not None:
        try:
            placement.require(graph, host)
        except FingerprintMismatch as error:
            if error.kind == "graph":
                error.add_note(_other_cut(placement, graph))
            raise
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
            with closing(Evaluator(problem, simulator, seed=setup.seed, log=log, isolated=setup.isolated)) as evaluator:
                (measurement,) = evaluator.measure_plans([plan], ROUNDS)
                timelines = evaluator.trace(plan) if measurement.ok else []
            if timelines:
                traces = {"measured": timelines[len(timelines) // 2], **traces}
                peaks = counted_peaks(traces["measured"], host.num_devices)
                measurement = dataclasses.replace(measurement, peak_bytes=tuple(peaks.tolist()))
    if timeline is not None and timeline.suffix.lower() == ".png":
        name, first = next(iter(traces.items()))
        save_timeline_png(timeline, first, graph, host, f"One step on {host.name}, {name}")
    elif timeline is not None:
        write_chrome_trace(timeline, traces, graph, host)
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
    """The step and its micro-batches, cut as asked; where that is `auto`, as the placement was made for.

    Ops are split as asked, else as the placement was made for.
    """
    words = None if placement is None or spec.is_file else placement.split_words
    if placement is not None and asked.split == AUTO:
        asked = dataclasses.replace(asked, split=NO_SPLIT)
    if words is not None and asked.split == NO_SPLIT:
        asked = dataclasses.replace(asked, split=words.classes, split_parts=words.parts)
    check_named(asked)
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
        raise number_only(
            asked.count, "`auto` is chosen by a search (`train`, `compare`), or found for a placement file."
        )
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
    """The cut that was asked for beside `auto`, with the number and the loss of a placement file."""
    if count == 1:
        return CutOptions(1, is_exact=asked.is_exact, split=asked.split, split_parts=asked.split_parts)
    kind = loss if asked.loss == "auto" and loss else asked.loss
    return dataclasses.replace(asked, count=count, loss=cast("Loss", kind))


def _other_cut(placement: Placement, graph: OpGraph) -> str:
    """How the batch of a placed step was cut, beside that of another graph; and the request for it."""
    words, own = placement.split_words, PlacedSplit.of(graph)
    if words != own:
        ask = "leave `--split` out" if words is None else f"give `--split {words.classes} --split-parts {words.parts}`"
        return f"It places {words or 'whole ops'}, yours are {own or 'whole'}: {ask}."
    cut = placement.cut
    if cut is None:
        return "If its step was cut into micro-batches, give `--micro-batches` again; `auto` finds how many."
    micro = None if graph.program is None else graph.program.origin.micro
    mine = PlacedCut(graph.num_micro_batches, "" if micro is None else micro.verdict.kind)
    if cut.count != mine.count:
        ask = "leave `--micro-batches` out" if cut.count == 1 else f"give `--micro-batches {cut.count}`"
        return f"It places {cut}, yours is {mine}: {ask}, or `--micro-batches auto`."
    if cut.loss != mine.loss and cut.loss:
        return f"It places {cut}, yours is {mine}: give `--loss {cut.loss}`."
    return "" if cut.count == 1 else f"Both are {cut}: the batch may be cut along other dimensions (`--batch-dims`)."


def counted_peaks(timeline: Timeline, num_devices: int) -> NDArray[np.int64]:
    """(D,) peak bytes of each device as a timeline's memory counters show them."""
    peaks = np.zeros(num_devices, dtype=np.int64)
    np.maximum.at(peaks, timeline.memory_device, timeline.memory_bytes)
    return peaks


MIX_ROUNDS = 9
SEARCH = Budget(evaluations=4000, seconds=30.0)


@dataclass(frozen=True, eq=False)
class Mix:
    """Measured placements of every kind, and others to calibrate on.

    Attributes:
        known: the problem as profiled, with the placements to calibrate on and their measurements.
        plans: the P unseen ones.
        kinds: of each.
        first_s: (P,) seconds of the first measurement.
        second_s: (P,) seconds of the second measurement.
        counted: (P, D) peak bytes that the runner counted.
        idle_share: of this machine, before.
    """

    known: Known
    plans: list[Plan]
    kinds: tuple[str, ...]
    first_s: NDArray[np.float64]
    second_s: NDArray[np.float64]
    counted: NDArray[np.float64]
    idle_share: float

    @property
    def measured_s(self) -> NDArray[np.float64]:
        """(P,) the mean of both measurements."""
        return (self.first_s + self.second_s) / 2

    def judge(self, problem: Problem) -> tuple[Fidelity, list[float]]:
        """The figures of the simulator with the costs of `problem`, and its times in seconds.

        Plans are those of the profiled simulator; the judged simulator re-times exactly these plans.
        """
        simulator = Simulator(problem)
        outcomes = [simulator.retime(plan) for plan in self.plans]
        simulated_s = [outcome.step_time_s for outcome in outcomes]
        peaks = np.array([outcome.peak_bytes for outcome in outcomes], dtype=np.float64)
        figures = judge_fidelity(simulated_s, self.first_s.tolist(), self.second_s.tolist(), peaks, self.counted)
        return figures, simulated_s


@one_thread_here()
def run_fidelity(setup: Setup, *, num_placements: int, num_fit: int, plot: Path) -> dict[str, Any]:
    """The object that `rlplace fidelity --json` prints; saves the scatter plot.

    Args:
        setup: the step, on a host of this machine; measured step times are kept in the store, and measured afresh.
        num_placements: unseen placements.
        num_fit: other placements, that the simulator is calibrated on.
        plot: where the picture goes.

    Raises:
        FileProblem: a store was named that cannot be opened.
        InvalidValue: a simulated host, a graph file, or too few placements.
        RunnerError: a placement failed.
    """
    spec, host, seed = setup.spec, setup.host, setup.seed
    check_runs_here(host, where="fidelity")
    refuse_if(
        num_placements < 8 or num_fit < 4,
        "placements",
        (num_placements, num_fit),
        "at least 8, and 4 to fit",
        where="fidelity",
    )
    check_store(setup.store)
    progress = make_progress()
    with measuring(host, setup.store, workload=str(spec), say=progress.say, is_waiting=setup.is_waiting) as log:
        prepared = prepare(Steps(spec, host, setup.workload_seed, setup.asked), progress.say, setup)
        problem = prepared.problem
        mix = measure_mix(
            problem, num_placements=num_placements, num_fit=num_fit, seed=seed, log=log, isolated=setup.isolated
        )
    calibration = calibrate_on(mix.known)
    for line in calibration.say():
        progress.say(line)
    figures, simulated_s = mix.judge(calibration.problem)
    save_fidelity_png(plot, simulated_s, mix.measured_s.tolist(), mix.kinds, asdict(figures))
    return {
        "schema": 1,
        "workload": str(spec),
        "seed": seed,
        "workload_seed": setup.workload_seed,
        "micro_batches": prepared.to_dict(),
        "host": host.name,
        **asdict(figures),
        "calibration": {
            "is_kept": calibration.is_kept,
            "error_before": calibration.error_before,
            "error_after": calibration.error_after,
            "num_fitted": calibration.num_measured,
            "learned": describe(calibration.posterior),
        },
        "idle_share": mix.idle_share,
        "versions": versions(),
        "simulated_s": simulated_s,
        "measured_s": mix.measured_s.tolist(),
        "kinds": list(mix.kinds),
        "plot": str(plot),
    }


def measure_mix(
    problem: Problem,
    *,
    num_placements: int,
    num_fit: int,
    seed: int,
    log: MeasurementLog | None = None,
    isolated: bool | None = None,
    num_traced: int = 0,
) -> Mix:
    """Draws, measures and counts `num_placements` placements twice, after `num_fit` others.

    Args:
        problem: as profiled, on a host of this machine.
        num_placements: unseen placements.
        num_fit: other placements, to calibrate on.
        seed: of the draws.
        log: keeps measurements.
        isolated: whether placements are measured in a worker process; see `Evaluator`.
        num_traced: traced steps of each placement to calibrate on, after those that are timed.

    Raises:
        RunnerError: a placement failed.
    """
    progress, simulator = make_progress(), Simulator(problem)
    best, _ = anneal_from(problem, simulator, majority_devices(problem, eft(problem)), SEARCH, seed=seed)
    generator = np.random.default_rng(seed)
    test_groups, kinds = draw_mix(problem, best, num_placements, generator)
    fit_groups, _ = draw_mix(problem, best, num_fit, generator, unlike=test_groups)
    with closing(Evaluator(problem, simulator, log=log, isolated=isolated)) as evaluator:
        idle = idle_share()
        progress.say(f"measuring {num_fit} placements to calibrate on")
        fit_plans = plans_of(problem, simulator, fit_groups)
        known = Known(
            problem,
            fit_plans,
            measure_all(evaluator, fit_plans, rounds=MIX_ROUNDS, seed=seed, num_traced=num_traced),
        )
        plans = plans_of(problem, simulator, test_groups)
        progress.say(f"measuring {num_placements} unseen placements, twice")
        first_s, second_s = (
            step_times(measure_all(evaluator, plans, rounds=MIX_ROUNDS, seed=seed + k)) for k in (1, 2)
        )
        traces = (evaluator.trace(plan, num_steps=1, warmup=1)[0] for plan in plans)
        counted = np.stack([counted_peaks(trace, problem.host.num_devices) for trace in traces])
    return Mix(known, plans, kinds, first_s, second_s, counted.astype(np.float64), idle)
