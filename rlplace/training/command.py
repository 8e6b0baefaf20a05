"""`run_training`: what `rlplace train WORKLOAD` does, from words to a run folder."""

from __future__ import annotations

import dataclasses
import errno
import math
import shlex
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlplace.cluster import check_cluster
from rlplace.errors import DeviceLost, FileProblem, RlplaceError
from rlplace.graphs.grouping.constraints import Constraints
from rlplace.locks import measuring_alone
from rlplace.measure.host_model import LearnedHost
from rlplace.measure.host_model.learned_host import FILE as HOST_MODEL
from rlplace.measure.hosts.host import Host
from rlplace.measure.timing.outcomes import lost_of
from rlplace.measure.timing.threads import one_thread_here, usable_cores
from rlplace.policy.options import WEIGHTS_ENDING
from rlplace.report.console import CleanConsole, Progress, make_progress
from rlplace.search.improve.moves import are_kernels_kept
from rlplace.session.cut import CutOptions
from rlplace.session.facts import Request
from rlplace.session.folder import RunFolder
from rlplace.session.prepare import Prepared, prepare
from rlplace.session.session import Session
from rlplace.session.setup import Setup
from rlplace.session.step_script import script
from rlplace.session.steps import Steps, describe_problem, versions
from rlplace.store.log import check_store
from rlplace.training.checks import check_names
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
from rlplace.training.methods import method_of, methods_of
from rlplace.training.outputs import WEIGHTS, TrainingRun, TrainResult, result_of
from rlplace.training.run import train_in
from rlplace.training.table import num_rows
from rlplace.training.tracking import Tracker, make_tracker
from rlplace.workloads import WorkloadSpec, default_size

ANSWER = ("schema", "rows", "best", "micro_batches", "durations")
"""What `--json` prints of `result.json`."""
FULL = (errno.ENOSPC, errno.EDQUOT)
HARMLESS: dict[str, tuple[object, ...]] = {
    "store": ("off", "auto"),
    "track": ("disabled",),
    "cluster": ("off",),
    "isolated": (None, True),
}
"""Options that reach a path, a tracker, a host or code, with those of their values that a run folder is believed; the
first stands for all others."""
INIT = tuple(f"init.{name}" for name in WEIGHTS)
"""The weights that a run on another host begins with, among the files of its session."""


@dataclass(frozen=True)
class Shown:
    """What people are shown.

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
    """What a run is asked to do, looked up on this machine.

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
        spec, host = setup.spec, setup.host
        request = Request(
            str(spec),
            setup.host_word,
            host.fingerprint,
            default_size(host),
            setup.gangs,
            setup.asked,
            setup.workload_seed,
            placed_again,
            versions(),
        )
        return cls(spec, host, config, request)

    @property
    def own_workload(self) -> list[str]:
        """The word that names the workload again where the run goes on, unless the run folder is believed."""
        return [] if self.spec.is_believed else [str(self.spec)]

    def check(self) -> None:
        """Refuses what can be refused before anything is captured."""
        names = [device.name for device in self.host.devices], [device.kind for device in self.host.devices]
        (self.config.constraints or Constraints()).check_devices(*names)
        check_names(self.config, is_simulated=self.host.is_simulated)
        check_cluster(self.config.cluster)
        if not self.host.is_simulated:
            check_store(self.config.store)

    def steps(self) -> Steps:
        """The workload's steps; a pattern that matches nothing is refused before there is a run folder."""
        host, asked = self.host, self.request.asked
        steps = Steps(self.spec, host, self.request.workload_seed, asked)
        names = [device.name for device in host.devices], [device.kind for device in host.devices]
        (self.config.constraints or Constraints()).resolve(steps.graph(first_count(asked)), *names)
        return steps

    def keep(self, session: Session, run: RunFolder) -> None:
        """Keeps what was asked in the session of its run, and writes `config.json`."""
        session.keep(request=self.request, config=self.config)
        run.write_json("config.json", self.told(self.request.asked.to_dict()))

    def told(self, cut: dict[str, Any]) -> dict[str, Any]:
        """What `config.json` holds: what was asked for, to the word, and the same with nothing left open."""
        config, request = self.config, dataclasses.asdict(self.request)
        learn = dataclasses.replace(config.learn, **dataclasses.asdict(config.learn.recipe))
        method = method_of(config, is_simulated=self.host.is_simulated)
        search = dataclasses.replace(config.search, method=method)
        asked = request.pop("asked") and self.request.asked.to_dict()
        return {
            "schema": 1,
            **request,
            "micro_batches": cut,
            "train": dataclasses.asdict(dataclasses.replace(config, learn=learn, search=search)),
            "asked": {"train": dataclasses.asdict(config), "micro_batches": asked},
        }


def first_count(asked: CutOptions) -> int:
    """The number of micro-batches of the step that is captured first."""
    return 1 if asked.count == "auto" else asked.count


@one_thread_here()
def run_training(
    setup: Setup, config: TrainConfig, folder: Path, *, overwrite: bool = False, shown: Shown = EVERYTHING
) -> dict[str, Any]:
    """Trains on a workload, leaves a run folder, prints the table; returns what `--json` prints.

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
        with closing(run), going_on(run, job, progress), Session.open(run) as session:
            job.keep(session, run)
            return run_job(job, steps, run, session, progress, shown=shown)


def run_job(
    job: Job,
    steps: Steps | Prepared,
    run: RunFolder,
    session: Session,
    progress: Progress,
    *,
    shown: Shown,
    is_resumed: bool = False,
    known_hosts: Sequence[LearnedHost] = (),
) -> dict[str, Any]:
    """All of a run, where no other process measures, in a folder that is this process's.

    Args:
        job: what the run is asked to do, as its session has it.
        steps: of its workload; or its problem, where that is known.
        run: its folder.
        session: of the run.
        progress: told how it goes.
        shown: what people are shown in the end.
        is_resumed: go on from what the session holds.
        known_hosts: what is known of the host, besides what is in the store.
    """
    begin_s, config = time.monotonic(), job.config
    tracker = make_tracker(config.track, run.root, job.told(job.request.asked.to_dict()))
    is_complete = False
    try:
        progress.say(f"devices: {', '.join(f'{device.name} ({device.kind})' for device in job.host.devices)}")
        expected = None if is_resumed or isinstance(steps, Prepared) else _said_ahead(job, steps, progress)
        watch = Stopwatch()
        prepared = steps if isinstance(steps, Prepared) else _prepared(job, steps, session, progress, is_resumed)
        profiling_s = watch.lap_s()
        session.keep_problem(prepared)
        run.write_json("config.json", job.told(prepared.to_dict()))
        start = None if prepared.start is None else prepared.start.tolist()
        told = {"evaluations": prepared.evaluations, "start": start}
        run.write_json("problem.json", describe_problem(prepared.problem) | told)
        made = TrainingRun(
            session, run, prepared.problem, within_rest(config, begin_s), progress, tracker, prepared.start, is_resumed
        )
        with _weights(session) as made.weights:
            result = train_in(made, workload=str(job.spec), known_hosts=known_hosts)
        _write_script(run, job, prepared)
        taken = dataclasses.replace(result.durations, profiling_s=profiling_s)
        expected = result.expected if expected is None else expected
        session.keep_durations(expected.to_dict(), taken.to_dict())
        run.write_json("result.json", result_of(session))
        _track(tracker, run, result)
        is_complete = True
        progress.say(afterwards(taken, expected, config.evaluations))
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
    """What `--json` prints of a run that has come to its end."""
    result = result_of(session)
    return {name: result[name] for name in ANSWER if name in result}


def again_words(config: TrainConfig) -> list[str]:
    """The options that have to be given again where a run goes on: a run folder is not believed them.

    >>> again_words(TrainConfig(store="mine.db", isolated=False))
    ['--store', 'mine.db', '--in-process']
    """
    words = []
    for option, harmless in HARMLESS.items():
        if (value := getattr(config, option)) not in harmless:
            words += ["--in-process"] if option == "isolated" else [f"--{option}", str(value)]
    if (config.learn.init or "").endswith(WEIGHTS_ENDING):
        words += ["--init", str(config.learn.init)]
    if config.search.priors is not None:
        words += ["--priors", str(config.search.priors)]
    return words


@contextmanager
def going_on(run: RunFolder, job: Job, progress: Progress) -> Iterator[None]:
    """Says what was kept and how to go on, however a run ends before its end.

    Raises:
        DeviceLost: in the place of any error that was raised while a device was lost.
    """
    named = [*job.own_workload, "--resume", str(run.root), *again_words(job.config)]
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
        lost = error if isinstance(error, DeviceLost) else None if job.host.is_simulated else lost_of(job.host, error)
        if lost is None:
            raise
        raise DeviceLost(lost.devices, lost.why, offer=_offer(job, run.root)) from error
    except OSError as error:
        if error.errno not in FULL:
            raise
        full = FileProblem(error.filename or run.root, f"cannot be written: {error.strerror}.")
        full.add_note(f"To go on: {command}")
        raise full from error


def what_is_left(host: Host, host_word: str) -> str:
    """A HOST word for the devices of a host that are still there.

    As many devices of as many cores as before, or as many as there are cores for; of GPUs, whichever PyTorch sees.

    Args:
        host: some of whose devices are lost.
        host_word: what the user called it.
    """
    if any(device.backend == "cuda" for device in host.devices):
        return host_word if host_word.startswith(("auto", "cuda")) else "auto"
    singles = [device for device in host.devices if not device.members]
    width = max(min((len(device.cores) for device in singles), default=1), 1)
    count = min(len(singles), len(usable_cores()) // width)
    if not count:
        return "cores"
    return f"cores:{count}" + (f"x{width}" if width > 1 else "")


def _offer(job: Job, folder: Path) -> str:
    """How a run goes on without the devices that it lost."""
    request, own = job.request, job.own_workload
    where = [str(folder), "--host", what_is_left(job.host, request.host), *(["--gangs"] if request.gangs else [])]
    train = shlex.join(["rlplace", "train", *own, "--resume", *where, *again_words(job.config)])
    place = shlex.join(["rlplace", "place", *where, *(["--workload", *own] if own else [])])
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
        most_s=math.inf if config.total_s is None else PROFILING_SHARE * config.total_s,
    )


def _said_ahead(job: Job, steps: Steps, progress: Progress) -> Durations | None:
    """How long all of the run is expected to take, which is said; None where that is not known before profiling."""
    host, config = job.host, job.config
    graph = steps.graph(first_count(job.request.asked))
    step_s = None if host.is_simulated else one_device_step_s(graph, host)
    if step_s is None:
        return None
    methods, is_compiled = methods_of(config, host), are_kernels_kept()
    _, expected = within(
        graph, host, config, step_s, num_rows=num_rows(methods), is_profiled=False, is_compiled=is_compiled
    )
    progress.say(ahead(expected, methods, is_simulated=False, whole="in all", is_compiled=is_compiled))
    return expected


@contextmanager
def _weights(session: Session) -> Iterator[Path | None]:
    """While active, a file of the weights that the session says to begin with; None where it has none."""
    files = {name: session.file(name) for name in INIT}
    if files[INIT[0]] is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="rlplace-") as folder:
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data or b"")
        yield Path(folder) / INIT[0]


def _write_script(run: RunFolder, job: Job, prepared: Prepared) -> None:
    """Writes the step as a script, where it is of a workload that anybody can build."""
    if job.spec.is_function or job.spec.is_file:
        return
    text = script(
        str(job.spec),
        default_size=job.request.default_size,
        seed=job.request.workload_seed,
        cut=prepared.cut,
        host=job.request.host,
        is_simulated=job.host.is_simulated,
    )
    run.write_text("step.py", text)


def _track(tracker: Tracker, run: RunFolder, result: TrainResult) -> None:
    """Shows the tracker the final table and the files that a run is known by."""
    tracker.log_table(result.table.rows)
    tracker.log_files("config", [run.path("config.json"), run.path("result.json")])
    if learned := [run.path(name) for name in (*WEIGHTS, HOST_MODEL) if run.has(name)]:
        tracker.log_files("policy", learned)


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
