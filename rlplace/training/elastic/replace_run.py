"""`replace_run`: what `rlplace place DIR` does: a run's step on another host, within seconds."""

from __future__ import annotations

import dataclasses
import math
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from rlplace.errors import RunnerError
from rlplace.graphs.grouping.constraints import Constraints
from rlplace.measure.bounds import lower_bound_s
from rlplace.measure.hosts.host import Host
from rlplace.measure.placement import Placement, save_placement
from rlplace.measure.simulate.simulator import Simulator
from rlplace.report.console import make_progress
from rlplace.search.methods import find
from rlplace.search.rules import baselines
from rlplace.search.task import Budget
from rlplace.session.folder import RunFolder
from rlplace.session.prepare import Prepared
from rlplace.session.session import Session
from rlplace.session.steps import describe_problem
from rlplace.training.command import Job
from rlplace.training.elastic.placed_again import (
    Replaced,
    describe_costs,
    describe_devices,
    device_lines,
    move_lines,
    moves,
    read_known,
    replaced,
    search_again,
    without_policy,
)
from rlplace.training.methods import METHODS, PORTFOLIO

SECONDS = 5.0
"""Of search, where nobody says otherwise."""
WARM_UP_EVALUATIONS = 400
"""Enough for every kernel of `portfolio` to be compiled, or read from disk, before the clock starts."""


def replace_run(
    folder: Path,
    host: Host,
    path: Path | None,
    *,
    host_word: str,
    run: Path | None = None,
    workload: str | None = None,
    method: str = PORTFOLIO,
    seconds: float = math.inf,
    evaluations: float = math.inf,
    seed: int = 0,
    constraints: Constraints | None = None,
    gangs: bool = False,
    overwrite: bool = False,
    is_waiting: bool = True,
    is_quiet: bool = False,
) -> dict[str, Any]:
    """Places a run's step on another host by simulation, from what the run knows; returns what `--json` prints.

    Args:
        folder: of the run, which is not changed.
        host: where its step goes.
        path: the placement goes here; None writes no file.
        host_word: what the user called the host.
        run: a folder for the placement as a run of its own, which `rlplace export` and `train --resume` take.
        workload: the workload again, where the run is of a user's function.
        method: a name of `METHODS`.
        seconds: of search; `SECONDS` where neither they nor evaluations are given.
        evaluations: placements that it may simulate.
        seed: of every draw.
        constraints: pins and exclusions, instead of the run's.
        gangs: whether the host was to have gangs.
        overwrite: whether there may be a run in `run` already.
        is_waiting: wait for another search that measures on this machine, where ops have to be profiled.
        is_quiet: no progress.

    Raises:
        FileProblem: no run there, or a file of it cannot be read, or one of the new files cannot be written.
        FingerprintMismatch: the workload's step is not the run's any more.
        RunnerError: no placement that was tried fits into memory.
        UserError: the step cannot be captured or placed on this host.
    """
    _ = METHODS[method]
    if run is not None:
        RunFolder.check(run, overwrite=overwrite)
    known = read_known(folder, workload)
    progress = make_progress(is_quiet=is_quiet)
    try:
        made = replaced(known, host, say=progress.say, constraints=constraints, is_waiting=is_waiting)
        for line in device_lines(made.match):
            progress.say(line)
        if math.isinf(seconds) and math.isinf(evaluations):
            seconds = SECONDS
        simulator = Simulator(made.believed)
        if math.isfinite(seconds):
            find(made.believed, PORTFOLIO, simulator, Budget(WARM_UP_EVALUATIONS))
        found = search_again(made, Budget(evaluations=evaluations, seconds=seconds), method=method, seed=seed)
        if found.devices is None:
            raise RunnerError(f"none of {found.evaluations} placements fits into memory; give more `--seconds`.")
        plan = found.plan if found.plan is not None else simulator.plan(found.devices)
        placement = Placement.of(made.problem, plan, method)
        if path is not None:
            save_placement(placement, path)
        if run is not None:
            _keep(
                made,
                placement,
                run,
                host,
                host_word,
                gangs=gangs,
                constraints=constraints,
                overwrite=overwrite,
            )
        told: dict[str, Any] = {
            "schema": 1,
            "run": str(folder),
            "workload": str(known.spec),
            "placement": None if path is None else str(path),
            "new_run": None if run is None else str(run),
            "method": method,
            "seed": seed,
            "workload_seed": known.request.workload_seed,
            "kind": "simulated",
            "host": {"from": known.host.name, "to": host.name},
            "step_time_s": found.step_time_s,
            "before_s": made.before_s,
            "carried_s": _carried_s(made, simulator),
            "single_s": float(simulator.step_times(baselines.best_single(made.believed, simulator)[None])[0]),
            "evaluations": found.evaluations,
            "plan_s": found.plan_s,
            **dict(zip(("lower_bound_s", "lower_bound"), lower_bound_s(made.believed), strict=True)),
            "devices": describe_devices(made.match),
            "costs": describe_costs(made.carried, made.match),
            "is_learned": made.learned is not None,
        }
        if known.placement is not None:
            told["moved"] = moves(made.problem, made.match, known.placement.devices, plan.devices)
            for line in move_lines(told["moved"], made.problem.graph.num_ops):
                progress.say(line)
        return told
    finally:
        progress.close()
        known.session.close()


def _carried_s(made: Replaced, simulator: Simulator) -> float:
    """Simulated step time of the carried placement; NaN where there is none."""
    return math.nan if made.start is None else float(simulator.step_times(np.stack([made.start]))[0])


def _keep(
    made: Replaced,
    placement: Placement,
    root: Path,
    host: Host,
    host_word: str,
    *,
    gangs: bool,
    constraints: Constraints | None,
    overwrite: bool,
) -> None:
    """Keeps the placement as a run: its options are those of the old one, its host is another."""
    known = made.known
    config = known.config if constraints is None else dataclasses.replace(known.config, constraints=constraints)
    if not host.is_simulated:  # what is measured has a budget of time
        config = without_policy(dataclasses.replace(config, evaluations=None), host)
    job = Job.of(known.setup(host, host_word, gangs=gangs), config, placed_again=str(known.folder))
    prepared = Prepared(made.problem, known.request.asked, 0, placement.devices)
    with closing(RunFolder.create(root, overwrite=overwrite)) as run, Session.open(run) as session:
        job.keep(session, run)
        session.keep_problem(prepared)
        session.keep_placement(placement)
        start = placement.devices.tolist()
        run.write_json("config.json", job.told(prepared.to_dict()))
        run.write_json("problem.json", describe_problem(made.problem) | {"evaluations": 0, "start": start})
        save_placement(placement, run.path("placement.json"))
