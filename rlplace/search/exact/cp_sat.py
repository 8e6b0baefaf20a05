"""`cp-sat`: the best schedule and placement of small problems, proven; beyond that the best found, and a bound."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.graphs.grouping.groups import group_ops
from rlplace.measure.bounds.bounds import lower_bound_s
from rlplace.measure.bounds.figures import figures
from rlplace.measure.bounds.paths import heads_and_tails
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.exact.cp_sat_model import ScheduleModel, load_ortools
from rlplace.search.groups import majority_devices
from rlplace.search.rules.baselines import solve_single
from rlplace.search.schedule.heft import solve_heft
from rlplace.search.schedule.units import group_units, op_units
from rlplace.search.task import Budget, Task

MOST_JOBS = 120
"""Ops up to which ops are scheduled, and the bound is one; beyond, groups."""
MOST_GROUPS = 40
"""Groups that are scheduled where there are more ops."""
EFFORT = 10.0
"""OR-Tools' deterministic time where the budget is in evaluations: some seconds for each, the same on every machine."""
GROUPS_EFFORT = 0.3
"""The same for groups, which prove nothing: better placements come early, or not at all."""
LEAST_S = 0.2
"""Seconds that the solver gets at least."""


@dataclass(frozen=True, eq=False)
class Solved:
    """What CP-SAT made of a problem.

    Attributes:
        placements: (S, N) int32, of every better schedule that it found, the best last.
        value_s: the length of the best schedule in whole time units, rounded down; infinite where there is none.
        bound_s: no placement can do better; 0 for groups.
        is_optimal: whether `value_s` is proven to be the optimum of the program.
    """

    placements: NDArray[np.int32]
    value_s: float
    bound_s: float
    is_optimal: bool


def solve_cp_sat(task: Task) -> None:
    """Scores single devices, HEFT's placements and CP-SAT's; its bound goes to the task if step times are latencies.

    Raises:
        MissingExtra: OR-Tools is not installed.
    """
    load_ortools()
    problem = task.problem
    solve_single(task)
    solve_heft(task)
    seconds = max(task.seconds_left * 0.9, LEAST_S) if math.isfinite(task.budget.seconds) else math.inf
    is_small = int((~problem.graph.is_source).sum()) <= MOST_JOBS
    if is_small:
        solved = schedule(problem, seconds, start=task.best_devices)
        timer = task.timer
        if isinstance(timer, Simulator) and timer.problem is problem and timer.objective == "latency":
            task.lower_bound_s = max(task.lower_bound_s, solved.bound_s)
    else:
        solved = schedule_groups(problem, seconds, start=task.best_devices)
    last_first = solved.placements[::-1]
    if len(last_first):
        task.score(last_first[np.sort(np.unique(last_first, axis=0, return_index=True)[1])])


def schedule(
    problem: Problem,
    seconds: float = math.inf,
    *,
    start: NDArray[np.int32] | None = None,
    is_narrowed: bool = True,
    effort: float = EFFORT,
) -> Solved:
    """Schedules the ops of a problem for latency.

    Args:
        problem: what is placed.
        seconds: wall time; infinite for a fixed effort.
        start: (N,) a placement to begin with; HEFT's by default.
        is_narrowed: whether the program is told the other lower bounds.
        effort: OR-Tools' deterministic time where `seconds` is infinite.

    Raises:
        MissingExtra: OR-Tools is not installed.
    """
    simulator = Simulator(problem, threads=1)
    if start is None:
        start = _heft(problem)
    horizon_s, starts_s = _longest_s(problem), None
    if start is not None:
        plan, measured = simulator.plan_and_time(start)
        if measured.ok:
            horizon_s, starts_s = measured.step_time_s, simulator.timeline(plan).op_start_s
    built = ScheduleModel(problem, op_units(problem), horizon_s)
    bound_s = 0.0
    if is_narrowed:
        bound_s = lower_bound_s(problem)[0]
        heads, tails = heads_and_tails(problem.graph, figures(problem), with_transfers=True)
        built.narrow(heads, tails, bound_s)
    if start is not None:
        built.hint(start, starts_s)
    found, value_s, proven_s, is_optimal = _solve(built, seconds, effort)
    rows = np.stack(found) if found else np.zeros((0, problem.graph.num_ops), dtype=np.int32)
    return Solved(rows, value_s, max(bound_s, proven_s), is_optimal)


def schedule_groups(problem: Problem, seconds: float = math.inf, *, start: NDArray[np.int32] | None = None) -> Solved:
    """Schedules groups, at most 40 of them where ops may run anywhere; proves no bound.

    Args:
        problem: what is placed.
        seconds: wall time; infinite for a fixed effort.
        start: (N,) a placement to begin with: every group goes where most of its work is.

    Raises:
        MissingExtra: OR-Tools is not installed.
    """
    coarse = problem
    if problem.grouping.num_groups > MOST_GROUPS:
        grouping = group_ops(problem.graph, problem.costs.op_time_s.mean(axis=1), MOST_GROUPS, allowed=problem.allowed)
        try:
            coarse = replace(problem, grouping=grouping)
        except InvalidValue:  # its groups tie together ops that no device may hold
            coarse = problem
    units = group_units(coarse)
    horizon_s = float(units.time_s.max(axis=1).sum()) + _transfers_s(problem)
    built = ScheduleModel(coarse, units, horizon_s, are_ops=False)
    if start is not None:
        built.hint(majority_devices(coarse, start))
    found, value_s, _, is_optimal = _solve(built, seconds, GROUPS_EFFORT)
    rows = coarse.grouping.expand(np.stack(found)) if found else np.zeros((0, problem.graph.num_ops), dtype=np.int32)
    return Solved(rows, value_s, 0.0, is_optimal)


def _heft(problem: Problem) -> NDArray[np.int32] | None:
    task = Task(problem, Simulator(problem, threads=1), Budget())
    solve_heft(task)
    return task.best_devices


def _longest_s(problem: Problem) -> float:
    """Seconds of one thing after the other: a step need not be longer, if it can be done at all."""
    host, is_job = problem.host, ~problem.graph.is_source
    launches_s = host.dispatch_s * int(is_job.sum())
    return float(problem.costs.op_time_s[is_job].max(axis=1).sum()) + _transfers_s(problem) + launches_s + 1e-9


def _transfers_s(problem: Problem) -> float:
    graph, host = problem.graph, problem.host
    worst_s = float(problem.transfer_latency_s.max()) + graph.tensor_bytes * float(problem.transfer_s_per_byte.max())
    copies = np.minimum(np.diff(graph.readers[0]), host.num_devices - 1)
    return float(((worst_s + host.copy_dispatch_s) * copies).sum())


def _solve(built: ScheduleModel, seconds: float, effort: float) -> tuple[list[NDArray[np.int32]], float, float, bool]:
    """Placements of units in order of improvement, the value, the bound and whether they meet."""
    cp_model = load_ortools()
    found: list[NDArray[np.int32]] = []

    class Collector(cp_model.CpSolverSolutionCallback):  # type: ignore[misc, name-defined]
        def on_solution_callback(self) -> None:
            found.append(built.devices(self.value))

    solver: Any = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    # quick restarts prove in a tenth of a second what the default search of one worker takes minutes for
    solver.parameters.search_branching = cp_model.PORTFOLIO_WITH_QUICK_RESTART_SEARCH
    if math.isfinite(seconds):
        solver.parameters.max_time_in_seconds = seconds
    else:
        solver.parameters.max_deterministic_time = effort
    status = solver.solve(built.model, Collector())
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        is_known = status == cp_model.UNKNOWN
        return found, math.inf, max(solver.best_objective_bound, 0.0) * built.unit_s if is_known else 0.0, False
    return (
        found,
        solver.objective_value * built.unit_s,
        max(solver.best_objective_bound, 0.0) * built.unit_s,
        status == cp_model.OPTIMAL,
    )
