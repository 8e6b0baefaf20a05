"""`find_row`: one method with one seed on one problem, as a row; `spread_rows`: many of them, on a cluster."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rlplace.compare.row import Row
from rlplace.errors import MissingExtra, UserError
from rlplace.measure.problem import Problem
from rlplace.measure.run.threads import one_thread_here
from rlplace.measure.simulate.simulator import Objective, Simulator
from rlplace.search.failure import Failure
from rlplace.search.registry import Method, SearchResult, adopt_methods, find
from rlplace.search.task import Budget
from rlplace.training.methods import LEARNED, METHODS

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


def find_row(
    problem: Problem, simulator: Simulator, name: str, seed: int, budget: Budget, *, is_count_chosen: bool = False
) -> Row:
    """The row of a method and a seed: a method that lacks its extra, or fails, gives one that says so.

    Args:
        problem: what is placed.
        simulator: of the problem.
        name: of the method.
        seed: of its draws.
        budget: what it may spend.
        is_count_chosen: whether the number of micro-batches was chosen by `auto`, as a row that needs more says.
    """
    begin = time.monotonic()
    if is_count_chosen and METHODS[name].refusal(problem) is not None:
        return Row(name, seed, "skipped", why="auto chose the whole batch")
    if name == LEARNED:
        return Row(name, seed, "skipped", why="it learns from measured steps: `--true`, or `rlplace train` here")
    if (refused := METHODS[name].refusal(problem)) is not None:
        return Row(name, seed, "skipped", why=str(refused))
    try:
        found = find(problem, name, simulator, budget, seed=seed)
    except MissingExtra as error:
        return Row(name, seed, "skipped", why=str(error))
    except UserError:
        raise
    except Exception as error:  # whatever it is: a method that failed is one row, not the table
        failed, spent_s = Failure.of(error), time.monotonic() - begin
        return Row(name, seed, "error", plan_s=spent_s, why=failed.why, traceback=failed.traceback)
    return _row(simulator, name, seed, found, budget)


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
