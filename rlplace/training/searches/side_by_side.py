"""`search_side_by_side`: methods on a simulated host, all at once, each with its share of the cores.

What a task on a simulated host has come to: as a result, and as a state that another process goes on from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import UserError
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timing.threads import one_thread_here, usable_cores
from rlplace.report.console import Progress
from rlplace.search.methods import METHODS
from rlplace.search.task import BestSoFar, Budget, Failure, Saveable, Task
from rlplace.session.facts import MethodResult
from rlplace.session.session import MethodKeeper
from rlplace.training.tracking import Tracker

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
    wasted; and whatever disturbs the machine disturbs all methods alike. So each has a thread and a simulator of its
    own. Ctrl-C ends all of them, and what is best by then is told first. One that raises is no matter to the others:
    what it had found by then is its result.

    Under a budget of evaluations the same seed finds the same, however often the search was interrupted: a method that
    had not ended begins again. Under one of seconds it goes on with what is left, from its best placement.

    Args:
        methods: names of `METHODS`, each with its options.
        problem: on a simulated host.
        budget: of each method: evaluations, or seconds of wall time, which all spend at once.
        seed: of every method's draws.
        progress: told how it goes.
        tracker: told what is learned, and the best of each method so far.
        single_s: step time on the best single device.
        on_best: told the best method, its plan and step time at the end, or when Ctrl-C ends the search.
        before: what methods had come to where the search was interrupted.
        keepers: keep what methods come to, when one ends and, under a budget of seconds, from time to time.
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
        """Takes note of what has ended by itself, and, if it is time, of how far the others are."""
        for name, future in futures.items():
            if name in found:
                continue
            if not has_stopped and future.done() and future.exception() is None:
                learned = future.result()
                learning, failure = figures[name].learning, failures.get(name)
                found[name] = result_of(
                    planner, tasks[name], single_s, learning, is_done=True, learned=learned, failure=failure
                )
                if name in keepers:
                    if learned is not None:
                        keepers[name].keep_learned(learned)
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
        finally:  # what has ended does not mind; after an error or Ctrl-C everyone comes to an end
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


class _Figures:
    """A task's observer that keeps and passes on what is learned."""

    def __init__(self, tracker: Tracker) -> None:
        self.learning: list[Mapping[str, float]] = []
        self._tracker = tracker

    def scored(self, placements: NDArray[np.int32], step_s: NDArray[np.float64]) -> None:
        pass

    def learned(self, figures: Mapping[str, float]) -> None:
        self.learning.append(figures)
        self._tracker.log({f"train/{name}": value for name, value in figures.items()})


def resume_task(task: Task, before: MethodResult, planner: Simulator) -> None:
    """Puts a task where an interrupted one was; the step time of its best is taken afresh, whatever was noted."""
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
    """What a task has found; the best of one that is at work in its own thread may be a moment old.

    Args:
        planner: of its problem.
        task: with its best placement.
        single_s: step time on the best single device.
        learning: what the method told of every update, figures by name.
        is_done: whether the task has ended.
        learned: what the method learned, if it learns.
        failure: what it raised; None of all others.
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
