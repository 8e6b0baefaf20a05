"""`train`: a method and `portfolio`, each with half of the budget, and quick heuristics, judged in one table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster import reach
from rlplace.errors import InvalidValue
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
from rlplace.training.outputs import TrainingRun, TrainResult
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
    """The best placement that was measured, and the table that it stands in.

    The method and `portfolio` share the budget alike: the same simulator, the same time, the same number of measured
    placements. On a host of this machine they take turns, half of the budget each; on a simulated one they search side
    by side with half of the cores each, nothing is measured, and the simulator judges everything.

    Measurements go into the store (`TrainConfig.store`) and into the session of the run; earlier measurements and host
    models there are used. One search at a time measures on a machine: another one is waited for.

    Args:
        problem: the step and the host, with groups and constraints.
        config: how; or give its fields as keywords (`budget_s=60, seed=0`). Those that say how a problem is made are
            refused: this one is made.
        start: (N,) a placement that `portfolio`, and the methods that learn, may go on from.
        run: a folder to keep the result in; Ctrl-C leaves the best placement so far there.
        progress: told how it goes; True shows it on stderr, False shows nothing, and None shows it on a terminal, and
            elsewhere the last line alone: the best step beside those of one device and of plain PyTorch.
        tracker: told figures.
        workload: its name, for the store.
        resume: go on from the state in `run` of the same problem and configuration, and measure nothing again.
        known_hosts: knowledge of a host like this one, besides that of the store.
        options: fields of `TrainConfig`, over those of `config`.

    Raises:
        FileProblem: a store was named that cannot be opened; or the state in `run` is malformed, or of another problem.
        InvalidValue: a graph in the place of a problem; an unknown option, one out of range, or one that means nothing
            for this problem or method.
        UnknownName: no such method, policy, learner or reward.
        MissingExtra: a cluster is asked for, and Ray is not installed.
        RunnerError: no placement could be run, or the reference failed, or the cluster could not be joined.
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
        made = TrainingRun(
            session, run, problem, config, progress_of(progress), tracker or NoTracker(), start, is_resumed=resume
        )
        try:
            result = train_in(made, workload=workload, known_hosts=known_hosts)
            if not isinstance(progress, Progress):
                made.progress.say(afterwards(result.durations, result.expected, config.evaluations))
                made.progress.conclude(result.summary)
            return result
        finally:
            if not isinstance(progress, Progress):
                made.progress.close()


@one_thread_here()
def train_in(run: TrainingRun, *, workload: str, known_hosts: Sequence[LearnedHost] = ()) -> TrainResult:
    """As `train`, in a session, on a problem that was made as the configuration says."""
    host, config, root = run.problem.host, run.config, None if run.folder is None else run.folder.root
    check_names(config, is_simulated=host.is_simulated)
    with (
        reach(config.cluster, say=run.progress.say) as run.cluster,
        measuring(
            host,
            config.store,
            workload=workload,
            say=run.progress.say,
            run=root,
            own=run.session.measurements,
        ) as run.log,
    ):
        return find_best(run, known_hosts)


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
    if config.track != default.track and not is_tracked:
        raise InvalidValue(
            "track",
            config.track,
            f"{default.track!r} without a tracker",
            where="train",
            hint="Give `tracker=make_tracker(...)` of rlplace.training.tracking, which knows where to.",
        )
