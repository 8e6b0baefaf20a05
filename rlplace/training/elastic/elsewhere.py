"""`resume_elsewhere`: `rlplace train --resume DIR --host NEW`, training on another host from what a run knows."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from rlplace.errors import UserError
from rlplace.graphs.grouping.constraints import Constraints
from rlplace.locks import measuring_alone
from rlplace.measure.hosts.host import Host
from rlplace.measure.hosts.host_file import ENDINGS
from rlplace.measure.problem import Problem
from rlplace.measure.timing.threads import one_thread_here
from rlplace.policy.policies import checked_policy
from rlplace.report.console import make_progress
from rlplace.say import Say
from rlplace.session.folder import RunFolder
from rlplace.session.prepare import Prepared
from rlplace.session.session import Session
from rlplace.training.command import EVERYTHING, INIT, Job, Shown, going_on, run_job
from rlplace.training.config import TrainConfig
from rlplace.training.elastic.placed_again import device_lines, read_known, replaced, without_policy
from rlplace.training.methods import POLICY, method_of
from rlplace.training.outputs import WEIGHTS
from rlplace.training.resume import NOTHING, Named, believed


@one_thread_here()
def resume_elsewhere(
    folder: Path,
    host: Host,
    new_folder: Path,
    named: Named = NOTHING,
    *,
    host_word: str,
    gangs: bool = False,
    constraints: Constraints | None = None,
    overwrite: bool = False,
    is_waiting: bool = True,
    shown: Shown = EVERYTHING,
) -> dict[str, Any]:
    """Trains on another host, as a run was asked to, from what the run knows; returns what `--json` prints.

    Op times and links that the run measured, factors that it learned, its best placement and the weights of its policy
    are where the new run begins; see `rlplace.training.elastic`. What is learned on the new host counts from there.

    Args:
        folder: of the run, which is not changed.
        host: where to train.
        new_folder: of the new run.
        named: what the user names again; a budget is the new run's own.
        host_word: what the user called the host.
        gangs: whether it was to have gangs.
        constraints: pins, exclusions and what stays together, instead of the run's.
        overwrite: whether there may be a run in `new_folder` already.
        is_waiting: wait for another search that measures on this machine, instead of giving up.
        shown: what people are shown.

    Raises:
        FileProblem: there is no run in `folder`, or one in `new_folder`; or a file cannot be read or written.
        FingerprintMismatch: the workload's step is not the run's any more.
        DeviceLost: a device was lost on the way.
        UserError: the workload cannot be captured, or not be placed on this host.
    """
    RunFolder.check(new_folder, overwrite=overwrite)
    known = read_known(folder, named.workload)
    progress = make_progress(is_quiet=shown.is_quiet)
    with closing(known.session):
        config = believed(known.config, named, str(known.session.path))
        config = _config(config, host, named, progress.say)
        with measuring_alone(host, say=progress.say, run=new_folder, is_waiting=is_waiting):
            made = replaced(known, host, say=progress.say, constraints=constraints, isolated=config.isolated)
            for line in device_lines(made.match):
                progress.say(line)
            if constraints is not None:
                config = dataclasses.replace(config, constraints=constraints)
            problem = made.believed if host.is_simulated else made.problem  # what can be measured is learned afresh
            asked = known.request.asked
            prepared = Prepared(problem, asked, 0, made.start)
            setup = known.setup(host, host_word, gangs=gangs)
            job = Job.of(setup, config, placed_again=str(folder))
            job.check()
            weights = _weights(config, problem, known.session, progress.say)
            run = RunFolder.create(new_folder, overwrite=overwrite)
            with closing(run), going_on(run, job, progress), Session.open(run) as session:
                session.keep_files(weights)
                job.keep(session, run)
                session.keep_problem(prepared)
                known_hosts = () if made.learned is None else (made.learned,)
                return run_job(job, prepared, run, session, progress, shown=shown, known_hosts=known_hosts)


def folder_for(folder: Path, host_word: str) -> Path:
    """Where the new run goes if nobody says: beside the old one, with the host in its name.

    >>> folder_for(Path("runs/nmt"), "cores:3").as_posix()
    'runs/nmt-cores-3'
    """
    word = Path(host_word).stem if host_word.endswith(ENDINGS) else host_word
    return folder.with_name(f"{folder.resolve().name}-{re.sub(r'[^A-Za-z0-9.+_]+', '-', word)}")


def _config(config: TrainConfig, host: Host, named: Named, say: Say) -> TrainConfig:
    """The run's options, with the budget that is given now; one of evaluations holds where nothing is measured."""
    if named.budget_s is not None:
        config = dataclasses.replace(config, budget_s=named.budget_s, evaluations=None)
    if config.evaluations is not None and not host.is_simulated:
        say(f"placements are measured on {host.name}: a budget of {config.budget_s:g} s, not of evaluations")
        config = dataclasses.replace(config, evaluations=None)
    return without_policy(config, host)


def _weights(config: TrainConfig, problem: Problem, old: Session, say: Say) -> dict[str, bytes]:
    """The weights that the policy begins with, as files: those that the run kept, where they fit."""
    files = {name: old.file(kept) for name, kept in zip(INIT, WEIGHTS, strict=True)}
    if method_of(config, is_simulated=problem.host.is_simulated) != POLICY or None in files.values():
        return {}
    found = {name: data for name, data in files.items() if data is not None}
    with tempfile.TemporaryDirectory(prefix="rlplace-") as folder:
        for name, data in found.items():
            (Path(folder) / name).write_bytes(data)
        try:
            learn = dataclasses.replace(config.learn, init=str(Path(folder) / INIT[0]))
            checked_policy(problem, learn, config.seed)
        except UserError as error:
            say(f"the policy begins anew, the weights of {old.path.parent} are of another size or kind: {error}")
            return {}
    return found
