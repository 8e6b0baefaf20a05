"""`run_training` and `resume_training`: what `rlplace train` does, from words, or a run's folder, to a run folder."""

from __future__ import annotations

import errno
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplace.errors import FileProblem, RlplaceError
from rlplace.graphs.grouping.constraints import Constraints
from rlplace.locks import measuring_alone
from rlplace.measure.hosts.host import Host
from rlplace.measure.timing.threads import one_thread_here
from rlplace.session.cut import WHOLE, CutOptions
from rlplace.session.folder import RunFolder
from rlplace.session.steps import Steps
from rlplace.training.config import TrainConfig
from rlplace.training.elastic.offer import offering
from rlplace.training.resume.config_file import Request, again_words, read_request
from rlplace.training.resume.journal import is_finished, mark_finished
from rlplace.training.resume.reopen import NOTHING, Named, reopen
from rlplace.training.run_request import check_request, run_request
from rlplace.workloads import WorkloadSpec

if TYPE_CHECKING:
    from rlplace.report.console import Progress

ANSWER = ("schema", "rows", "best", "micro_batches", "durations")
"""What `--json` prints of `result.json`."""
FULL = (errno.ENOSPC, errno.EDQUOT)


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
    workload_seed: int = 0,
    overwrite: bool = False,
    is_quiet: bool = False,
    is_table: bool = True,
    is_waiting: bool = True,
) -> dict[str, Any]:
    """Trains on a workload, leaves a run folder, prints the table (`is_table`); returns what `--json` prints.

    `workload_seed` is of the workload's weights and inputs; `is_waiting` waits for another search that measures on this
    machine, instead of giving up.

    Raises:
        MissingExtra: a cluster is asked for, and Ray is not installed.
        FileProblem: the folder exists and `overwrite` is not given, another run is writing into it, a store was named
            that cannot be opened, or the disk is full.
        RunnerError: another search measures here, and nobody wants to wait.
        UserError: the workload cannot be built or captured.
    """
    from rlplace.report.console import make_progress

    RunFolder.check(folder, overwrite=overwrite)
    request = Request(spec, host, config, host_word, gangs, asked, workload_seed=workload_seed)
    check_request(request)
    progress = make_progress(is_quiet=is_quiet)
    with measuring_alone(host, say=progress.say, run=folder, is_waiting=is_waiting):
        progress.say(f"reading {spec}" if spec.is_file else f"building {spec} and capturing its step")
        steps = _steps(request)
        run = RunFolder.create(folder, overwrite=overwrite)
        with offering(request, folder), going_on(run, request, progress):
            run.write_json("config.json", request.to_dict())
            return run_request(request, steps, run, progress, is_table=is_table)


@one_thread_here()
def resume_training(
    folder: Path,
    named: Named = NOTHING,
    *,
    is_quiet: bool = False,
    is_table: bool = True,
    is_waiting: bool = True,
) -> dict[str, Any]:
    """Goes on with the run in a folder from what it has measured and learned; returns what `--json` prints.

    On a simulated host, under a budget of evaluations, it ends with the bits of a run that was not interrupted. A run
    that has come to its end stays as it is, unless it gets a larger budget.

    Args:
        folder: of the run, in whatever state it was left.
        named: what the user names again, and a larger budget.
        is_quiet: show no progress.
        is_table: print the table.
        is_waiting: wait for another search that measures on this machine, instead of giving up.

    Raises:
        FileProblem: there is nothing to go on with, what there is is malformed, another process is at it, or the disk
            is full.
        FingerprintMismatch: the workload or the host is another by now.
        InvalidValue: a smaller budget than the run was given, other versions, or the workload is not the run's.
        RunnerError: another search measures here, and nobody wants to wait.
    """
    from rlplace.report.console import make_progress

    progress = make_progress(is_quiet=is_quiet)
    run = RunFolder.reopen(folder)
    try:
        has_ended = is_finished(run)
        if has_ended and (named.workload, named.budget_s, named.more_s) == (None, None, 0.0):  # also of unnamed code
            return _answer(run, progress)
        request, is_extended = reopen(run, named)
        if has_ended and not is_extended:
            return _answer(run, progress)
        check_request(request)
        with measuring_alone(request.host, say=progress.say, run=folder, is_waiting=is_waiting):
            progress.say(f"going on with {folder}: {request.spec} on {request.host.name}")
            steps = _steps(request)
            with offering(request, folder), going_on(run, request, progress):
                if is_extended:
                    run.write_json("config.json", request.to_dict())
                    if is_finished(run):
                        mark_finished(run, is_finished=False)
                return run_request(request, steps, run, progress, is_table=is_table, is_resumed=True)
    finally:
        run.close()


def _answer(run: RunFolder, progress: Progress) -> dict[str, Any]:
    """What a run came to that has ended, of which nothing changes."""
    count = read_request(run).config.evaluations
    more = "to go on, give it a larger --budget"
    if count is not None:  # a larger budget is refused
        more = f"its {count:,} evaluations are spent: for more, start another run with a larger --evaluations"
    progress.say(f"the run in {run.root} has come to its end; {more}")
    result = run.read_json("result.json")
    return {name: result[name] for name in ANSWER if name in result}


def _steps(request: Request) -> Steps:
    """The workload's steps; a pattern that matches nothing is refused before there is a run folder."""
    host, asked = request.host, request.asked
    steps = Steps(request.spec, host, request.workload_seed, asked)
    graph = steps.graph(1 if asked.count == "auto" else asked.count)
    constraints = request.config.constraints or Constraints()
    constraints.resolve(graph, [device.name for device in host.devices], [device.kind for device in host.devices])
    return steps


@contextmanager
def going_on(run: RunFolder, request: Request, progress: Progress) -> Iterator[None]:
    """Says what was kept and how to go on, however a run ends before its end; the folder is given free."""
    named = [*request.own_workload, "--resume", str(run.root), *again_words(request.config)]
    command = shlex.join(["rlplace", "train", *named])
    try:
        yield
    except KeyboardInterrupt:
        kept = f"; the best placement so far is {run.path('placement.json')}" if run.has("placement.json") else ""
        progress.say(f"stopped{kept}")
        progress.say(f"to go on: {command}")
        raise
    except RlplaceError as error:
        error.add_note(f"To go on: {command}")
        raise
    except OSError as error:
        if error.errno not in FULL:
            raise
        full = FileProblem(error.filename or run.root, f"cannot be written: {error.strerror}.")
        full.add_note(f"To go on: {command}")
        raise full from error
    finally:
        run.close()
