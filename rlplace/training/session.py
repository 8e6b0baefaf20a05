"""`run_training` and `export_run`: what the command line does, from words to a run folder."""

from __future__ import annotations

import dataclasses
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlplace import __version__
from rlplace.errors import InvalidValue
from rlplace.graphs.capture import capture
from rlplace.graphs.constraints import Constraints
from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs import Costs
from rlplace.measure.host import Host
from rlplace.measure.placement import load_placement
from rlplace.measure.problem import Problem
from rlplace.measure.threads import one_thread_here
from rlplace.training.config import TrainConfig
from rlplace.training.run_folder import RunFolder
from rlplace.training.train import TrainResult, train
from rlplace.workloads import Size, Workload, WorkloadSpec, build, parse_workload

if TYPE_CHECKING:
    from rlplace.training.progress import Progress


def default_size(host: Host) -> Size:
    """The size of a workload named without one: `small` on a host of cores only, else `paper`."""
    return "small" if all(device.backend == "cpu" for device in host.devices) else "paper"


def capture_workload(workload: Workload) -> OpGraph:
    """The graph of a workload's step."""
    return capture(workload.model, workload.inputs, workload.loss_fn, workload.optimizer)


def graph_for(spec: WorkloadSpec, host: Host, seed: int) -> OpGraph:
    """The graph of one step: captured from the model that `spec` names, or read from the graph file.

    Args:
        spec: the workload.
        host: decides the size of a name without one; a simulated one needs no memory for the model.
        seed: of the model's weights and inputs.

    Raises:
        InvalidValue: a graph file, and the host is of this machine.
        UserError: the workload cannot be built or captured, or the file is malformed.
    """
    if not spec.is_file:
        return capture_workload(build_for(spec, host, seed))
    if not host.is_simulated:
        raise _only_simulated(spec)
    from rlplace.graphs.formats import load_graph

    graph = load_graph(spec.path)
    if graph.num_ops == 0:
        raise InvalidValue("ops", 0, "a graph with an op at least", where=str(spec.path))
    return graph


@one_thread_here()
def run_training(
    spec: WorkloadSpec,
    host: Host,
    config: TrainConfig,
    folder: Path,
    *,
    host_word: str,
    gangs: bool = False,
    overwrite: bool = False,
    is_quiet: bool = False,
) -> dict[str, Any]:
    """Trains on a workload, leaves a run folder, prints the table; returns what `--json` prints.

    Raises:
        FileProblem: the folder exists and `overwrite` is not given.
        UserError: the workload cannot be built or captured.
    """
    from rlplace.training.progress import make_progress
    from rlplace.training.tracking import make_tracker

    RunFolder.check(folder, overwrite=overwrite)
    named = [device.name for device in host.devices], [device.kind for device in host.devices]
    config.constraints.check_devices(*named)
    progress = make_progress(is_quiet=is_quiet)
    size = default_size(host)
    resolved = {
        "schema": 1,
        "workload": str(spec),
        "default_size": size,
        "host": host_word,
        "gangs": gangs,
        "train": dataclasses.asdict(config),
        "versions": versions(),
    }
    progress.say(f"reading {spec}" if spec.is_file else f"building {spec} and capturing its step")
    graph = graph_for(spec, host, config.seed)
    config.constraints.resolve(graph, *named)  # a pattern that matches nothing leaves no run folder behind
    run = RunFolder.create(folder, overwrite=overwrite)
    run.write_json("config.json", resolved)
    tracker = make_tracker(config.track, folder, resolved)
    is_complete = False
    try:
        progress.say(f"{graph.num_ops} ops, {graph.num_edges} edges on {_devices(host)}")
        problem = make_problem(
            graph,
            host,
            config.num_groups,
            progress,
            spec=spec,
            grouping=config.grouping,
            acyclic=config.acyclic,
            constraints=config.constraints,
        )
        run.write_json("problem.json", describe_problem(problem))
        result = train(problem, config, run=run, progress=progress, tracker=tracker)
        from rlplace.export.script import script

        if not (spec.is_function or spec.is_file):
            run.write_text("step.py", script(str(spec), default_size=size, seed=config.seed))
        is_complete = True
        progress.close()
        _show(result, folder, is_quiet=is_quiet)
        return result.table.to_dict()
    finally:
        progress.close()
        tracker.finish(is_complete=is_complete)


def make_problem(
    graph: OpGraph,
    host: Host,
    num_groups: int,
    progress: Progress,
    *,
    spec: WorkloadSpec | None = None,
    grouping: str = "heavy-edge",
    acyclic: bool = False,
    constraints: Constraints | None = None,
) -> Problem:
    """The problem: profiled on a host of this machine; on a simulated one estimated, or as the graph file gives it."""
    if host.is_simulated:
        progress.say(f"host {host.name} is simulated: every step time below is the simulator's, none is measured")
        costs = given_costs(spec, host) or Costs.estimate(graph, host)
        if costs.source == "given":
            progress.say("times of ops are those that the file gives, in seconds, the same on every device")
        problem = Problem.grouped(graph, host, costs, num_groups, grouping, acyclic=acyclic, constraints=constraints)
    else:
        problem = Problem.profile(
            graph,
            host,
            num_groups=num_groups,
            grouping=grouping,
            acyclic=acyclic,
            constraints=constraints,
            on_progress=progress.say,
        )
    if problem.grouping.dropped:
        progress.say(f"groups without cycles: not followed everywhere: {', '.join(problem.grouping.dropped)}")
    return problem


def given_costs(spec: WorkloadSpec | None, host: Host) -> Costs | None:
    """The costs that a workload's graph file gives; None where it gives none, or the workload is no file.

    Raises:
        UserError: the file is malformed.
    """
    if spec is None or not spec.is_file:
        return None
    from rlplace.graphs.formats import load_times_s

    times_s = load_times_s(spec.path)
    return None if times_s is None else Costs.given(times_s, host)


@one_thread_here()
def export_run(folder: Path, *, workload: str | None, is_check: bool) -> dict[str, Any]:
    """Writes a run's `step.py`, or compares its placed step with eager; returns what `--json` prints.

    Raises:
        FileProblem: no run there, or a malformed one.
        FingerprintMismatch: its placement is for another graph or host.
        InvalidValue: the run is of a user's function, and `workload` does not name it again; or of a graph file.
    """
    from rlplace.export.check import check_export
    from rlplace.export.script import script
    from rlplace.export.step import matching_host

    run = RunFolder.open(folder)
    config = run.read_json("config.json")
    placement = load_placement(run.path("placement.json"))
    spec = _spec_of(config, workload)
    if not is_check:
        run.write_text("step.py", script(str(spec), default_size=config["default_size"], seed=config["train"]["seed"]))
        print(f"wrote {run.path('step.py')}: run it with python {run.path('step.py')}", file=sys.stderr)
        return {"schema": 1, "path": str(run.path("step.py"))}
    host = matching_host(placement)
    graph = capture_workload(build(spec, default_size=config["default_size"], seed=config["train"]["seed"]))
    placement.require(graph, host)
    checked = check_export(graph, host, placement.plan)
    verdict = "agrees with eager" if checked.ok else "DIFFERS from eager"
    print(
        f"{checked.num_steps} placed steps: {verdict}; largest relative difference of the loss "
        f"{checked.max_loss_rel_diff:.2e}, of parameters {checked.max_param_rel_diff:.2e} (float64)",
        file=sys.stderr,
    )
    return checked.to_dict()


def describe_problem(problem: Problem) -> dict[str, Any]:
    """What a run keeps of its problem: host, figures, groups and costs."""
    graph = problem.graph
    return {
        "schema": 1,
        "graph": {
            "fingerprint": graph.fingerprint,
            "num_ops": graph.num_ops,
            "num_edges": graph.num_edges,
            "names": list(graph.names),
        },
        "host_fingerprint": problem.host.fingerprint,
        "host": problem.host.to_dict(),
        "costs": {"source": problem.costs.source, "op_time_s": problem.costs.op_time_s.tolist()},
        "grouping": {
            "rule": problem.grouping.rule,
            "dropped": list(problem.grouping.dropped),
            "op_group": problem.grouping.op_group.tolist(),
        },
        "allowed": None if problem.allowed is None else problem.group_allowed.tolist(),
    }


def versions() -> dict[str, str]:
    """Versions that a result depends on."""
    return {"rlplace": __version__, "python": platform.python_version(), "torch": torch.__version__}


def _spec_of(config: dict[str, Any], workload: str | None) -> WorkloadSpec:
    recorded = parse_workload(config["workload"])
    if workload is not None:
        recorded = parse_workload(workload)
    if recorded.is_file:
        raise _only_simulated(recorded)
    if workload is None and recorded.is_function:
        raise InvalidValue(
            "workload",
            None,
            repr(config["workload"]),
            where="export",
            hint="The run is of your own function, and code named in a run is imported only if you pass it again: "
            f"--workload {config['workload']}",
        )
    return recorded


def _only_simulated(spec: WorkloadSpec) -> InvalidValue:
    return InvalidValue(
        "workload",
        str(spec),
        "a name or package.module:function",
        hint="A graph file alone can be simulated, not measured; give --host a preset (`rlplace hosts` lists them), or "
        "the model that the graph was captured from.",
    )


def build_for(spec: WorkloadSpec, host: Host, seed: int) -> Workload:
    """The workload at the size that suits the host; without memory behind it where the host is simulated."""
    if not host.is_simulated:
        return build(spec, default_size=default_size(host), seed=seed)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():  # a simulated host runs nothing: no need to allocate a model of a paper's size
        return build(spec, default_size=default_size(host), seed=seed)


def _devices(host: Host) -> str:
    return ", ".join(f"{device.name} ({device.kind})" for device in host.devices)


def _show(result: TrainResult, folder: Path, *, is_quiet: bool) -> None:
    from rich.console import Console

    from rlplace.report import results_table

    if is_quiet:
        return
    console = Console(stderr=True)
    console.print(results_table([dict(row) for row in result.table.rows], best=result.table.best))
    console.print(f"best: {result.table.best}; run kept in {folder}")
