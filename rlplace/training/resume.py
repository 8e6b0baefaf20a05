"""`resume_training`: what `rlplace train --resume DIR` does; `believed`: how far a run folder is believed."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlplace.errors import FileProblem, InvalidValue
from rlplace.locks import measuring_alone
from rlplace.measure.hosts.resolve import is_host_file, resolve_host
from rlplace.measure.timing.threads import one_thread_here
from rlplace.policy.options import WEIGHTS_ENDING
from rlplace.records import shortened
from rlplace.report.console import Progress, make_progress
from rlplace.say import clean, say
from rlplace.session.facts import Request
from rlplace.session.folder import RunFolder
from rlplace.session.session import Session
from rlplace.session.steps import versions
from rlplace.training.command import EVERYTHING, HARMLESS, Job, Shown, again_words, answer_of, going_on, run_job
from rlplace.training.config import TrainConfig
from rlplace.workloads import WorkloadSpec, parse_kept_workload


@dataclass(frozen=True)
class Named:
    """What the user names beside `--resume`; None leaves it to the run, as far as a run folder is believed.

    A folder may come from a stranger. What it says is believed where it only restricts; what reaches a host, a path, a
    tracker or code counts only if the user names it again.
    """

    workload: str | None = None
    """The workload again: a function or a file of the user's."""
    budget_s: float | None = None
    """Seconds of search in all."""
    more_s: float = 0.0
    """Seconds of search on top of what the run was given."""
    store: str | None = None
    """As of `TrainConfig`, and the next three likewise."""
    track: str | None = None
    cluster: str | None = None
    isolated: bool | None = None
    init: str | None = None
    """Weights to begin with, where those of the run are a file."""
    priors: Path | None = None
    """What is expected of hosts, where that of the run is a file."""


NOTHING = Named()
"""Everything is left to the run."""


@one_thread_here()
def resume_training(
    folder: Path, named: Named = NOTHING, *, is_waiting: bool = True, shown: Shown = EVERYTHING
) -> dict[str, Any]:
    """Goes on with the run in a folder from what it has measured and learned; returns what `--json` prints.

    On a simulated host, under a budget of evaluations, it ends with the bits of a run that was not interrupted. A run
    that has come to its end stays as it is, unless it gets a larger budget.

    Args:
        folder: of the run, in whatever state it was left.
        named: what the user names again, and a larger budget.
        is_waiting: wait for another search that measures on this machine, instead of giving up.
        shown: what people are shown.

    Raises:
        FileProblem: there is nothing to go on with, what there is is malformed, another process is at it, or the disk
            is full.
        FingerprintMismatch: the workload or the host is another by now.
        InvalidValue: a smaller budget than the run was given, other versions, or the workload is not the run's.
        RunnerError: another search measures here, and waiting was refused.
    """
    progress = make_progress(is_quiet=shown.is_quiet)
    run = RunFolder.reopen(folder)
    try:
        with Session.read(folder) as session:
            if not session.has("request"):
                hint = "the run was stopped before it began. Start it again, with `--overwrite`."
                raise FileProblem(folder, f"there is nothing to resume: {hint}")
            has_ended = session.has_ended
            if has_ended and (named.workload, named.budget_s, named.more_s) == (None, None, 0.0):  # also of own code
                return _ended(session, progress)
            job, is_extended = reopen(session, named)
            if has_ended and not is_extended:
                return _ended(session, progress)
        job.check()
        with measuring_alone(job.host, say=progress.say, run=folder, is_waiting=is_waiting):
            progress.say(f"going on with {folder}: {job.spec} on {job.host.name}")
            steps = job.steps()
            with going_on(run, job, progress), Session.open(run) as session:
                if is_extended:
                    job.keep(session, run)
                    session.keep(has_ended=False)
                return run_job(job, steps, run, session, progress, shown=shown, is_resumed=True)
    finally:
        run.close()


def _ended(session: Session, progress: Progress) -> dict[str, Any]:
    """The answer of a run that has ended, of which nothing changes."""
    count = kept_config(session).evaluations
    more = "to go on, give it a larger --budget"
    if count is not None:  # a larger budget is refused
        more = f"its {count:,} evaluations are spent: for more, start another run with a larger --evaluations"
    progress.say(f"the run in {session.path.parent} has come to its end; {more}")
    return answer_of(session)


def kept_config(session: Session) -> TrainConfig:
    """How the run was asked to search.

    Raises:
        FileProblem: the run was stopped before that was kept.
        InvalidValue, UnknownName: it is malformed; names the field.
    """
    found = session.fact("config", TrainConfig)
    if found is None:
        raise FileProblem(session.path, "this run has no config: it stopped before it began. Start it again.")
    return found


def reopen(session: Session, named: Named) -> tuple[Job, bool]:
    """What a run was asked to do, looked up again on this machine, and whether it gets a larger budget now.

    Args:
        session: of the run.
        named: what the user names again.

    Raises:
        FileProblem: other versions are installed, or the host is another.
        InvalidValue: the workload is another, or has to be named; or the budget is smaller than before.
        UserError: what the session holds is malformed, or names what does not exist.
    """
    request, kept, where = session.request, kept_config(session), str(session.path)
    if request.versions != versions():
        installed = ", ".join(f"{name} {version}" for name, version in versions().items())
        made = ", ".join(f"{name} {version}" for name, version in request.versions.items())
        raise FileProblem(
            where,
            f"the run was made with {clean(made)}, and here is {installed}: what it measured and learned does not hold "
            "for these. Go on with those, or start it again in another folder.",
        )
    spec = _spec(request, named.workload, where)
    if not is_host_file(request.host):
        host = resolve_host(request.host, gangs=request.gangs)
    elif session.has("host"):  # as the run keeps it: a host file is not the folder's
        host = session.host
    else:
        what = f"the run is of the host file {shortened(request.host)!r} and stopped before it kept what that says"
        raise FileProblem(where, f"{what}: start it again.")
    if host.fingerprint != request.host_fingerprint:
        raise FileProblem(
            where,
            f"the run is of host {shortened(request.host)!r} with other devices than it has here and now (fingerprint "
            f"{shortened(request.host_fingerprint)}, now {host.fingerprint}): go on where it was started, or name the "
            "new host with `--host`.",
        )
    config = _extended(believed(kept, named, where), named)
    return Job(spec, host, config, request), config.budget_s > kept.budget_s


def believed(config: TrainConfig, named: Named, where: str) -> TrainConfig:
    """The options of a run folder, as far as they are believed, with those that the user names again.

    What is not believed is said on stderr, also where no progress is shown.

    Args:
        config: what the folder says.
        named: what the user names again.
        where: the folder's file, for messages.

    Raises:
        InvalidValue: the run began with a file that the user does not name again, or with another one: what was
            learned from it does not hold without it.
    """
    for option, kept, again in (
        ("init", config.learn.init, named.init),
        ("priors", config.search.priors, named.priors),
    ):
        is_file = kept is not None and (option == "priors" or str(kept).endswith(WEIGHTS_ENDING))
        if (again is not None and again != kept) or (is_file and again is None):
            expected = f"{shortened(str(kept))!r}, as it was started" if kept is not None else "none, as it was started"
            hint = "A file is opened only if you name it again." if is_file else ""
            raise InvalidValue(f"--{option}", None if again is None else str(again), expected, where=where, hint=hint)
    changed = {}
    for option, harmless in HARMLESS.items():
        kept, again = getattr(config, option), getattr(named, option)
        changed[option] = kept if again is None else again
        if again is None and kept not in harmless:
            changed[option] = harmless[0]
            told = dataclasses.replace(TrainConfig(), **{option: kept})
            words = shortened(shlex.join(again_words(told)))
            line = f"{where} asks for `{words}`, which counts only if you give it again: going on without it"
            say(clean(line))
    return dataclasses.replace(config, **changed)


def _spec(kept: Request, workload: str | None, where: str) -> WorkloadSpec:
    """The workload of the run; a user's function is imported, and a file opened, only if they name it."""
    command = shlex.join(["rlplace", "train", kept.workload, "--resume", str(Path(where).parent)])
    spec = parse_kept_workload(kept.workload, workload, where=where, command=command)
    is_moved = spec.is_file and Path(spec.name).name == Path(kept.workload).name  # its graph is compared later
    if workload is not None and kept.workload not in (workload, str(spec)) and not is_moved:
        hint = "Name that one, or start a run of its own."
        raise InvalidValue(
            "workload", workload, f"{shortened(kept.workload)!r}, the run's", where="train --resume", hint=hint
        )
    return spec


def _extended(config: TrainConfig, named: Named) -> TrainConfig:
    budget_s = config.budget_s + named.more_s if named.more_s else named.budget_s
    if budget_s is None:
        return config
    if config.evaluations is not None:
        hint = "Its budget are placements, so that the same seed finds the same: leave `--budget` out."
        raise InvalidValue("budget", budget_s, "none for a run of `--evaluations`", where="train --resume", hint=hint)
    if budget_s < config.budget_s:
        expected = f"at least {config.budget_s:g} s, which the run was given"
        hint = (
            "It is the budget of the whole run, with what was spent of it before: "
            f"`--budget +{budget_s:g}s` gives the run {budget_s:g} s more."
        )
        raise InvalidValue("budget", budget_s, expected, where="train --resume", hint=hint)
    return dataclasses.replace(config, budget_s=budget_s)
