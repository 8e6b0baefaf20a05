"""`train`: a method and `portfolio`, each with half of the budget, and quick heuristics, judged in one table."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster import Cluster, reach
from rlplace.errors import InvalidValue, RunnerError
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.host_model import HostKnowledge, LearnedHost, knowledge_of, prior_of
from rlplace.measure.placement import Placement
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timing.threads import one_thread_here
from rlplace.report.console import Progress, progress_of
from rlplace.runs.measuring import measuring
from rlplace.runs.tracking import NoTracker, Tracker
from rlplace.search.improve.moves import are_kernels_kept
from rlplace.search.rules import baselines
from rlplace.session.calibrate import calibrated
from rlplace.session.folder import RunFolder
from rlplace.store.log import StoreLog
from rlplace.training.checks import check_beside_problem, check_names, completed
from rlplace.training.config import TrainConfig
from rlplace.training.forecast import (
    CALIBRATION_SHARE,
    Durations,
    Stopwatch,
    afterwards,
    ahead,
    limit_s,
    searching_within,
    within,
)
from rlplace.training.heuristics import HEURISTICS, compile_kernels, num_rows, place_quickly
from rlplace.training.methods import LEARNED, method_of, methods_of
from rlplace.training.outcome import Keeper, TrainResult, keep_placement, keep_result, timeline_of
from rlplace.training.resume.journal import Journal
from rlplace.training.searches.on_cluster import make_evaluator
from rlplace.training.searches.options import options_of, resumed_options
from rlplace.training.searches.result import LoopResult
from rlplace.training.searches.search_all import search_all
from rlplace.training.table import Entry, Table, measure_table


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

    What is measured here goes into the store (`TrainConfig.store`) and into `measurements.db` of the run; what was
    measured or learned there before is used. One search at a time measures on a machine: another one is waited for.

    Args:
        problem: what to place where, with its groups and constraints.
        config: how; or give its fields as keywords (`budget_s=60, seed=0`). Those that say how a problem is made are
            refused: this one is made.
        start: (N,) a placement that `portfolio`, and the methods that learn, may go on from.
        run: a folder to keep the result in; Ctrl-C leaves the best placement so far there.
        progress: told how it goes; True shows it on stderr, False shows nothing, and None shows it on a terminal, and
            elsewhere the last line alone: the best step beside those of one device and of plain PyTorch.
        tracker: told figures.
        workload: its name, for the store.
        resume: go on from what `run` holds of the same problem and configuration, and measure nothing again.
        known_hosts: what is known of the host, besides what is in the store: of a host like it.
        options: fields of `TrainConfig`, over those of `config`.

    Raises:
        FileProblem: a store was named that cannot be opened; or what `run` holds is malformed, or of another problem.
        InvalidValue: a graph in the place of a problem; an unknown option, one out of range, or one that means nothing
            for this problem or method.
        UnknownName: no such method, policy, learner or reward.
        MissingExtra: a cluster is asked for, and Ray is not installed.
        RunnerError: no placement could be run, or the reference failed, or the cluster could not be joined.
    """
    given: object = problem
    if not isinstance(given, Problem):
        hint = "Make one of a graph and a host: `Problem.profile(graph, host)`."
        raise InvalidValue("problem", type(given).__name__, "a Problem", where="train", hint=hint)
    config = completed(config, options)
    check_beside_problem(config, is_tracked=tracker is not None)
    return train_made(
        problem,
        config,
        start=start,
        run=run,
        progress=progress,
        tracker=tracker,
        workload=workload,
        resume=resume,
        known_hosts=known_hosts,
    )


@one_thread_here()
def train_made(
    problem: Problem,
    config: TrainConfig,
    *,
    start: NDArray[np.int32] | None,
    run: RunFolder | None,
    progress: Progress | bool | None,
    tracker: Tracker | None,
    workload: str,
    resume: bool,
    known_hosts: Sequence[LearnedHost],
) -> TrainResult:
    """As `train`, on a problem that was made as `config` says."""
    check_names(config, is_simulated=problem.host.is_simulated)
    is_own, progress, tracker = not isinstance(progress, Progress), progress_of(progress), tracker or NoTracker()
    root = None if run is None else run.root
    try:
        with (
            reach(config.cluster, say=progress.say) as cluster,
            measuring(problem.host, config.store, workload=workload, say=progress.say, run=root) as log,
        ):
            result = _train(problem, config, start, run, progress, tracker, log, cluster, resume, known_hosts)
        if is_own:
            progress.say(afterwards(result.durations, result.expected, config.evaluations))
            progress.conclude(result.summary)
        return result
    finally:
        if is_own:
            progress.close()


def _train(
    problem: Problem,
    config: TrainConfig,
    start: NDArray[np.int32] | None,
    run: RunFolder | None,
    progress: Progress,
    tracker: Tracker,
    log: StoreLog | None,
    cluster: Cluster | None,
    is_resumed: bool,
    known_hosts: Sequence[LearnedHost],
) -> TrainResult:
    """As `train`, with everything given."""
    methods = methods_of(config, problem.host)
    journal = Journal(
        run, problem, config, is_resumed=is_resumed, plan_of=(lambda _: None) if log is None else log.plan
    )
    begin_s, budget_s = time.monotonic(), config.budget_s
    config, expected = _said_ahead(problem, config, methods, progress)
    watch = Stopwatch()
    bests = journal.bests()
    if run is not None and not bests:  # before calibration, which takes a while: a run that is stopped has a placement
        keep_placement(run, problem, *_single(problem))
    prior, knowledge = prior_of(problem, config.search.priors), _knowledge(problem, log, journal, known_hosts)
    if knowledge is not None:
        progress.say(_known_words(knowledge.num_runs))
    known = None
    if config.search.num_calibrated and not problem.host.is_simulated:
        problem, known = calibrated(
            problem,
            config.search.num_calibrated,
            seed=config.seed,
            say=progress.say,
            prior=prior,
            knowledge=knowledge,
            log=log,
            isolated=config.isolated,
            before=journal.calibration,
            on_measured=journal.keep_calibration,
            most_s=limit_s(config.budget_s) if config.total_s is None else CALIBRATION_SHARE * config.total_s,
        )
    calibration_s = watch.lap_s()
    simulator = Simulator(problem)
    reference = baselines.best_single(problem, simulator)
    single_s = float(simulator.step_times(reference[None])[0])
    evaluator = make_evaluator(
        cluster,
        problem,
        simulator,
        reference,
        seed=config.seed,
        log=log,
        isolated=config.isolated,
        say=progress.say,
    )
    try:
        keeper = Keeper(run, evaluator, tracker, progress.say, simulator.plan(reference), single_s, bests)
        entries = [place_quickly(problem, simulator, name) for name in HEURISTICS if name != methods[0]]
        compile_kernels(problem, simulator)
        heuristics_s = watch.lap_s()
        if config.total_s is not None:
            left_s = config.total_s - (time.monotonic() - begin_s) - expected.table_s
            asked = dataclasses.replace(config, budget_s=budget_s)
            config = searching_within(asked, left_s, journal.spent_s(in_turn=not problem.host.is_simulated))
        options = options_of(methods, config, evaluator, start, known, prior, knowledge)
        options = resumed_options(options, run, config, journal, is_resumed=is_resumed, say=progress.say)
        found = search_all(evaluator, config, options, single_s, keeper, journal, progress, tracker, log, cluster)
        search_s = watch.lap_s()
        _say_repeats(evaluator, progress)
        entries += [_entry(method, found[method]) for method in methods]
        left_s = math.inf if config.total_s is None else config.total_s - (time.monotonic() - begin_s)
        table = _judged(problem, evaluator, entries, config, journal, progress, left_s)
        plan = table.plans[table.best]
        timeline = timeline_of(evaluator, plan, progress.say, is_hurried=config.total_s is not None)
        placement = Placement.of(problem, plan, table.best)
        taken = Durations(0.0, calibration_s, heuristics_s, search_s, watch.lap_s())
        result = TrainResult(placement, table, timeline, evaluator.is_measured, taken, expected)
        if run is not None:
            keep_result(run, problem, result, found)
            tracker.log_best(
                step_time_s=result.step_time_s,
                placement=run.path("placement.json"),
                timeline_png=run.path("timeline.png"),
            )
            tracker.log_picture("best_so_far", run.path("best_so_far.png"))
        return result
    finally:
        evaluator.close()


def _said_ahead(
    problem: Problem, config: TrainConfig, methods: tuple[str, ...], progress: Progress
) -> tuple[TrainConfig, Durations]:
    """The configuration that the limit of the run has room for, and how long it is expected to take, which is said."""
    is_simulated, is_compiled = problem.host.is_simulated, are_kernels_kept()
    if methods[0] != method_of(config, is_simulated=False):
        progress.say(f"the host is simulated, nothing can be measured: `{methods[0]}` takes the place of `{LEARNED}`")
    step_s = float(problem.costs.op_time_s.sum(axis=0).min())
    config, expected = within(
        problem.graph, problem.host, config, step_s, num_rows=num_rows(methods), is_compiled=is_compiled
    )
    progress.say(
        ahead(
            expected,
            methods,
            is_simulated=is_simulated,
            whole="from here",
            evaluations=config.evaluations,
            is_compiled=is_compiled,
        )
    )
    return config, expected


def _single(problem: Problem) -> tuple[Plan, str]:
    """The plan of the best single device, and the name of its row."""
    simulator = Simulator(problem)
    return simulator.plan(baselines.best_single(problem, simulator)), "single"


def _knowledge(
    problem: Problem, log: StoreLog | None, journal: Journal, known_hosts: Sequence[LearnedHost]
) -> HostKnowledge | None:
    """What other workloads taught about the host when the run began; what it learns itself is not to count twice."""
    if log is None:
        return None
    known = journal.known_hosts
    if known is None:
        known = (*log.learned_hosts(problem.host), *known_hosts)
        journal.keep_known_hosts(known)
    return knowledge_of(known, problem.costs.source)


def _judged(
    problem: Problem,
    evaluator: Evaluator,
    entries: list[Entry],
    config: TrainConfig,
    journal: Journal,
    progress: Progress,
    left_s: float,
) -> Table:
    """The final table: as it was measured before an interruption, or measured now.

    Raises:
        RunnerError: nothing in it ran to its end.
    """
    table = journal.table({entry.method: entry.plan for entry in entries if entry.plan is not None})
    if table is None:
        progress.say("measuring the final table" if evaluator.is_measured else "simulating the final table")
        table = measure_table(problem, evaluator, entries, config, progress.say, left_s)
        if table.best and evaluator.is_measured:
            journal.keep_table(table)
    if not table.best:
        raise RunnerError(f"no placement could be run to its end: {_reasons(table)}")
    return table


def _say_repeats(evaluator: Evaluator, progress: Progress) -> None:
    if evaluator.num_recalled:
        progress.say(f"{evaluator.num_recalled} step times were in the store and not measured again")
    if evaluator.num_repeated:
        progress.say(f"{evaluator.num_repeated} step times were measured twice: something disturbed the machine")


def _entry(method: str, found: LoopResult) -> Entry:
    why = ""
    if found.plan is None:
        why = "found no feasible placement" if found.num_scored or found.num_measured else "tried no allowed placement"
    facts = {"measured": found.num_measured}
    return Entry(method, found.plan, found.num_scored, facts, why, found.history, found.failure)


def _known_words(num_runs: int) -> str:
    searches = f"{num_runs} earlier search{'es' * (num_runs != 1)}"
    return f"this host is known from {searches}: the host model starts from what was learned there"


def _reasons(table: Table) -> str:
    rows = (row for row in table.rows if row["placement"] and row["status"] != "ok")
    return "; ".join(f"{row['method']}: {row['status']}: {row.get('why', '')}" for row in rows)
