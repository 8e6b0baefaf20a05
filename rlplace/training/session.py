"""`run_training`: what `rlplace train` does, from words to a run folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplace.cluster import check_cluster
from rlplace.files import read_json
from rlplace.graphs.grouping.constraints import Constraints
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.host_model.learned_host import FILE as HOST_MODEL
from rlplace.measure.hosts.host import Host
from rlplace.measure.run.threads import one_thread_here
from rlplace.runs.durations import Durations, Stopwatch
from rlplace.runs.folder import RunFolder
from rlplace.runs.host_lock import measuring_alone
from rlplace.runs.micro_batches import WHOLE, CutOptions
from rlplace.runs.prepared import prepare
from rlplace.runs.setup import Steps, default_size, describe_problem, versions
from rlplace.store.log import check_store
from rlplace.training.checks import check_names
from rlplace.training.config import TrainConfig
from rlplace.training.forecast import afterwards, ahead, forecast, one_device_step_s
from rlplace.training.methods import method_of
from rlplace.training.outcome import TrainResult
from rlplace.training.run import methods_of, num_rows, train
from rlplace.workloads import WorkloadSpec

if TYPE_CHECKING:
    from rlplace.report.progress import Progress
    from rlplace.runs.tracking import Tracker


@one_thread_here()
def run_training(
    spec: WorkloadSpec,
    host: Host,
    config: TrainConfig,
    folder: Path,
    *,
    host_word: str,
    gangs: bool = False,
    asked: CutOptions = WHOLE,
    overwrite: bool = False,
    is_quiet: bool = False,
    is_waiting: bool = True,
) -> dict[str, Any]:
    """Trains on a workload, leaves a run folder, prints the table; returns what `--json` prints.

    `is_waiting` waits for another search that measures on this machine, instead of giving up.

    Raises:
        MissingExtra: a cluster is asked for, and Ray is not installed.
        FileProblem: the folder exists and `overwrite` is not given, another run is writing into it, or a store was
            named that cannot be opened.
        RunnerError: another search measures here, and nobody wants to wait.
        UserError: the workload cannot be built or captured.
    """
    from rlplace.report.progress import make_progress

    RunFolder.check(folder, overwrite=overwrite)
    named = [device.name for device in host.devices], [device.kind for device in host.devices]
    constraints = config.constraints or Constraints()
    constraints.check_devices(*named)
    check_names(config, is_simulated=host.is_simulated)
    check_cluster(config.cluster)
    if not host.is_simulated:
        check_store(config.store)
    progress = make_progress(is_quiet=is_quiet)
    with measuring_alone(host, say=progress.say, run=folder, is_waiting=is_waiting):
        return _run(spec, host, config, folder, progress, host_word, gangs, asked, overwrite, is_quiet)


def _run(
    spec: WorkloadSpec,
    host: Host,
    config: TrainConfig,
    folder: Path,
    progress: Progress,
    host_word: str,
    gangs: bool,
    asked: CutOptions,
    overwrite: bool,
    is_quiet: bool,
) -> dict[str, Any]:
    """As `run_training`, where nobody else measures."""
    from rlplace.runs.tracking import make_tracker

    size = default_size(host)
    resolved = {
        "schema": 1,
        "workload": str(spec),
        "default_size": size,
        "host": host_word,
        "gangs": gangs,
        "micro_batches": asked.to_dict(),
        "train": _resolved(config, host),
        "versions": versions(),
    }
    progress.say(f"reading {spec}" if spec.is_file else f"building {spec} and capturing its step")
    steps = Steps(spec, host, config.seed, asked)
    graph = steps.graph(1 if asked.count == "auto" else asked.count)
    constraints = config.constraints or Constraints()
    named = [device.name for device in host.devices], [device.kind for device in host.devices]
    constraints.resolve(graph, *named)  # a pattern that matches nothing leaves no run folder behind
    run = RunFolder.create(folder, overwrite=overwrite)
    run.write_json("config.json", resolved)
    tracker = make_tracker(config.track, folder, resolved)
    is_complete = False
    try:
        progress.say(f"devices: {_devices(host)}")
        expected = _said_ahead(graph, host, config, progress)
        watch = Stopwatch()
        prepared = prepare(
            steps,
            progress,
            seed=config.seed,
            num_groups=config.num_groups,
            grouping=config.grouping,
            acyclic=config.acyclic,
            constraints=config.constraints,
            isolated=config.isolated,
        )
        problem, profiling_s = prepared.problem, watch.lap_s()
        run.write_json("config.json", resolved | {"micro_batches": prepared.to_dict()})
        run.write_json("problem.json", describe_problem(problem))
        result = train(
            problem, config, start=prepared.start, run=run, progress=progress, tracker=tracker, workload=str(spec)
        )
        from rlplace.export.script import script

        if not (spec.is_function or spec.is_file):
            run.write_text("step.py", script(str(spec), default_size=size, seed=config.seed, cut=prepared.to_dict()))
        taken = dataclasses.replace(result.durations, profiling_s=profiling_s)
        expected = result.expected if expected is None else expected
        durations = {"expected": expected.to_dict(), "taken": taken.to_dict()}
        told = {"micro_batches": prepared.to_dict(), "durations": durations}
        run.write_json("result.json", read_json(run.path("result.json")) | told)
        _track(tracker, run, result)
        is_complete = True
        progress.say(afterwards(taken, expected))
        report = _report(run, progress)
        progress.close()
        _show(result, folder, report, is_quiet=is_quiet)
        return result.table.to_dict() | told
    except KeyboardInterrupt:
        if run.has("placement.json"):
            progress.say(f"stopped; the best placement so far is {run.path('placement.json')}")
        raise
    finally:
        progress.close()
        tracker.finish(is_complete=is_complete)
        if tracker.how_to_sync:
            progress.say(tracker.how_to_sync)
        run.close()


def _said_ahead(graph: OpGraph, host: Host, config: TrainConfig, progress: Progress) -> Durations | None:
    """How long all of the run is expected to take, which is said; None where that is not known before profiling."""
    step_s = None if host.is_simulated else one_device_step_s(graph, host)
    if step_s is None:
        return None
    methods = methods_of(config, host)
    expected = forecast(graph, host, config, step_s, num_rows=num_rows(methods), is_profiled=False)
    progress.say(ahead(expected, methods, is_simulated=False, whole="in all"))
    return expected


def _track(tracker: Tracker, run: RunFolder, result: TrainResult) -> None:
    """Shows the tracker the final table and the files that a run is known by."""
    tracker.log_table(result.table.rows)
    tracker.log_files("config", [run.path("config.json"), run.path("result.json")])
    learned = [run.path(name) for name in ("policy.safetensors", "policy.json", HOST_MODEL) if run.has(name)]
    if learned:
        tracker.log_files("policy", learned)


def _resolved(config: TrainConfig, host: Host) -> dict[str, Any]:
    """What a run was, with nothing left open."""
    learn = dataclasses.replace(config.learn, **dataclasses.asdict(config.learn.recipe))
    search = dataclasses.replace(config.search, method=method_of(config, is_simulated=host.is_simulated))
    return dataclasses.asdict(dataclasses.replace(config, learn=learn, search=search))


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


def _show(result: TrainResult, folder: Path, report: Path | None, *, is_quiet: bool) -> None:
    from rich.console import Console

    from rlplace.report import results_table

    if is_quiet:
        return
    console = Console(stderr=True, emoji=False)
    console.print(results_table([dict(row) for row in result.table.rows], best=result.table.best))
    console.print(
        f"best: {result.table.best}; run kept in {folder}" + (f"; to look at: {report}" if report else ""), markup=False
    )
