"""`find_row`: one method with one seed on one problem, as a row; `spread_rows`: many of them, on a cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlplace.compare.row import Row
from rlplace.errors import MissingExtra, UserError
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.measurement import Measurement, MeasurementLog
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Objective, Simulator
from rlplace.measure.timing.threads import one_thread_here
from rlplace.runs.calibration import Known
from rlplace.search.registry import Method, SearchResult, adopt_methods, find
from rlplace.search.rules.baselines import best_single
from rlplace.search.task import Budget, Failure, Task
from rlplace.training.agent.agent import AgentResult
from rlplace.training.config import SearchConfig
from rlplace.training.methods import LEARNED, METHODS
from rlplace.training.searches.racing_host import ROUND

if TYPE_CHECKING:
    from rlplace.cluster import Cluster

Run = tuple[str, int]
"""A method and a seed."""


def spread_rows(
    cluster: Cluster, simulator: Simulator, runs: Sequence[Run], budget: Budget, *, is_count_chosen: bool = False
) -> Iterator[tuple[int, Row]]:
    """The number of each of `runs` and its row, as they end on the workers of a cluster.

    Under a budget of evaluations the rows are those of this machine, to the bit.

    Args:
        cluster: whose workers search, each with one simulator thread.
        simulator: of the problem.
        runs: methods and seeds.
        budget: of each run.
        is_count_chosen: as `find_row`.

    Raises:
        RunnerError: the cluster is lost.
    """
    methods = [METHODS[name] for name in dict(runs)]
    return cluster.map(partial(_search, methods, simulator.problem, simulator.objective, budget, is_count_chosen), runs)


def _search(
    methods: Sequence[Method], problem: Problem, objective: Objective, budget: Budget, is_count_chosen: bool, run: Run
) -> Row:
    adopt_methods(methods)
    with one_thread_here():
        simulator = Simulator(problem, objective=objective, threads=1)
        return find_row(problem, simulator, *run, budget, is_count_chosen=is_count_chosen)


@dataclass(frozen=True)
class Learning:
    """What `learned` has on a host of this machine, as in `train`.

    Attributes:
        known: what was measured to calibrate, and the problem as it was profiled.
        log: keeps what is measured, and answers what was measured before.
        isolated: whether plans run in a worker process.
        measured: plans that it may measure.
    """

    known: Known | None = None
    log: MeasurementLog | None = None
    isolated: bool | None = None
    measured: int = 0


def find_row(
    problem: Problem,
    simulator: Simulator,
    name: str,
    seed: int,
    budget: Budget,
    *,
    is_count_chosen: bool = False,
    learning: Learning | None = None,
) -> Row:
    """The row of a method and a seed: a method that lacks its extra, or fails, gives one that says so.

    Args:
        problem: what is placed.
        simulator: of the problem.
        name: of the method.
        seed: of its draws.
        budget: what it may spend.
        is_count_chosen: whether the number of micro-batches was chosen by `auto`, as a row that needs more says.
        learning: what `learned` has; nothing by default.
    """
    begin = time.monotonic()
    if is_count_chosen and METHODS[name].refusal(problem) is not None:
        return Row(name, seed, "skipped", why="auto chose the whole batch")
    learning = learning or Learning()
    if name == LEARNED and not learning.measured:
        ask = "`--true KIND:SEED`" if problem.host.is_simulated else "`--measured N`"
        return Row(name, seed, "skipped", why=f"it learns from measured steps: ask for them with {ask}")
    if (refused := METHODS[name].refusal(problem)) is not None:
        return Row(name, seed, "skipped", why=str(refused))
    try:
        if name == LEARNED:
            return _learned(problem, simulator, seed, budget, learning)
        found = find(problem, name, simulator, budget, seed=seed)
    except MissingExtra as error:
        return Row(name, seed, "skipped", why=str(error))
    except UserError:
        raise
    except Exception as error:  # whatever it is: a method that failed is one row, not the table
        failed, spent_s = Failure.of(error), time.monotonic() - begin
        return Row(name, seed, "error", plan_s=spent_s, why=failed.why, traceback=failed.traceback)
    return _row(simulator, name, seed, found, budget)


class _RacingHost:
    """Races the plans that `learned` asks for beside the best single device, while there is time."""

    def __init__(self, evaluator: Evaluator, deadline_s: float) -> None:
        self.problem, self._evaluator, self._deadline_s = evaluator.problem, evaluator, deadline_s
        self._has_raced = False

    @property
    def is_open(self) -> bool:
        """Whether there is time left; the first race is always run."""
        return not self._has_raced or time.monotonic() < self._deadline_s

    def promising(self, count: int) -> NDArray[np.int32]:
        """(0, N): the agent proposes plans itself."""
        return np.zeros((0, self.problem.graph.num_ops), dtype=np.int32)

    def measure(self, placements: NDArray[np.int32]) -> list[Measurement]:
        """As `measure_plans`, of the plans of placements (B, N)."""
        return self.measure_plans([self._evaluator.simulator.plan(devices) for devices in placements])

    def measure_plans(self, plans: Sequence[Plan]) -> list[Measurement]:
        """A measurement for each plan, all in one race."""
        self._has_raced = True
        return self._evaluator.measure_plans(plans, ROUND, deadline_s=self._deadline_s, is_recalled=True)


def _learned(problem: Problem, simulator: Simulator, seed: int, budget: Budget, learning: Learning) -> Row:
    """The row of `learned`, which measures: as in `train`, a share of its seconds is for simulated placements."""
    begin = time.monotonic()
    reference = best_single(problem, simulator)
    evaluator = Evaluator(problem, simulator, reference, seed=seed, log=learning.log, isolated=learning.isolated)
    try:
        host = _RacingHost(evaluator, begin + budget.seconds)
        searched = Budget(budget.evaluations, budget.seconds * SearchConfig.simulate_share, learning.measured)
        task = Task(problem, simulator, searched, seed=seed, host=host)
        result = METHODS[LEARNED].run(task, known=learning.known)
    finally:
        evaluator.close()
    spent_s, count = time.monotonic() - begin, task.measurements
    if not isinstance(result, AgentResult) or result.plan is None:
        why = f"none of {count} plans ran to its end"
        return Row(LEARNED, seed, "error", evaluations=task.evaluations, plan_s=spent_s, why=why, measured=count)
    outcome = simulator.retime(result.plan)
    return Row(
        LEARNED,
        seed,
        "ok",
        outcome.step_time_s,
        task.evaluations,
        spent_s,
        outcome.peak_bytes,
        f"measured {count} plan{'s' * (count != 1)}",
        devices=result.plan.devices,
        plan=result.plan,
        measured=count,
    )


def _row(simulator: Simulator, name: str, seed: int, found: SearchResult, budget: Budget) -> Row:
    if found.devices is None and found.evaluations == 0:
        is_late = found.plan_s >= budget.seconds
        is_free = simulator.problem.allowed is None
        why = "it tried no placement" if is_free else "pins and exclusions leave it no placement"
        if is_late:
            why = "its time was up before its first placement"
        return Row(
            name, seed, "timeout" if is_late else "skipped", plan_s=found.plan_s, why=why, proved_s=found.lower_bound_s
        )
    if found.devices is None:
        return Row(
            name,
            seed,
            "oom",
            evaluations=found.evaluations,
            plan_s=found.plan_s,
            why="found no placement that fits into memory",
            proved_s=found.lower_bound_s,
        )
    if found.plan is None:
        plan, outcome = simulator.plan_and_time(found.devices)
    else:
        plan, outcome = found.plan, simulator.retime(found.plan)
    return Row(
        name,
        seed,
        outcome.status,
        outcome.step_time_s,
        found.evaluations,
        found.plan_s,
        outcome.peak_bytes,
        outcome.why,
        proved_s=found.lower_bound_s,
        history=found.history,
        devices=found.devices,
        plan=plan,
    )
