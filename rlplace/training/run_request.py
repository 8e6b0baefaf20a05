"""`run_request`: all of a run that somebody asked for, in its folder: the problem, the training, and what it leaves."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplace.cluster import check_cluster
from rlplace.files import read_json
from rlplace.graphs.grouping.constraints import Constraints
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.host_model.learned_host import FILE as HOST_MODEL
from rlplace.measure.host_model.learned_host import LearnedHost
from rlplace.measure.hosts.host import Host
from rlplace.search.improve.moves import are_kernels_kept
from rlplace.session.folder import RunFolder
from rlplace.session.prepare import Prepared, prepare
from rlplace.session.steps import Steps
from rlplace.store.log import check_store
from rlplace.training.checks import check_names
from rlplace.training.forecast import (
    PROFILING_SHARE,
    Durations,
    Stopwatch,
    afterwards,
    ahead,
    one_device_step_s,
    within,
    within_rest,
)
from rlplace.training.heuristics import num_rows
from rlplace.training.methods import methods_of
from rlplace.training.outcome import TrainResult
from rlplace.training.resume.config_file import Request
from rlplace.training.resume.journal import mark_finished
from rlplace.training.resume.prepared import describe_prepared, read_prepared
from rlplace.training.run import train_made
from rlplace.workloads import default_size

if TYPE_CHECKING:
    from rlplace.report.console import Progress
    from rlplace.runs.tracking import Tracker


def check_request(request: Request) -> None:
    """Refuses what can be refused before anything is captured."""
    host = request.host
    constraints = request.config.constraints or Constraints()
    constraints.check_devices([device.name for device in host.devices], [device.kind for device in host.devices])
    check_names(request.config, is_simulated=host.is_simulated)
    check_cluster(request.config.cluster)
    if not host.is_simulated:
        check_store(request.config.store)


def run_request(
    request: Request,
    steps: Steps | Prepared,
    run: RunFolder,
    progress: Progress,
    *,
    is_table: bool,
    is_resumed: bool = False,
    known_hosts: Sequence[LearnedHost] = (),
) -> dict[str, Any]:
    """As `run_training`, where nobody else measures, in a folder that is this process's.

    Args:
        request: what the run is asked to do.
        steps: of its workload; or its problem, where that is known.
        run: its folder, with a `config.json`.
        progress: told how it goes.
        is_table: print the table.
        is_resumed: go on from what the folder holds.
        known_hosts: what is known of the host, besides what is in the store.
    """
    from rlplace.runs.tracking import make_tracker

    begin_s = time.monotonic()
    spec, host, config = request.spec, request.host, request.config
    resolved = request.to_dict()
    tracker = make_tracker(config.track, run.root, resolved)
    is_complete = False
    try:
        progress.say(f"devices: {_devices(host)}")
        expected = None if is_resumed or isinstance(steps, Prepared) else _said_ahead(steps, request, progress)
        watch = Stopwatch()
        prepared = steps
        if isinstance(prepared, Steps):
            prepared = _prepared(request, prepared, run, progress, is_resumed=is_resumed)
        problem, profiling_s = prepared.problem, watch.lap_s()
        run.write_json("config.json", resolved | {"micro_batches": prepared.to_dict()})
        run.write_json("problem.json", describe_prepared(prepared))
        result = train_made(
            problem,
            within_rest(config, begin_s),
            start=prepared.start,
            run=run,
            progress=progress,
            tracker=tracker,
            workload=str(spec),
            resume=is_resumed,
            known_hosts=known_hosts,
        )
        _write_script(run, request, prepared)
        taken = dataclasses.replace(result.durations, profiling_s=profiling_s)
        expected = result.expected if expected is None else expected
        durations = {"expected": expected.to_dict(), "taken": taken.to_dict()}
        told = {"micro_batches": prepared.to_dict(), "durations": durations}
        run.write_json("result.json", read_json(run.path("result.json")) | told)
        _track(tracker, run, result)
        is_complete = True
        progress.say(afterwards(taken, expected, config.evaluations))
        report = _report(run, progress)
        mark_finished(run)
        progress.close()
        if is_table:
            _show(result, run.root, report)
        return result.table.to_dict() | told
    finally:
        progress.close()
        tracker.finish(is_complete=is_complete)
        if tracker.how_to_sync:
            progress.say(tracker.how_to_sync)


def _prepared(request: Request, steps: Steps, run: RunFolder, progress: Progress, *, is_resumed: bool) -> Prepared:
    """The problem: as it was profiled, where it was; estimates come out the same again."""
    config = request.config
    is_kept = bool(request.placed_again) or not request.host.is_simulated
    if is_resumed and is_kept and run.has("problem.json"):
        prepared = read_prepared(run, steps, config)
        progress.say(f"{steps.spec}: {prepared.problem.graph.num_ops} ops, {prepared.problem.costs.source} before")
        return prepared
    return prepare(
        steps,
        progress,
        seed=config.seed,
        num_groups=config.num_groups,
        grouping=config.grouping,
        acyclic=config.acyclic,
        constraints=config.constraints,
        isolated=config.isolated,
        most_s=math.inf if config.total_s is None else PROFILING_SHARE * config.total_s,
    )


def _said_ahead(steps: Steps, request: Request, progress: Progress) -> Durations | None:
    """How long all of the run is expected to take, which is said; None where that is not known before profiling."""
    host, config, count = request.host, request.config, request.asked.count
    graph: OpGraph = steps.graph(1 if count == "auto" else count)
    step_s = None if host.is_simulated else one_device_step_s(graph, host)
    if step_s is None:
        return None
    methods = methods_of(config, host)
    is_compiled = are_kernels_kept()
    _, expected = within(
        graph, host, config, step_s, num_rows=num_rows(methods), is_profiled=False, is_compiled=is_compiled
    )
    progress.say(ahead(expected, methods, is_simulated=False, whole="in all", is_compiled=is_compiled))
    return expected


def _write_script(run: RunFolder, request: Request, prepared: Prepared) -> None:
    """Writes the step as a script, where it is of a workload that anybody can build."""
    from rlplace.session.step_script import script

    spec, host = request.spec, request.host
    if spec.is_function or spec.is_file:
        return
    text = script(
        str(spec),
        default_size=default_size(host),
        seed=request.workload_seed,
        cut=prepared.to_dict(),
        host=request.host_word,
        is_simulated=host.is_simulated,
    )
    run.write_text("step.py", text)


def _track(tracker: Tracker, run: RunFolder, result: TrainResult) -> None:
    """Shows the tracker the final table and the files that a run is known by."""
    tracker.log_table(result.table.rows)
    tracker.log_files("config", [run.path("config.json"), run.path("result.json")])
    learned = [run.path(name) for name in ("policy.safetensors", "policy.json", HOST_MODEL) if run.has(name)]
    if learned:
        tracker.log_files("policy", learned)


def _devices(host: Host) -> str:
    return ", ".join(f"{device.name} ({device.kind})" for device in host.devices)


def _report(run: RunFolder, progress: Progress) -> Path | None:
    """Writes the run's report; one that fails costs the run nothing but a line."""
    from rlplace.runs.report import write_report

    try:
        return write_report(run)
    except Exception as error:  # whatever it is: the run itself is complete
        progress.say(f"no report.html: {error}")
        return None


def _show(result: TrainResult, folder: Path, report: Path | None) -> None:
    from rlplace.report import results_table
    from rlplace.report.console import CleanConsole

    console = CleanConsole(stderr=True, emoji=False)
    console.print(results_table([dict(row) for row in result.table.rows], best=result.table.best))
    console.print(result.summary, markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"best: {result.table.best}; run kept in {folder}" + (f"; to look at: {report}" if report else ""), markup=False
    )
