"""`search_side_by_side`: methods on a simulated host, all at once, each with its share of the cores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.run.threads import one_thread_here, usable_cores
from rlplace.measure.simulate.simulator import Simulator
from rlplace.report.progress import Progress
from rlplace.runs.tracking import Tracker
from rlplace.search.registry import METHODS
from rlplace.search.task import Budget, Saveable, Task
from rlplace.training.search_loop import LoopResult

POLL_S = 0.1
"""How often progress is told."""


def search_side_by_side(
    methods: Mapping[str, Mapping[str, Any]],
    problem: Problem,
    seconds: float,
    *,
    seed: int,
    progress: Progress,
    tracker: Tracker,
    single_s: float = float("nan"),
    on_best: Callable[[str, Plan, float], None] = lambda method, plan, step_time_s: None,
    threads: int | None = None,
) -> dict[str, LoopResult]:
    """The best placement that each method finds while all of them search for `seconds`.

    One core that tries one move after the other gets further than two that try several at once, of which most are
    wasted; and whatever disturbs the machine disturbs all methods alike. So each has a thread and a simulator of its
    own. Ctrl-C ends all of them, and what is best by then is told first.

    Args:
        methods: names of `METHODS`, each with its options.
        problem: on a simulated host.
        seconds: wall time, of all together.
        seed: of every method's draws.
        progress: told how it goes.
        tracker: told what is learned, and the best of each method so far.
        single_s: step time on the best single device.
        on_best: told the best method, its plan and step time at the end, or when Ctrl-C ends the search.
        threads: of each simulator; by default all cores are shared out.
    """
    threads = threads or max(len(usable_cores()) // len(methods), 1)
    figures = {name: _Figures(tracker) for name in methods}
    tasks = {
        name: Task(
            problem, Simulator(problem, threads=threads), Budget(seconds=seconds), seed=seed, observer=figures[name]
        )
        for name in methods
    }

    planner = Simulator(problem, threads=1)
    num_told = dict.fromkeys(methods, 0)

    def run(name: str) -> Saveable | None:
        with one_thread_here():
            return METHODS[name].run(tasks[name], **methods[name])

    def tell() -> None:
        progress.update(
            placements=sum(task.evaluations for task in tasks.values()),
            best_s=min(task.best_s for task in tasks.values()),
            single_s=single_s,
            left_s=min(task.seconds_left for task in tasks.values()),
            budget_s=seconds,
        )
        for name, task in tasks.items():
            if len(task.history) > num_told[name]:
                num_told[name] = len(task.history)
                tracker.log_best_so_far(name, task.history[num_told[name] - 1], single_s)

    with ThreadPoolExecutor(len(methods), thread_name_prefix="rlplace-search") as pool:
        futures = {name: pool.submit(run, name) for name in methods}
        try:
            while (state := wait(futures.values(), POLL_S, FIRST_EXCEPTION)).not_done:
                if any(future.exception() is not None for future in state.done):
                    break
                tell()
        finally:  # what has ended does not mind; after an error or Ctrl-C everyone comes to an end
            for task in tasks.values():
                task.stop()
            wait(futures.values())
            tell()
            leader = min(tasks, key=lambda name: tasks[name].best_s)
            if (plan := _plan(planner, tasks[leader])) is not None:
                on_best(leader, plan, tasks[leader].best_s)
    return {
        name: _result(planner, task, single_s, futures[name].result(), figures[name].learning)
        for name, task in tasks.items()
    }


def _result(
    planner: Simulator,
    task: Task,
    single_s: float,
    learned: Saveable | None,
    learning: Sequence[Mapping[str, float]],
) -> LoopResult:
    return LoopResult(
        _plan(planner, task),
        task.evaluations,
        0,
        task.elapsed_s,
        tuple(task.history),
        single_s,
        learned,
        tuple(learning),
    )


def _plan(planner: Simulator, task: Task) -> Plan | None:
    """The best that a task found, in the order in which it was scored."""
    if task.best_plan is not None or task.best_devices is None:
        return task.best_plan
    return planner.plan(task.best_devices)


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
