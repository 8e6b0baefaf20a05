"""`run_training`: the command `rlplace train WORKLOAD`, from words to a run folder.

`resume_training`: the command `rlplace train --resume DIR`.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import shlex
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlplace.cluster import check_cluster
from rlplace.errors import DeviceLost, FileProblem, RlplaceError, refuse_if
from rlplace.files import write_text_atomic
from rlplace.graphs import Constraints
from rlplace.locks import measuring_alone
from rlplace.measure import Host, resolve_host
from rlplace.measure.host_model import LearnedHost
from rlplace.measure.host_model.learned_host import FILE as HOST_MODEL
from rlplace.measure.hosts.resolve import is_host_file
from rlplace.measure.timing.host_runner import lost_of
from rlplace.measure.timing.threads import one_thread_here, usable_cores
from rlplace.policy.options import WEIGHTS_ENDING
from rlplace.records import shortened
from rlplace.report.console import CleanConsole, Progress, make_progress
from rlplace.say import clean
from rlplace.search.improve.moves import are_kernels_kept
from rlplace.session.folder import RunFolder
from rlplace.session.prepare import LEAST_TO_CHOOSE, Prepared, Steps, prepare, versions
from rlplace.session.session import Session
from rlplace.session.session_records import Request
from rlplace.session.setup import Setup
from rlplace.session.step_script import script
from rlplace.store.log import check_store
from rlplace.training.config import TrainConfig
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
from rlplace.training.method_choice import check_names, method_of, methods_of
from rlplace.training.outputs import WEIGHTS, Run, TrainResult, num_rows, result_of
from rlplace.training.run import train_in
from rlplace.training.tracking import make_tracker
from rlplace.workloads import WorkloadSpec, default_size, parse_kept_workload

ANSWER = ("schema", "rows", "best", "micro_batches", "durations")
"""The entries of `result.json` that `--json` prints."""
FULL = (errno.ENOSPC, errno.EDQUOT)
CARRIED = "carried_host"
"""The host model that a run on another host begins with, among the records of its session."""


@dataclass(frozen=True)
class Shown:
    """The output for people.

    Attributes:
        is_quiet: no progress.
        is_table: the final table.
        is_json: the table goes to stderr, since stdout is for JSON.
    """

    is_quiet: bool = False
    is_table: bool = True
    is_json: bool = False


EVERYTHING = Shown()


@dataclass(frozen=True)
class Job:
    """The request of a run, looked up on this machine.

    Attributes:
        spec: the workload.
        host: where.
        config: how.
        request: the words of it.
    """

    spec: WorkloadSpec
    host: Host
    config: TrainConfig
    request: Request

    @classmethod
    def of(cls, setup: Setup, config: TrainConfig, placed_again: str = "") -> Job:
        """A new job; `placed_again` as of `Request`."""
        request = Request(
            str(setup.spec),
            setup.host_word,
            setup.host.fingerprint,
            default_size(setup.host),
            setup.gangs,
            setup.asked,
            setup.workload_seed,
            placed_again,
            versions(),
        )
        return cls(setup.spec, setup.host, config, request)

    @property
    def own_workload(self) -> list[str]:
        """The word that names the workload again where the run goes on, unless the run folder is believed."""
        return [] if self.spec.is_believed else [str(self.spec)]

    def again(self, *where: str) -> str:
        """The command that goes on with the run in a folder, with all that no folder says."""
        config, default = self.config, TrainConfig()
        init = config.learn.init if (config.learn.init or "").endswith(WEIGHTS_ENDING) else None
        given = {name: getattr(config, name) for name in ("store", "track", "cluster")}
        given = {name: value for name, value in given.items() if value != getattr(default, name)}
        given |= {"init": init, "priors": config.search.priors}
        words = [word for name, value in given.items() if value for word in (f"--{name}", str(value))]
        words += ["--in-process"] * (config.isolated is False)
        return shlex.join(["rlplace", "train", *self.own_workload, "--resume", *where, *words])

    @property
    def _names(self) -> tuple[list[str], list[str]]:
        """Names of the host's devices, and their kinds."""
        return [device.name for device in self.host.devices], [device.kind for device in self.host.devices]

    def check(self) -> None:
        """Refuses mistakes that show before anything is captured."""
        (self.config.constraints or Constraints()).check_devices(*self._names)
        check_names(self.config, is_simulated=self.host.is_simulated)
        check_cluster(self.config.cluster)
        if not self.host.is_simulated:
            check_store(self.config.store)

    def steps(self) -> Steps:
        """The workload's steps; a pattern that matches nothing is refused before there is a run folder."""
        steps = Steps(self.spec, self.host, self.request.workload_seed, self.request.asked)
        (self.config.constraints or Constraints()).resolve(steps.first_graph, *self._names)
        return steps

    def keep(self, session: Session, run: RunFolder) -> None:
        """Keeps the request in the session of its run, and writes `config.json`."""
        session.keep(request=self.request, config=self.config)
        run.write_json("config.json", self.told(self.request.asked.to_dict()))

    def keep_problem(self, prepared: Prepared, session: Session, run: RunFolder) -> None:
        """Keeps the problem in the session of its run, and writes `config.json` and `problem.json`."""
        session.keep_problem(prepared)
        run.write_json("config.json", self.told(prepared.to_dict()))
        run.write_json("problem.json", prepared.describe())

    def told(self, cut: dict[str, Any]) -> dict[str, Any]:
        """The content of `config.json`: the request in the user's words, and the same with all defaults."""
        config, request = self.config, dataclasses.asdict(self.request)
        learn = dataclasses.replace(config.learn, **dataclasses.asdict(config.learn.recipe))
        search = dataclasses.replace(config.search, method=method_of(config, is_simulated=self.host.is_simulated))
        asked = request.pop("asked") and self.request.asked.to_dict()
        return {
            "schema": 1,
            **request,
            "micro_batches": cut,
            "train": dataclasses.asdict(dataclasses.replace(config, learn=learn, search=search)),
            "asked": {"train": dataclasses.asdict(config), "micro_batches": asked},
        }


@one_thread_here()
def run_training(
    setup: Setup, config: TrainConfig, folder: Path, *, overwrite: bool = False, shown: Shown = EVERYTHING
) -> dict[str, Any]:
    """Trains on a workload, leaves a run folder, prints the table; returns the object of `--json`.

    Options that `setup` and `config` both have are those of `config` (`TrainConfig.of`).

    Raises:
        MissingExtra: a cluster is asked for, and Ray is not installed.
        FileProblem: the folder exists and `overwrite` is not given, another run is writing into it, a store was named
            that cannot be opened, or the disk is full.
        RunnerError: another search measures here, and waiting was refused.
        UserError: the workload cannot be built or captured.
    """
    RunFolder.check(folder, overwrite=overwrite)
    spec, host, job = setup.spec, setup.host, Job.of(setup, config)
    job.check()
    progress = make_progress(is_quiet=shown.is_quiet)
    with measuring_alone(host, say=progress.say, run=folder, is_waiting=setup.is_waiting):
        progress.say(f"reading {spec}" if spec.is_file else f"building {spec} and capturing its step")
        steps = job.steps()
        run = RunFolder.create(folder, overwrite=overwrite)
        with closing(run):
            try:
                session = Session.open(run)
                job.keep(session, run)
            except BaseException:  # the same command may start the run again
                run.clear()
                raise
            with session, going_on(run, job, progress):
                return run_job(job, steps, run, session, progress, shown=shown)


def run_job(
    job: Job,
    steps: Steps,
    run: RunFolder,
    session: Session,
    progress: Progress,
    *,
    shown: Shown,
    is_resumed: bool = False,
) -> dict[str, Any]:
    """All of a run, where no other process measures, in a folder that is this process's.

    Args:
        job: the request, as the run's session has it.
        steps: of its workload.
        run: its folder.
        session: of the run.
        progress: told how it goes.
        shown: the output for people at the end.
        is_resumed: go on from the session.
    """
    begin_s, config = time.monotonic(), job.config
    tracker = make_tracker(config.track, run.root, job.told(job.request.asked.to_dict()))
    is_complete = False
    try:
        progress.say(f"devices: {', '.join(f'{device.name} ({device.kind})' for device in job.host.devices)}")
        expected = None if is_resumed else _said_ahead(job, steps, progress)
        watch = Stopwatch()
        prepared = _prepared(job, steps, session, progress, is_resumed)
        profiling_s = watch.lap_s()
        job.keep_problem(prepared, session, run)
        asked, carried = within_rest(config, begin_s), session.fact(CARRIED, LearnedHost)
        known = () if carried is None else (carried,)
        made = Run(
            session,
            run,
            prepared.problem,
            asked,
            progress,
            tracker,
            prepared.start,
            is_resumed,
            known,
            profiling_s,
            expected,
        )
        result = train_in(made, workload=str(job.spec))
        if not job.spec.is_function and not job.spec.is_file:  # anybody can build the workload
            write_text_atomic(
                run.path("step.py"),
                script(
                    str(job.spec),
                    default_size=job.request.default_size,
                    seed=job.request.workload_seed,
                    cut=prepared.cut,
                    host=job.request.host,
                    is_simulated=job.host.is_simulated,
                ),
            )
        tracker.log_table(result.table.rows)
        tracker.log_files("config", [run.path("config.json"), run.path("result.json")])
        if learned := [run.path(name) for name in (*WEIGHTS, HOST_MODEL) if run.has(name)]:
            tracker.log_files("policy", learned)
        is_complete = True
        progress.say(afterwards(result.durations, result.expected, config.evaluations))
        report = _report(run, session, progress)
        session.keep(has_ended=True)
        progress.close()
        if shown.is_table:
            _show(result, run.root, report, is_json=shown.is_json)
        return answer_of(session)
    finally:
        progress.close()
        tracker.finish(is_complete=is_complete)
        if tracker.how_to_sync:
            progress.say(tracker.how_to_sync)


def answer_of(session: Session) -> dict[str, Any]:
    """The object of `--json` for a run that has ended."""
    result = result_of(session)
    return {name: result[name] for name in ANSWER if name in result}


@contextmanager
def going_on(run: RunFolder, job: Job, progress: Progress) -> Iterator[None]:
    """Says which results were kept and how to go on, if a run ends early.

    Raises:
        DeviceLost: in the place of any error that was raised while a device was lost.
    """
    command = job.again(str(run.root))
    try:
        yield
    except KeyboardInterrupt:
        kept = f"; the best placement so far is {run.path('placement.json')}" if run.has("placement.json") else ""
        progress.say(f"stopped{kept}")
        progress.say(f"to go on: {command}")
        raise
    except RlplaceError as error:
        error.add_note(f"To go on: {command}")
        lost = error if isinstance(error, DeviceLost) else None if job.host.is_simulated else lost_of(job.host, error)
        if lost is None:
            raise
        raise DeviceLost(lost.devices, lost.why, offer=_offer(job, run.root)) from error
    except OSError as error:
        if error.errno not in FULL:
            raise
        full = FileProblem(error.filename or "the output", f"cannot be written: {error.strerror}.")
        full.add_note(f"To go on: {command}")
        raise full from error


def what_is_left(host: Host, host_word: str) -> str:
    """A HOST word for the devices of a host that are still there.

    As many devices of as many cores as before, or as many as there are cores for; of GPUs, whichever PyTorch sees.

    Args:
        host: some of whose devices are lost.
        host_word: the user's word for it.
    """
    if any(device.machine for device in host.devices):
        return "nodes"  # those on which torchrun starts the next command
    if any(device.backend == "cuda" for device in host.devices):
        return host_word if host_word.startswith(("auto", "cuda")) else "auto"
    singles = [device for device in host.devices if not device.members]
    width = max(min((len(device.cores) for device in singles), default=1), 1)
    count = min(len(singles), len(usable_cores()) // width)
    word = "procs" if host.processes else "cores"
    return f"{word}:{count}{f'x{width}' if width > 1 else ''}" if count else word


def _offer(job: Job, folder: Path) -> str:
    """How a run goes on without the devices that it lost."""
    request, own = job.request, job.own_workload
    where = [str(folder), "--host", what_is_left(job.host, request.host), *(["--gangs"] if request.gangs else [])]
    train = job.again(*where)
    place = shlex.join(["rlplace", "place", *where, *(["--workload", *own] if own else [])])
    if any(device.machine for device in job.host.devices):
        return (
            f"What was measured is kept: start torchrun again on all machines, with `{job.again(str(folder))}`; or on "
            f"those that are left, with `{train}`, which searches again from there, or `{place}`, without measuring."
        )
    return f"What was measured is kept: go on with `{train}`, or place at once, without measuring, with `{place}`."


def _prepared(job: Job, steps: Steps, session: Session, progress: Progress, is_resumed: bool) -> Prepared:
    """The problem: as it was profiled, where it was; estimates come out the same again."""
    config = job.config
    is_kept = bool(job.request.placed_again) or not job.host.is_simulated
    if is_resumed and is_kept and session.has("problem"):
        prepared = session.prepared(steps, config)
        progress.say(f"{job.spec}: {prepared.problem.graph.num_ops} ops, {prepared.problem.costs.source} before")
        return prepared
    return prepare(
        steps,
        progress.say,
        config,
        evaluations=None if config.evaluations is None else max(config.evaluations, LEAST_TO_CHOOSE),
        most_s=math.inf if config.total_s is None else PROFILING_SHARE * config.total_s,
    )


def _said_ahead(job: Job, steps: Steps, progress: Progress) -> Durations | None:
    """How long all of the run is expected to take, which is said; None where that is not known before profiling."""
    host, config = job.host, job.config
    graph = steps.first_graph
    step_s = None if host.is_simulated else one_device_step_s(graph, host)
    if step_s is None:
        return None
    methods, is_compiled = methods_of(config, host), are_kernels_kept()
    _, expected = within(
        graph, host, config, step_s, num_rows=num_rows(methods, host), is_profiled=False, is_compiled=is_compiled
    )
    progress.say(ahead(expected, methods, config, is_simulated=False, whole="in all", is_compiled=is_compiled))
    return expected


NOTHING = TrainConfig()
"""Nothing is given beside the run folder."""
OUTSIDE = ("store", "track", "cluster", "isolated")
"""Options that reach out of a run folder, which may come from a stranger: each command gives them anew."""


def _report(run: RunFolder, session: Session, progress: Progress) -> Path | None:
    """Writes the run's report; one that fails costs the run nothing but a line."""
    from rlplace.report.html.page import write_report

    try:
        return write_report(run, session)
    except Exception as error:  # whatever it is: the run itself is complete
        progress.say(f"no report.html: {error}")
        return None


def _show(result: TrainResult, folder: Path, report: Path | None, *, is_json: bool) -> None:
    from rlplace.report import results_table

    console = CleanConsole(stderr=is_json, emoji=False)
    console.print(results_table([dict(row) for row in result.table.rows], best=result.table.best))
    console.print(result.summary, markup=False, highlight=False, soft_wrap=True)
    console.print(
        f"best: {result.table.best}; run kept in {folder}" + (f"; to look at: {report}" if report else ""), markup=False
    )


@one_thread_here()
def resume_training(
    folder: Path,
    given: TrainConfig = NOTHING,
    *,
    workload: str | None = None,
    budget_s: float | None = None,
    more_s: float = 0.0,
    is_waiting: bool = True,
    shown: Shown = EVERYTHING,
) -> dict[str, Any]:
    """Goes on with the run in a folder from its measurements and its learner; returns the object of `--json`.

    On a simulated host, under a budget of evaluations, it ends with the bits of a run that was not interrupted. A run
    that has come to its end stays as it is, unless it gets a larger budget.

    Args:
        folder: of the run, in any state.
        given: the options of this command: those of `OUTSIDE`, and the files that the run began with, count; all others
            are as the run was started.
        workload: the workload again: a function or a file of the user's.
        budget_s: seconds of search in all.
        more_s: seconds of search on top of the run's budget.
        is_waiting: wait for another search that measures on this machine, instead of giving up.
        shown: the output for people.

    Raises:
        FileProblem: there is no run to go on with, its session is malformed, another process writes it, or the disk is
            full.
        FingerprintMismatch: the workload or the host is another by now.
        InvalidValue: a smaller budget than the run was given, other versions, or the workload is not the run's.
        RunnerError: another search measures here, and waiting was refused.
    """
    progress = make_progress(is_quiet=shown.is_quiet)
    with closing(RunFolder.reopen(folder)) as run:
        with Session.read(folder) as session:
            if not session.has("request"):
                raise FileProblem(
                    folder,
                    "there is nothing to resume: the run was stopped before it began. Start it again, with "
                    "`--overwrite`.",
                )
            has_ended = session.has_ended
            if has_ended and (workload, budget_s, more_s) == (None, None, 0.0):  # also of own code
                return _ended(session, progress)
            job, is_extended = reopen(session, given, workload, budget_s, more_s)
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


def _ended(session: Session, progress: Progress) -> dict[str, Any]:
    """The answer of a run that has ended, of which nothing changes."""
    count = session.required("config", TrainConfig).evaluations
    more = (
        "to go on, give it a larger --budget"
        if count is None
        else f"its {count:,} evaluations are spent: for more, start another run with a larger --evaluations"
    )
    progress.say(f"the run in {session.path.parent} has come to its end; {more}")
    return answer_of(session)


def reopen(
    session: Session,
    given: TrainConfig = NOTHING,
    workload: str | None = None,
    budget_s: float | None = None,
    more_s: float = 0.0,
) -> tuple[Job, bool]:
    """The request of a run, looked up again on this machine, and whether it gets another budget now.

    Args:
        session: of the run.
        given: as of `resume_training`, and the next three likewise.
        workload: see there.
        budget_s: see there.
        more_s: see there.

    Raises:
        FileProblem: other versions are installed, or the host is another.
        InvalidValue: the workload is another, or has to be named; or the budget is smaller than before.
        UserError: the session is malformed, or a name in it does not exist.
    """
    request, kept, where = session.request, session.required("config", TrainConfig), str(session.path)
    if request.versions != versions():
        installed = ", ".join(f"{name} {version}" for name, version in versions().items())
        made = ", ".join(f"{name} {version}" for name, version in request.versions.items())
        raise FileProblem(
            where,
            f"the run was made with {clean(made)}, and here is {installed}: what it measured and learned does not hold "
            "for these. Go on with those, or start it again in another folder.",
        )
    spec = _spec(request, workload, where)
    if not is_host_file(request.host):
        host = resolve_host(request.host, gangs=request.gangs)
    elif session.has("host"):  # as the run keeps it: a host file is not the folder's
        host = session.host
    else:
        raise FileProblem(
            where,
            f"the run is of the host file {shortened(request.host)!r} and stopped before it kept the content of that "
            "file: start it again.",
        )
    if host.fingerprint != request.host_fingerprint:
        raise FileProblem(
            where,
            f"the run is of host {shortened(request.host)!r} with other devices than it has here and now (fingerprint "
            f"{shortened(request.host_fingerprint)}, now {host.fingerprint}): go on where it was started, or name the "
            "new host with `--host`.",
        )
    config = with_given(kept, given, where)
    if more_s or budget_s is not None:
        config = _extended(config, more_s, budget_s, has_begun=not request.placed_again or session.has("signature"))
    is_extended = (config.budget_s, config.evaluations) != (kept.budget_s, kept.evaluations)
    return Job(spec, host, config, request), is_extended


def with_given(kept: TrainConfig, given: TrainConfig, where: str) -> TrainConfig:
    """The options of a run folder, but those that reach out of it as they are given now.

    Args:
        kept: of the folder.
        given: of the command.
        where: the folder's file, for messages.

    Raises:
        InvalidValue: the run began with a file that the user does not name again, or with another one: figures that
            were learned from it do not hold without it.
    """
    for option, before, again in (
        ("init", kept.learn.init, given.learn.init),
        ("priors", kept.search.priors, given.search.priors),
    ):
        is_file = before is not None and (option == "priors" or str(before).endswith(WEIGHTS_ENDING))
        refuse_if(
            before != again and (again is not None or is_file),
            f"--{option}",
            None if again is None else str(again),
            f"{shortened(str(before))!r}, as it was started" if before is not None else "none, as it was started",
            where=where,
            hint="A file is opened only if you name it again." if is_file else "",
        )
    return dataclasses.replace(kept, **{name: getattr(given, name) for name in OUTSIDE})


def _spec(kept: Request, workload: str | None, where: str) -> WorkloadSpec:
    """The workload of the run; a user's function is imported, and a file opened, only if they name it."""
    command = shlex.join(["rlplace", "train", kept.workload, "--resume", str(Path(where).parent)])
    spec = parse_kept_workload(kept.workload, workload, where=where, command=command)
    is_moved = spec.is_file and Path(spec.name).name == Path(kept.workload).name  # its graph is compared later
    refuse_if(
        workload is not None and kept.workload not in (workload, str(spec)) and not is_moved,
        "workload",
        workload,
        f"{shortened(kept.workload)!r}, the run's",
        where="train --resume",
        hint="Name that one, or start a run of its own.",
    )
    return spec


def _extended(config: TrainConfig, more_s: float, budget_s: float | None, *, has_begun: bool) -> TrainConfig:
    """With the budget that is given now: a larger one, or any for a run from another host that has not begun."""
    budget_s = config.budget_s + more_s if budget_s is None else budget_s
    if not has_begun:
        return dataclasses.replace(config, budget_s=budget_s, evaluations=None)
    refuse_if(
        config.evaluations is not None,
        "budget",
        budget_s,
        "none for a run of `--evaluations`",
        where="train --resume",
        hint="Its budget are placements, so that the same seed finds the same: leave `--budget` out.",
    )
    refuse_if(
        budget_s < config.budget_s,
        "budget",
        budget_s,
        f"at least {config.budget_s:g} s, which the run was given",
        where="train --resume",
        hint="It is the budget of the whole run, with what was spent of it before: "
        f"`--budget +{budget_s:g}s` gives the run {budget_s:g} s more.",
    )
    return dataclasses.replace(config, budget_s=budget_s)
