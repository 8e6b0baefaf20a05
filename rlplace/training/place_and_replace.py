"""`place_workload`: `rlplace place WORKLOAD`, a placement after a handful of simulated steps.

`replace_run`: `rlplace place DIR`, a run's step on another host by simulation, within seconds. `resume_elsewhere`:
`rlplace train --resume DIR --host NEW`, training on another host from the state of a run.
"""

from __future__ import annotations

import dataclasses
import math
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import RunnerError
from rlplace.graphs import Constraints
from rlplace.locks import measuring_alone
from rlplace.measure import Host, Placement, Plan, Problem, Simulator, save_placement
from rlplace.measure.bounds import lower_bound_s
from rlplace.measure.hosts.host_file import ENDINGS
from rlplace.measure.timing.threads import one_thread_here
from rlplace.report.console import make_progress
from rlplace.search import Budget, SearchResult, find
from rlplace.search.rules import baselines
from rlplace.session.folder import RunFolder
from rlplace.session.prepare import LEAST_TO_CHOOSE, Prepared, Steps, prepare
from rlplace.session.session import Session
from rlplace.session.setup import Setup
from rlplace.training.config import TrainConfig
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
from rlplace.training.method_choice import METHODS, PORTFOLIO
from rlplace.training.outputs import compile_kernels
from rlplace.training.train_and_resume import (
    CARRIED,
    EVERYTHING,
    NOTHING,
    Job,
    Shown,
    resume_training,
    with_given,
)


@one_thread_here()
def place_workload(
    setup: Setup, path: Path, *, method: str, evaluations: int, is_quiet: bool = False
) -> dict[str, Any]:
    """The object that `--json` prints:  placement, method, step_time_s, single_s, evaluations, plan_s, the bound,
    micro_batches.

    Args:
        setup: the step; on a host of this machine it is profiled, but no placement is measured.
        path: the placement goes here.
        method: a name of `METHODS`.
        evaluations: placements that it may simulate, beside those that choose how the batch is cut.
        is_quiet: no progress.

    Raises:
        UnknownName: no such method.
        RunnerError: no placement that was tried fits into memory; or another search measures here, and waiting was not
            asked for.
        UserError: the workload cannot be built, captured or cut so.
    """
    _ = METHODS[method]
    progress = make_progress(is_quiet=is_quiet)
    steps = Steps(setup.spec, setup.host, setup.workload_seed, setup.asked)
    with measuring_alone(setup.host, say=progress.say, is_waiting=setup.is_waiting):  # profiling counts seconds, too
        prepared = prepare(steps, progress.say, setup, evaluations=max(evaluations, LEAST_TO_CHOOSE))
    problem = prepared.problem
    simulator = Simulator(problem)
    found = find(problem, method, simulator, Budget(evaluations=evaluations), seed=setup.seed)
    plan, figures = _placed(problem, simulator, found, "evaluations")
    save_placement(Placement.of(problem, plan, method), path)
    return {
        "schema": 1,
        "placement": str(path),
        "method": method,
        "seed": setup.seed,
        "workload_seed": setup.workload_seed,
        **figures,
        "micro_batches": prepared.to_dict(),
    }


def _placed(problem: Problem, simulator: Simulator, found: SearchResult, option: str) -> tuple[Plan, dict[str, Any]]:
    """The plan that a search found, and its figures as `--json` prints them; `option` gives the search more."""
    if found.devices is None:
        raise RunnerError(f"none of {found.evaluations} placements fits into memory; give more `--{option}`.")
    bound_s, bound = lower_bound_s(problem)
    figures = {
        "kind": "simulated",
        "step_time_s": found.step_time_s,
        "single_s": min(
            float(simulator.step_times(baselines.best_single(problem, simulator)[None])[0]),
            baselines.whole_single_s(problem),
        ),
        "evaluations": found.evaluations,
        "plan_s": found.plan_s,
        "lower_bound_s": bound_s,
        "lower_bound": bound,
    }
    return found.plan if found.plan is not None else simulator.plan(found.devices), figures


SECONDS = 5.0
"""Default seconds of search."""


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
    """Places a run's step on another host by simulation, from the run's state; returns the object of `--json`.

    Args:
        folder: of the run, which is not changed.
        host: where its step goes.
        path: the placement goes here; None writes no file.
        host_word: the user's word for the host.
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
            compile_kernels(made.believed, simulator)
        found = search_again(made, Budget(evaluations=evaluations, seconds=seconds), method=method, seed=seed)
        plan, figures = _placed(made.believed, simulator, found, "seconds")
        placement = Placement.of(made.problem, plan, method)
        if path is not None:
            save_placement(placement, path)
        if run is not None:
            _keep(
                made,
                placement.devices,
                run,
                host_word,
                gangs=gangs,
                constraints=constraints,
                overwrite=overwrite,
                placement=placement,
            )
        told: dict[str, Any] = {
            "schema": 1,
            "run": str(folder),
            "workload": str(known.spec),
            "placement": None if path is None else str(path),
            "new_run": None if run is None else str(run),
            "method": method,
            "seed": seed,
            "workload_seed": known.session.request.workload_seed,
            "host": {"from": known.host.name, "to": host.name},
            **figures,
            "before_s": made.before_s,
            "carried_s": math.nan if made.start is None else float(simulator.step_times(made.start[None])[0]),
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


def _keep(
    made: Replaced,
    start: NDArray[np.int32] | None,
    root: Path,
    host_word: str,
    *,
    gangs: bool,
    constraints: Constraints | None,
    overwrite: bool,
    placement: Placement | None = None,
) -> None:
    """Keeps the problem, and the placement if there is one, as a run: its options are those of the old one."""
    known, host = made.known, made.match.new
    config = known.config if constraints is None else dataclasses.replace(known.config, constraints=constraints)
    if not host.is_simulated:  # what is measured has a budget of time
        config = without_policy(dataclasses.replace(config, evaluations=None), host)
    job = Job.of(known.setup(host, host_word, gangs=gangs), config, placed_again=str(known.session.path.parent))
    prepared = Prepared(made.problem, known.session.request.asked, 0, start)
    with closing(RunFolder.create(root, overwrite=overwrite)) as run:
        try:
            with Session.open(run) as session:
                job.keep(session, run)
                job.keep_problem(prepared, session, run)
                if made.learned is not None:
                    session.keep(**{CARRIED: made.learned})
                if placement is not None:
                    session.keep_placement(placement)
                    save_placement(placement, run.path("placement.json"))
        except BaseException:
            run.clear()
            raise


@one_thread_here()
def resume_elsewhere(
    folder: Path,
    host: Host,
    new_folder: Path,
    given: TrainConfig = NOTHING,
    *,
    host_word: str,
    workload: str | None = None,
    constraints: Constraints | None = None,
    gangs: bool = False,
    overwrite: bool = False,
    budget_s: float | None = None,
    is_waiting: bool = True,
    shown: Shown = EVERYTHING,
) -> dict[str, Any]:
    """Trains on another host, with the request and the state of a run; returns the object of `--json`.

    Op times and links that the run measured, factors that it learned and its best placement are where the new run
    begins; see `rlplace.training.elastic`. Figures of the new host count from there.

    Args:
        folder: of the run, which is not changed.
        host: where to train.
        new_folder: of the new run.
        given: as of `resume_training`.
        host_word: the user's word for the host.
        workload: the workload again, where the run is of a user's function or file.
        constraints: pins, exclusions, and ops that stay together, instead of the run's.
        gangs: whether the host was to have gangs.
        overwrite: whether there may be a run in `new_folder` already.
        budget_s: seconds of search, for the new run only.
        is_waiting: wait for another search that measures on this machine, instead of giving up.
        shown: the output for people.

    Raises:
        FileProblem: there is no run in `folder`, or one in `new_folder`; or a file cannot be read or written.
        FingerprintMismatch: the workload's step is not the run's any more.
        DeviceLost: a device was lost on the way.
        UserError: the workload cannot be captured, or not be placed on this host.
    """
    RunFolder.check(new_folder, overwrite=overwrite)
    known = read_known(folder, workload)
    say = make_progress(is_quiet=shown.is_quiet).say
    with closing(known.session):
        with_given(known.config, given, str(known.session.path))  # refuses before anything is captured
        made = replaced(known, host, say=say, constraints=constraints, isolated=given.isolated, is_waiting=is_waiting)
        for line in device_lines(made.match):
            say(line)
        _keep(made, made.start, new_folder, host_word, gangs=gangs, constraints=constraints, overwrite=overwrite)
    again = None if workload is None else str(known.spec)
    return resume_training(new_folder, given, workload=again, budget_s=budget_s, is_waiting=is_waiting, shown=shown)


def folder_for(folder: Path, host_word: str) -> Path:
    """The default folder of the new run: beside the old one, with the host in its name.

    >>> folder_for(Path("runs/nmt"), "cores:3").as_posix()
    'runs/nmt-cores-3'
    """
    word = Path(host_word).stem if host_word.endswith(ENDINGS) else host_word
    return folder.with_name(f"{folder.resolve().name}-{re.sub(r'[^A-Za-z0-9.+_]+', '-', word)}")
