"""The phases of a run, in order: knowledge of the host, calibration, heuristics, search, final table, end."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import threading
import time
from typing import Any

from rlplace.errors import RunnerError
from rlplace.measure import Placement, Problem, Simulator
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.host_model import HostKnowledge, Prior, knowledge_of, prior_of
from rlplace.measure.timing.eager_step import EagerRecipe
from rlplace.say import Say
from rlplace.search.improve.moves import are_kernels_kept
from rlplace.search.rules import baselines
from rlplace.session.calibrate import Known, calibrated
from rlplace.session.session_records import MethodResult
from rlplace.training.config import TrainConfig
from rlplace.training.forecast import (
    CALIBRATION_SHARE,
    Durations,
    Stopwatch,
    ahead,
    compiling_s,
    forecast,
    judging_s,
    limit_s,
    searching_within,
    verdict_s,
    within,
)
from rlplace.training.method_choice import LEARNED, method_of, methods_of
from rlplace.training.outputs import (
    COMPILED,
    EAGER,
    HEURISTICS,
    ONE_DEVICE,
    ONE_THREAD,
    SIMPLE,
    Leader,
    Run,
    Table,
    TrainResult,
    compile_kernels,
    keep_outcome,
    keep_table,
    kept_table,
    measure_table,
    num_rows,
    place_on_gang,
    place_quickly,
    place_without_gangs,
    timeline_of,
)
from rlplace.training.searches.search_all import make_evaluator, options_of, search_all

IRRELEVANT = ("budget_s", "total_s", "isolated", "track", "cluster", "store")
"""Fields of `TrainConfig` that may be others when a run goes on."""


def find_best(run: Run) -> TrainResult:
    """All of a run, on a problem that is there.

    Args:
        run: with all that its phases share.

    Raises:
        RunnerError: no placement could be run, or the reference failed.
    """
    session, progress, asked = run.session, run.progress, run.config
    methods, begin_s, watch = methods_of(asked, run.problem.host), time.monotonic(), Stopwatch()
    session.begin(signature_of(run.problem, asked), is_resumed=run.is_resumed)
    session.load_results(run.problem)
    is_compiled, simulator = are_kernels_kept(), Simulator(run.problem)
    config, expected = _expected(run, methods, is_compiled=is_compiled)
    measuring: dict[str, Any] = {"seed": asked.seed, "log": run.log, "isolated": asked.isolated}
    # A worker takes seconds to start, and compiling one core: both at once, while nothing is measured.
    compiling = threading.Thread(target=compile_kernels, args=(run.problem, simulator), daemon=True)
    compiling.start()
    evaluator = None if run.problem.host.is_simulated else Evaluator(run.problem, simulator, **measuring)
    try:
        compiling.join()
        if not is_compiled:
            begin_s = time.monotonic()  # a limit for all parts begins with compiled kernels
        if not session.bests():  # before calibration, which takes a while: a run that is stopped has a placement
            single = simulator.plan(baselines.best_single(run.problem, simulator))
            run.keep_placement(Placement.of(run.problem, single, "single"))
        starting_s = watch.lap_s()

        prior, knowledge = prior_of(run.problem, asked.search.priors), _knowledge(run)
        problem, known = _calibrated(run, config, prior, knowledge, evaluator)
        calibration_s = watch.lap_s()

        simulator = Simulator(problem)
        reference = baselines.best_single(problem, simulator)
        single_s = float(simulator.step_times(reference[None])[0])
        evaluator = make_evaluator(
            run.cluster, problem, simulator, reference, **measuring, say=progress.say, here=evaluator
        )
        leader = Leader(run, evaluator, simulator.plan(reference), single_s)
        entries = {name: place_quickly(problem, simulator, name) for name in HEURISTICS if name != methods[0]}
        entries |= place_on_gang(problem, simulator)
        entries |= place_without_gangs(problem, simulator, seed=asked.seed)
        heuristics_s = starting_s + watch.lap_s()

        if asked.total_s is not None:
            after_s = 0.0
            if evaluator.is_measured:  # the machine may have become busy since the profile: the forecast is revised
                rows, step_s = num_rows(methods, problem.host), evaluator.time_step_s()
                after_s = forecast(problem.graph, problem.host, asked, step_s, num_rows=rows).table_s
            left_s = asked.total_s - (time.monotonic() - begin_s) - after_s
            config = dataclasses.replace(config, budget_s=asked.budget_s)
            config = searching_within(config, left_s, session.spent_s(in_turn=not problem.host.is_simulated))
        options = options_of(run, config, methods, evaluator, known, prior, knowledge)
        found = search_all(run, config, evaluator, options, single_s, leader)
        search_s = watch.lap_s()
        for count, what in (
            (evaluator.num_recalled, "were known before and not measured again"),
            (evaluator.num_repeated, "were measured twice: something disturbed the machine"),
        ):
            if count:
                progress.say(f"{count} step times {what}")

        left_s = math.inf if asked.total_s is None else asked.total_s - (time.monotonic() - begin_s)
        entries |= {method: found[method] for method in methods}
        table = _judged(run, config, evaluator, entries, left_s)
        plan = table.plans[table.best]
        timeline = timeline_of(evaluator, plan, progress.say, is_hurried=asked.total_s is not None)
        placement = dataclasses.replace(Placement.of(problem, plan, table.best), verdict=table.verdict)
        taken = Durations(run.profiling_s, calibration_s, heuristics_s, search_s, watch.lap_s())
        result = TrainResult(placement, table, timeline, evaluator.is_measured, taken, run.expected or expected)
        keep_outcome(run, problem, result, found)
        if run.folder is not None:
            path = run.folder.path
            run.tracker.log_best(
                step_time_s=result.step_time_s, placement=path("placement.json"), timeline_png=path("timeline.png")
            )
            run.tracker.log_picture("best_so_far", path("best_so_far.png"))
        return result
    finally:
        if evaluator is not None:
            evaluator.close()


def signature_of(problem: Problem, config: TrainConfig) -> str:
    """16 hex digits over all that has to be the same when a run goes on."""
    fixed = dataclasses.replace(config, **{name: getattr(TrainConfig(), name) for name in IRRELEVANT})
    digest = hashlib.sha256(f"{problem.graph.fingerprint} {problem.host.fingerprint} {fixed!r}".encode())
    digest.update(problem.costs.op_time_s.astype("<f8").tobytes() + problem.grouping.op_group.astype("<i4").tobytes())
    return digest.hexdigest()[:16]


def _expected(run: Run, methods: tuple[str, ...], *, is_compiled: bool) -> tuple[TrainConfig, Durations]:
    """The configuration within its limit of time, and how long the run is expected to take, which is said."""
    problem, config, is_simulated = run.problem, run.config, run.problem.host.is_simulated
    if methods[0] != method_of(config, is_simulated=False):
        run.progress.say(
            f"the host is simulated, nothing can be measured: `{methods[0]}` takes the place of `{LEARNED}`"
        )
    step_s = float(problem.costs.op_time_s.sum(axis=0).min())
    config, expected = within(
        problem.graph,
        problem.host,
        config,
        step_s,
        num_rows=num_rows(methods, problem.host),
        is_compiled=is_compiled,
    )
    run.progress.say(
        ahead(
            expected,
            methods,
            config,
            is_simulated=is_simulated,
            whole="from here",
            is_compiled=is_compiled,
        )
    )
    return config, expected


def _knowledge(run: Run) -> HostKnowledge | None:
    """Knowledge of the host from other workloads, as of the begin of the run: its own must not count twice."""
    if run.log is None:
        return None
    known = run.session.known_hosts
    if known is None:
        known = (*run.log.learned_hosts(run.problem.host), *run.known_hosts)
        run.session.keep_known_hosts(known)
    knowledge = knowledge_of(known, run.problem.costs.source)
    if knowledge is not None:
        searches = f"{knowledge.num_runs} earlier search{'es' * (knowledge.num_runs != 1)}"
        run.progress.say(f"this host is known from {searches}: the host model starts from what was learned there")
    return knowledge


def _calibrated(
    run: Run, config: TrainConfig, prior: Prior, knowledge: HostKnowledge | None, evaluator: Evaluator | None
) -> tuple[Problem, Known | None]:
    """The calibrated problem, and the measurements for it; on a simulated host the problem as it is."""
    if not config.num_calibrated or run.problem.host.is_simulated:
        return run.problem, None
    return calibrated(
        run.problem,
        config.num_calibrated,
        seed=config.seed,
        say=run.progress.say,
        prior=prior,
        knowledge=knowledge,
        log=run.log,
        isolated=config.isolated,
        before=run.session.calibration(run.problem),
        on_measured=run.session.keep_calibration,
        most_s=limit_s(config.budget_s) if config.total_s is None else CALIBRATION_SHARE * config.total_s,
        evaluator=evaluator,
        is_traced=config.is_traced,
    )


def _judged(
    run: Run, config: TrainConfig, evaluator: Evaluator, entries: dict[str, MethodResult], left_s: float
) -> Table:
    """The final table with its verdict: as it was measured before an interruption, or measured now."""
    say, problem, asked = run.progress.say, evaluator.problem, run.config
    plans = {method: entry.plan for method, entry in entries.items() if entry.plan is not None}
    table = kept_table(run.session, plans) if evaluator.is_measured else None
    if table is None:
        say("measuring the final table" if evaluator.is_measured else "simulating the final table")
        step_s = evaluator.time_step_s() if evaluator.is_measured and math.isfinite(left_s) else 0.0
        # a verdict needs its rounds, while few are enough to choose what is judged: the table has the rest
        left_s -= verdict_s(problem.graph, problem.host, asked, step_s) + 2 * step_s
        table = measure_table(problem, evaluator, entries, config, say, left_s, step_s)
        if table.leader:
            table = judge_table(problem, evaluator, table, asked, say)
        if table.best and evaluator.is_measured:
            keep_table(run.session, table)
    if not table.best:
        rows = (row for row in table.rows if row["placement"] and row["status"] != "ok")
        reasons = "; ".join(f"{row['method']}: {row['status']}: {row.get('why', '')}" for row in rows)
        raise RunnerError(f"no placement could be run to its end: {reasons}")
    return table


def judge_table(problem: Problem, evaluator: Evaluator, table: Table, config: TrainConfig, say: Say) -> Table:
    """The table with a verdict on its leader, or on one device where the leader is not clearly faster than that.

    The leader runs in a race of its own beside one device and plain PyTorch: as it runs by default, with one thread if
    that was quicker, and compiled where that is done in time.
    """
    simple = {name: table.plans[name] for name in SIMPLE if name in table.plans and table.row(name)["status"] == "ok"}
    words = {name: ONE_DEVICE if name == "single" else f"one {name}" for name in simple}
    leader = table.plans[table.leader]
    if twin := next((name for name, plan in simple.items() if plan.fingerprint == leader.fingerprint), ""):
        simple.pop(twin)
    eager, others = table.row("eager"), dict[str, EagerRecipe]()
    times_s = [table.row(name)["step_time_s"] for name in (table.leader, *simple)]
    if eager["status"] == "ok":
        times_s.append(eager["step_time_s"])
        is_alone = (eager.get("one_thread_s") or math.inf) < eager["step_time_s"]
        others = {EAGER: EagerRecipe()} | ({ONE_THREAD: EagerRecipe(num_threads=1)} if is_alone else {})
        if making_s := compiling_s(problem.graph, problem.host, config, max(times_s)):
            others[COMPILED] = EagerRecipe(is_compiled=True, making_s=making_s)
    if evaluator.is_measured:
        say("measuring the best placement once more, beside one device and plain PyTorch")
    named, verdict = evaluator.judge(
        leader,
        {words[name]: plan for name, plan in simple.items()},
        others,
        step_s=sum(times_s) / len(times_s),
        most_s=judging_s(config),
        say=say,
    )
    best = next((name for name in simple if words[name] == named), twin or table.leader)
    return dataclasses.replace(table, best=best, verdict=verdict)
