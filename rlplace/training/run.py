"""`train`: a method and `portfolio`, each with half of the budget, and quick heuristics, judged in one table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster import reach
from rlplace.errors import InvalidValue, refuse_if
from rlplace.measure import Problem
from rlplace.measure.host_model import LearnedHost
from rlplace.measure.timing.threads import one_thread_here
from rlplace.report.console import Progress, progress_of
from rlplace.session.folder import RunFolder
from rlplace.session.session import Session
from rlplace.store.log import measuring
from rlplace.training.config import TrainConfig
from rlplace.training.forecast import afterwards
from rlplace.training.method_choice import check_names
from rlplace.training.outputs import Run, TrainResult
from rlplace.training.phases import find_best
from rlplace.training.tracking import NoTracker, Tracker


def train(
    problem: Problem,
    config: TrainConfig | None = None,
    *,
    start: NDArray[np.int32] | None = None,
    run: RunFolder | None = None,
    progress: Progress | bool | None = None,
    tracker: Tracker | None = None,
    workload: str = "",
    resume: bool = False,
    known_hosts: Sequence[LearnedHost] = (),
    **options: Any,
) -> TrainResult:
    """The best measured placement, with the table of all methods.

    The method and `portfolio` get the same time and simulator, and measure the same number of placements. On a real
    host they run one after the other, with half of the budget each. On a simulated host they run at the same time with
    half of the cores each, and all step times are simulated.

    Measurements are written to the store (`TrainConfig.store`) and to the session of the run; earlier measurements and
    host models there are used. Only one search at a time measures on a machine: the call waits for a running one.

    Args:
        problem: the step and the host, with groups and constraints.
        config: the options; or give its fields as keywords (`budget_s=60, seed=0`). Options for making a problem are
            refused, because the problem is given.
        start: (N,) a starting placement for `portfolio` and the learning methods.
        run: a folder for the result; after Ctrl-C it has the best placement so far.
        progress: called with the progress. True prints it to stderr, and False prints nothing. None prints it on a
            terminal, and elsewhere only the last line: the step times of the placement, of one device and of plain
            PyTorch.
        tracker: called with figures of the run.
        workload: its name, for the store.
        resume: continue from the state in `run` of the same problem and configuration, without measuring again.
        known_hosts: results of runs on a similar host, in addition to the store.
        options: fields of `TrainConfig`; they replace those of `config`.

    Raises:
        FileProblem: the named store cannot be opened; or the state in `run` is malformed, or of another problem.
        InvalidValue: a graph instead of a problem; or an option that is unknown, out of range, or unused for this
            problem or method.
        UnknownName: no such method, policy, learner or reward.
        MissingExtra: a cluster is requested, and Ray is not installed.
        RunnerError: no placement could run, the reference failed, or the cluster could not be joined.
    """
    given: object = problem
    if not isinstance(given, Problem):
        raise InvalidValue(
            "problem",
            type(given).__name__,
            "a Problem",
            where="train",
            hint="Make one of a graph and a host: `Problem.profile(graph, host)`.",
        )
    config = completed(config, options)
    check_beside_problem(config, is_tracked=tracker is not None)
    with Session.in_memory() if run is None else Session.open(run) as session:
        shown = progress_of(progress)
        made = Run(
            session,
            run,
            problem,
            config,
            shown,
            tracker or NoTracker(),
            start,
            is_resumed=resume,
            known_hosts=known_hosts,
        )
        try:
            result = train_in(made, workload=workload)
            if not isinstance(progress, Progress):
                shown.say(afterwards(result.durations, result.expected, config.evaluations))
                shown.conclude(result.summary)
            return result
        finally:
            if not isinstance(progress, Progress):
                shown.close()


@one_thread_here()
def train_in(run: Run, *, workload: str) -> TrainResult:
    """Runs the search of `train` in a session that is open, and returns its result."""
    host, config, root = run.problem.host, run.config, None if run.folder is None else run.folder.root
    check_names(config, is_simulated=host.is_simulated)
    with (
        reach(config.cluster, say=run.progress.say) as cluster,
        measuring(
            host,
            config.store,
            workload=workload,
            say=run.progress.say,
            run=root,
            own=run.session.measurements,
        ) as log,
    ):
        return find_best(dataclasses.replace(run, cluster=cluster, log=log))


def completed(config: TrainConfig | None, options: dict[str, Any]) -> TrainConfig:
    """The configuration with `options`, fields of it by name, over its own.

    Raises:
        InvalidValue: an unknown option, or one out of range.
    """
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    for name in options.keys() - known:
        raise InvalidValue("option", name, f"one of {', '.join(sorted(known))}", where="train")
    return dataclasses.replace(config or TrainConfig(), **options)


OF_THE_PROBLEM = ("num_groups", "grouping", "acyclic", "constraints")
"""Fields of `TrainConfig` that say how a problem is made."""


def check_beside_problem(config: TrainConfig, *, is_tracked: bool) -> None:
    """Refuses options that mean nothing beside a problem: its groups and constraints are its own.

    Args:
        config: of the run.
        is_tracked: whether a tracker is given.

    Raises:
        InvalidValue: an option of how the problem is made, or a mode of tracking without a tracker.
    """
    default = TrainConfig()
    for name in OF_THE_PROBLEM:
        if (given := getattr(config, name)) != getattr(default, name):
            raise InvalidValue(
                name,
                given,
                "none beside a problem",
                where="train",
                hint=f"It has its groups and constraints: Problem.estimate(..., {name}=...), or Problem.profile "
                "likewise.",
            )
    refuse_if(
        config.track != default.track and not is_tracked,
        "track",
        config.track,
        f"{default.track!r} without a tracker",
        where="train",
        hint="Give `tracker=make_tracker(...)` of rlplace.training.tracking, which knows where to.",
    )
