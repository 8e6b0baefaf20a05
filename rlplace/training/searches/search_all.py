"""`search_all`: every method of a run gets its options and its budget, or goes on with the rest of it.

On a simulated host, `search_side_by_side` runs all methods at once, each with its share of the cores, and
`search_on_cluster` makes each a task of a cluster. On a host of this machine, `search_and_measure` gives one method its
budget: it searches on the simulator, then the host runs the best.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster import Cluster
from rlplace.cluster.cluster_evaluator import ClusterEvaluator
from rlplace.errors import UserError
from rlplace.measure import Plan, Problem, Simulator
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.host_model import HostKnowledge, Prior
from rlplace.measure.measurement import MeasurementLog
from rlplace.measure.timing.threads import one_thread_here, usable_cores
from rlplace.policy.learn.learners import LearnerFile
from rlplace.report.console import Progress, make_progress
from rlplace.say import format_clock
from rlplace.search import Budget, Method, Task
from rlplace.search.methods import OwnOrderWithPaths, adopt_methods
from rlplace.search.task import BestSoFar, Failure, Saveable
from rlplace.session.calibrate import Known
from rlplace.session.session import MethodKeeper
from rlplace.session.session_records import MethodResult, ratio_of
from rlplace.training.agent.agent import Agent
from rlplace.training.config import TrainConfig
from rlplace.training.method_choice import GUIDED, LEARNED, METHODS, POLICY, PORTFOLIO, SCHEDULE
from rlplace.training.outputs import Leader, Run, SavedFiles, compile_kernels
from rlplace.training.searches.racing_host import LoopBudget, RacingHost
from rlplace.training.tracking import NoTracker, Tracker

POLL_S = 0.1
"""How often progress is told."""


def search_side_by_side(
    methods: Mapping[str, Mapping[str, Any]],
    problem: Problem,
    budget: Budget,
    *,
    seed: int,
    progress: Progress,
    tracker: Tracker,
    single_s: float = float("nan"),
    on_best: Callable[[str, Plan, float], None] = lambda method, plan, step_time_s: None,
    before: Mapping[str, MethodResult] | None = None,
    keepers: Mapping[str, MethodKeeper] | None = None,
    threads: int | None = None,
) -> dict[str, MethodResult]:
    """The best placement that each method finds while all of them search.

    One core that tries one move after the other gets further than two that try several at once, of which most are
    wasted; and disturbances of the machine hit all methods alike. So each has a thread and a simulator of its
    own. Ctrl-C ends all of them, and the best placement by then is told first. One that raises is no matter to the
    others: its result is the best by then.

    Under a budget of evaluations the same seed finds the same, however often the search was interrupted: a method that
    had not ended begins again. Under one of seconds it goes on with the rest, from its best placement.

    Args:
        methods: names of `METHODS`, each with its options.
        problem: on a simulated host.
        budget: of each method: evaluations, or seconds of wall time, which all spend at once.
        seed: of every method's draws.
        progress: told how it goes.
        tracker: told the learners' figures, and the best of each method so far.
        single_s: step time on the best single device.
        on_best: told the best method, its plan and step time at the end, or when Ctrl-C ends the search.
        before: results of methods at the interruption.
        keepers: keep results of methods, when one ends and, under a budget of seconds, from time to time.
        threads: of each simulator; by default all cores are shared out, under a budget of seconds.

    Raises:
        UserError: a method does not fit the problem.
    """
    before, keepers, is_timed = before or {}, keepers or {}, math.isinf(budget.evaluations)
    threads = threads or (max(len(usable_cores()) // len(methods), 1) if is_timed else 1)
    figures = {name: _Figures(tracker) for name in methods}
    planner = Simulator(problem, threads=1)
    tasks: dict[str, Task] = {}
    for name in methods:
        tasks[name] = Task(problem, Simulator(problem, threads=threads), budget, seed=seed, observer=figures[name])
        if name in before and (is_timed or before[name].is_done):
            resume_task(tasks[name], before[name], planner)
            figures[name].learning += before[name].learning
    num_told = dict.fromkeys(methods, 0)
    failures: dict[str, Failure] = {}

    def run(name: str) -> Saveable | None:
        try:
            with one_thread_here():
                return METHODS[name].run(tasks[name], **methods[name])
        except UserError:
            raise
        except Exception as error:
            failures[name] = Failure.of(error)
            return None

    def tell() -> None:
        progress.update(
            placements=sum(task.evaluations for task in tasks.values()),
            best_s=min(task.best_s for task in tasks.values()),
            single_s=single_s,
            left_s=_left_s(tasks.values()),
            budget_s=_left_s(tasks.values()) + max(task.elapsed_s for task in tasks.values()),
        )
        for name, task in tasks.items():
            if len(task.history) > num_told[name]:
                num_told[name] = len(task.history)
                tracker.log_best_so_far(name, task.history[num_told[name] - 1], single_s)

    found = {name: before[name] for name in methods if name in before and before[name].is_done}

    def keep(futures: Mapping[str, Future[Saveable | None]], *, has_stopped: bool) -> None:
        """Notes the methods that have ended by themselves and, if it is time, how far the others are."""
        for name, future in futures.items():
            if name in found:
                continue
            if not has_stopped and future.done() and future.exception() is None:
                found[name] = result_of(
                    planner,
                    tasks[name],
                    single_s,
                    figures[name].learning,
                    is_done=True,
                    learned=future.result(),
                    failure=failures.get(name),
                )
                if name in keepers:
                    keepers[name].keep(found[name])
            elif is_timed and name in keepers and (has_stopped or keepers[name].is_due):
                keepers[name].keep(result_of(planner, tasks[name], single_s, figures[name].learning))

    with ThreadPoolExecutor(len(methods), thread_name_prefix="rlplace-search") as pool:
        futures = {name: pool.submit(run, name) for name in methods if name not in found}
        has_ended = False
        try:
            while (state := wait(futures.values(), POLL_S, FIRST_EXCEPTION)).not_done:
                if any(future.exception() is not None for future in state.done):
                    break
                keep(futures, has_stopped=False)
                tell()
            has_ended = all(future.done() and future.exception() is None for future in futures.values())
        finally:  # after an error or Ctrl-C every task ends; a task that has ended ignores this
            for task in tasks.values():
                task.stop()
            wait(futures.values())
            keep(futures, has_stopped=not has_ended)
            tell()
            leader = min(tasks, key=lambda name: tasks[name].best_s)
            if (plan := best_plan(planner, tasks[leader])) is not None:
                on_best(leader, plan, tasks[leader].best_s)
    for future in futures.values():
        future.result()
    for name, failure in failures.items():
        progress.say(f"{name} raised {failure.why}: what it found until then counts")
    return {name: found[name] for name in methods}


def _left_s(tasks: Collection[Task]) -> float:
    """Seconds that are left; a guess from the pace so far where the budget is one of evaluations."""
    if math.isfinite(next(iter(tasks)).budget.seconds):
        return min(task.seconds_left for task in tasks)
    return max(task.elapsed_s * task.evaluations_left / max(task.evaluations, 1) for task in tasks)


@dataclass
class _Figures:
    """A task's observer that keeps and passes on the learner's figures."""

    tracker: Tracker
    learning: list[Mapping[str, float]] = field(default_factory=list)

    def scored(self, placements: NDArray[np.int32], step_s: NDArray[np.float64]) -> None:
        pass

    def learned(self, figures: Mapping[str, float]) -> None:
        self.learning.append(figures)
        self.tracker.log({f"train/{name}": value for name, value in figures.items()})


def resume_task(task: Task, before: MethodResult, planner: Simulator) -> None:
    """Puts a task where an interrupted one was; the step time of its best is simulated again."""
    history = list(before.history)
    if before.plan is not None:
        step_s = planner.retime(before.plan).step_time_s
        if history and history[-1].best_s != step_s:
            history = [best for best in history if best.best_s > step_s]
            history.append(BestSoFar(before.num_scored, 0, before.seconds, step_s))
    task.resume(
        evaluations=before.num_scored,
        measurements=0,
        elapsed_s=before.seconds,
        plan=before.plan if history else None,
        history=history,
    )


def result_of(
    planner: Simulator,
    task: Task,
    single_s: float,
    learning: Sequence[Mapping[str, float]],
    *,
    is_done: bool = False,
    learned: Saveable | None = None,
    failure: Failure | None = None,
) -> MethodResult:
    """The result of a task so far; the best of one that is at work in its own thread may be a moment old.

    Args:
        planner: of its problem.
        task: with its best placement.
        single_s: step time on the best single device.
        learning: the figures of every update of the learner, by name.
        is_done: whether the task has ended.
        learned: the learned policy or host model, if the method learns.
        failure: its error; None of all others.
    """
    plan = best_plan(planner, task)
    return MethodResult(
        plan=plan,
        num_scored=task.evaluations,
        seconds=task.elapsed_s,
        single_s=single_s,
        history=tuple(task.history),
        learning=tuple(dict(figures) for figures in learning),
        failure=failure,
        learned=learned,
        budget=min(task.budget.seconds, task.budget.evaluations),
        is_searched=is_done,
        is_done=is_done,
        start=None if plan is None else plan.devices,
    )


def best_plan(planner: Simulator, task: Task) -> Plan | None:
    """The best that a task found, in the order in which it was scored."""
    devices, plan, priorities = task.best_found
    return planner.plan(devices, priorities) if plan is None and devices is not None else plan


LEARNER = "learner.safetensors"
"""The state of a method's learner, among the files of the session."""

Options = Mapping[str, Mapping[str, Any]]


def options_of(
    run: Run,
    config: TrainConfig,
    methods: tuple[str, ...],
    evaluator: Evaluator,
    known: Known | None,
    prior: Prior,
    knowledge: HostKnowledge | None,
) -> dict[str, dict[str, Any]]:
    """The options of each method, with the state from which an interrupted one goes on.

    Under a budget of evaluations that is nothing: such a method begins again, and finds the same.

    Args:
        run: with the placement that methods may start from.
        config: of the run, with the budget that is left.
        methods: that search.
        evaluator: measures for them.
        known: the measurements of calibration.
        prior: how far the host may be from its figures.
        knowledge: knowledge of the host from other workloads.
    """
    start = run.start
    own: dict[str, dict[str, Any]] = {
        LEARNED: {
            "config": dataclasses.replace(config.agent, batch=max(config.agent.batch, num_machines(evaluator))),
            "known": known,
            "prior": prior,
            "guide": config.guide,
            "start": start,
            "knowledge": knowledge,
            "is_traced": config.is_traced and evaluator.is_measured,
        },
        POLICY: {"config": config.learn, "start": start},
        SCHEDULE: {"config": config.learn},
        GUIDED: {"config": config.guide or config.learn, "start": start},
        PORTFOLIO: {"start": start},
    }
    options = {name: own.get(name, {}) for name in methods}
    if config.evaluations is not None:
        return options
    for name, given in options.items():
        if name in (POLICY, GUIDED, SCHEDULE) or (name == LEARNED and config.guide is not None):
            given["learner_file"] = LearnerFile(run.session, LEARNER, is_resumed=run.is_resumed, say=run.progress.say)
        before = run.session.of(name, 0.0)
        if before is not None and "start" in given:
            begun = before.start if name != LEARNED or before.plan is None else before.plan.devices
            given["start"] = given["start"] if begun is None else begun
    return options


def search_all(
    run: Run, config: TrainConfig, evaluator: Evaluator, options: Options, single_s: float, leader: Leader
) -> dict[str, MethodResult]:
    """The result of each method: in turn on a host of this machine, side by side on a simulated one.

    Args:
        run: keeps results, is told the progress, and searches on a cluster.
        config: of the run, with the budget that is left.
        evaluator: simulates, and runs.
        options: of each method.
        single_s: step time on the best single device.
        leader: keeps the best placement so far, and learned policies and host models.
    """
    problem, session = evaluator.problem, run.session
    keepers = {name: MethodKeeper(session, name, leader.keep_learned) for name in options}
    if evaluator.is_measured:
        return _in_turn(run, config, evaluator, options, single_s, leader, keepers)
    budget = Budget(seconds=config.budget_s) if config.evaluations is None else Budget(config.evaluations)
    before = {name: session.of(name, min(budget.seconds, budget.evaluations)) for name in options}
    search = search_side_by_side if run.cluster is None else partial(search_on_cluster, run.cluster)
    return search(
        options,
        problem,
        budget,
        seed=config.seed,
        progress=run.progress,
        tracker=run.tracker,
        single_s=single_s,
        on_best=lambda method, plan, step_s: leader.keep(method, plan, step_s, ratio_of(step_s, single_s)),
        before={name: result for name, result in before.items() if result is not None},
        keepers=keepers,
    )


def _in_turn(
    run: Run,
    config: TrainConfig,
    evaluator: Evaluator,
    methods: Options,
    single_s: float,
    leader: Leader,
    keepers: Mapping[str, MethodKeeper],
) -> dict[str, MethodResult]:
    """Every method in turn: the same time, and as many measured placements as the first one ran."""
    reference_s = single_s / num_machines(evaluator)
    is_traced = any(options.get("is_traced") for options in methods.values())
    each_s = config.budget_s / len(methods)
    budget = LoopBudget.of(each_s, config.search.simulate_share, reference_s, is_traced=is_traced)
    found: dict[str, MethodResult] = {}
    for method, options in methods.items():
        before = run.session.of(method, budget.seconds)
        if before is not None and before.is_done:
            found[method] = before
        else:
            left_s = budget.seconds - (0.0 if before is None else before.seconds)
            run.progress.say(f"search: {method}, {format_clock(max(left_s, 0.0))}{'' if before is None else ' left'}")
            found[method] = search_and_measure(
                method,
                evaluator,
                budget,
                seed=config.seed,
                progress=run.progress,
                tracker=run.tracker,
                single_s=single_s,
                on_best=partial(leader.keep, method),
                options=options,
                before=before,
                keeper=keepers[method],
            )
        if found[method].failure is None:
            budget = dataclasses.replace(budget, measurements=max(found[method].num_measured, 1))
    return found


BATCH = 6
"""Placements a race, where the method does not measure by itself."""


def search_and_measure(
    method: str,
    evaluator: Evaluator,
    budget: LoopBudget,
    *,
    seed: int,
    progress: Progress,
    tracker: Tracker,
    single_s: float = float("nan"),
    on_best: Callable[[Plan, float, float], None] = lambda plan, step_time_s, ratio: None,
    options: Mapping[str, Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
    before: MethodResult | None = None,
    keeper: MethodKeeper | None = None,
) -> MethodResult:
    """The placement that `method` came up with and that ran fastest on a host of this machine.

    A method that learns from measurements asks for them itself (`Task.measure`); the rest goes to the best simulated
    placements. Then the best measured ones race against each other. The result of a method that raised counts as it was
    until then.

    Args:
        method: a name of `METHODS`.
        evaluator: simulates, and runs.
        budget: of this method alone.
        seed: of the method's draws.
        progress: told how it goes.
        tracker: told figures.
        single_s: step time on the best single device.
        on_best: told each new best measured plan, its step time and its ratio to the reference; at last the plan that
            the last race decided for.
        options: options of the method.
        clock: seconds that never go back.
        before: the method's result at an interruption: it goes on from there, with the rest of its budget.
        keeper: keeps the method's result, after every race and from time to time.

    Raises:
        UserError: the method does not fit the problem.
        Exception: any error of measuring.
    """
    num_traced = int(bool((options or {}).get("is_traced")))
    host = RacingHost(method, evaluator, budget, progress, tracker, single_s, on_best, clock, keeper, num_traced)
    task = Task(
        evaluator.problem,
        OwnOrderWithPaths(evaluator.simulator),
        Budget(seconds=max(budget.seconds * budget.simulate_share, 1e-3), measurements=budget.measurements),
        seed=seed,
        host=host,
        observer=host,
    )
    host.task, learned, failure = task, None, None
    if before is not None:
        host.resume(before)
    if before is None or not before.is_searched:
        try:
            learned = METHODS[method].run(task, **(options or {}))
        except UserError:
            raise
        except Exception as error:
            if error is host.raised:  # the host, not the method
                raise
            failure = Failure.of(error)
            progress.say(f"{method} raised {failure.why}: what it found until then counts")
        host.end_search(learned, failure)
    host.report()
    while (count := min(BATCH * host.num_workers, task.measurements_left)) > 0 and len(batch := host.promising(count)):
        task.measure(batch)
    return host.end(host.decide(learned.plan if isinstance(learned, Agent) else None), learned)


def make_evaluator(
    cluster: Cluster | None,
    problem: Problem,
    simulator: Simulator,
    reference: NDArray[np.int32],
    *,
    seed: int,
    log: MeasurementLog | None,
    isolated: bool | None,
    say: Callable[[str], None],
    here: Evaluator | None = None,
) -> Evaluator:
    """The evaluator for the searches of a run: every node of a cluster that is like this machine, or this one alone.

    Args:
        cluster: whose nodes measure; None for this machine alone.
        problem: the problem to place; on a simulated host nothing is measured.
        simulator: plans.
        reference: (N,) placement that every measured plan is timed beside.
        seed: of random ops.
        log: keeps measurements.
        isolated: whether plans run in a worker process.
        say: told who measures.
        here: the evaluator of this machine, where there is one; it goes on, or is closed where a cluster measures.
    """
    if cluster is None or problem.host.is_simulated:
        if here is None:
            return Evaluator(problem, simulator, reference, seed=seed, log=log, isolated=isolated)
        here.turn_to(problem, simulator, reference)
        return here
    if here is not None:
        here.close()
    return ClusterEvaluator(cluster, problem, simulator, reference, seed=seed, log=log, isolated=isolated, say=say)


def num_machines(evaluator: Evaluator) -> int:
    """Machines that measure for the searches of a run."""
    return evaluator.num_workers if isinstance(evaluator, ClusterEvaluator) else 1


def search_on_cluster(
    cluster: Cluster,
    methods: Mapping[str, Mapping[str, Any]],
    problem: Problem,
    budget: Budget,
    *,
    seed: int,
    progress: Progress,
    tracker: Tracker,
    single_s: float = float("nan"),
    on_best: Callable[[str, Plan, float], None] = lambda method, plan, step_time_s: None,
    before: Mapping[str, MethodResult] | None = None,
    keepers: Mapping[str, MethodKeeper] | None = None,
) -> dict[str, MethodResult]:
    """As `search_side_by_side`, but each method is a task of a cluster, with one CPU and one simulator thread.

    Under a budget of evaluations the result is that of this machine, to the bit. A method's result is known
    when the method has ended: Ctrl-C cancels the others, and a resumed run starts these again.

    Args:
        cluster: whose workers search.
        methods: names of `METHODS`, each with its options.
        problem: on a simulated host.
        budget: of each method.
        seed: of every method's draws.
        progress: told how much time is left.
        tracker: told the learners' figures, and the best of each method.
        single_s: step time on the best single device.
        on_best: told the best method so far, its plan and step time, whenever a method ends that is better.
        before: results of methods at the interruption.
        keepers: keep results of methods.
    """
    before, keepers = before or {}, keepers or {}
    found = {name: before[name] for name in methods if name in before and before[name].is_done}
    options = {  # but for files of the run folder, which are on this machine
        name: {option: value for option, value in given.items() if option != "learner_file"}
        for name, given in methods.items()
        if name not in found
    }
    names, best_s, begin_s = list(options), float("inf"), time.monotonic()
    if names:
        progress.say(f"searching on the cluster: {', '.join(names)}, each with one core")

    def tell() -> None:
        if math.isinf(budget.seconds):
            return
        left_s = max(begin_s + budget.seconds - time.monotonic(), 0.0)
        progress.update(
            placements=sum(result.num_scored for result in found.values()),
            best_s=best_s,
            single_s=single_s,
            left_s=left_s,
            budget_s=budget.seconds,
        )

    task = partial(_searched, [METHODS[name] for name in names], options, problem, budget, seed, single_s)
    for index, result in cluster.map(task, names, on_wait=tell):
        name = names[index]
        found[name] = result
        for figures in result.learning:
            tracker.log({f"train/{figure}": value for figure, value in figures.items()})
        if result.history:
            tracker.log_best_so_far(name, result.history[-1], single_s)
        if result.plan is not None and result.best_s < best_s:
            best_s = result.best_s
            on_best(name, result.plan, best_s)
        if name in keepers:
            keepers[name].keep(result)
        failed = "" if result.failure is None else f" ({result.failure.why}: what it found until then counts)"
        progress.say(f"{name} has ended{failed}: {result.num_scored:,} placements in {result.seconds:.3g} s")
    return {name: found[name] for name in methods}


def _searched(
    methods: Sequence[Method],
    options: Mapping[str, Mapping[str, Any]],
    problem: Problem,
    budget: Budget,
    seed: int,
    single_s: float,
    name: str,
) -> MethodResult:
    """The result of one method, on a worker."""
    adopt_methods(methods)
    compile_kernels(problem, Simulator(problem, threads=1))
    found = search_side_by_side(
        {name: options[name]},
        problem,
        budget,
        seed=seed,
        progress=make_progress(is_quiet=True),
        tracker=NoTracker(),
        single_s=single_s,
        threads=1,
    )[name]
    # a policy travels as files: its own class may not be importable there
    return found if found.learned is None else dataclasses.replace(found, learned=SavedFiles.of(found.learned))
