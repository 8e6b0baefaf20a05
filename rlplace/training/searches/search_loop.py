"""`search_and_measure`: gives any method its budget: it searches on the simulator, then the host runs the best."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rlplace.errors import UserError
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.plan import Plan
from rlplace.report.console import Progress
from rlplace.search.methods import METHODS
from rlplace.search.task import Budget, Failure, Task
from rlplace.search.winners import OwnOrderWithPaths
from rlplace.session.facts import MethodResult
from rlplace.session.session import MethodKeeper
from rlplace.training.searches.racing_host import LoopBudget, RacingHost
from rlplace.training.tracking import Tracker

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

    A method that learns from measurements asks for them itself (`Task.measure`); what it leaves of them goes to the
    best simulated placements. Then the best measured ones race against each other. What a method that raised had found
    until then counts.

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
        options: of the method's own.
        clock: seconds that never go back.
        before: what the method had come to where it was interrupted: it goes on from there, with what is left.
        keeper: keeps what the method finds, after every race and from time to time.

    Raises:
        UserError: the method does not fit the problem.
        Exception: whatever measuring raised.
    """
    host = RacingHost(method, evaluator, budget, progress, tracker, single_s, on_best, clock, keeper)
    search_s = budget.seconds * budget.simulate_share
    task = Task(
        evaluator.problem,
        OwnOrderWithPaths(evaluator.simulator),
        Budget(seconds=max(search_s, 1e-3), measurements=budget.measurements),
        seed=seed,
        host=host,
        observer=host,
    )
    host.watch(task)
    learned, failure = None, None
    if before is not None:
        host.resume(before, task)
        failure = before.failure
    if before is None or not before.is_searched:
        try:
            learned, failure = METHODS[method].run(task, **(options or {})), None
        except UserError:
            raise
        except Exception as error:
            if error is host.raised:  # the host, not the method
                raise
            failure = Failure.of(error)
            progress.say(f"{method} raised {failure.why}: what it found until then counts")
        host.end_search(learned, failure)
    host.report()
    while (count := min(BATCH * host.num_workers, task.measurements_left)) > 0:
        batch = host.promising(count)
        if not len(batch):
            break
        task.measure(batch)
    return host.end(host.decide(), learned)
