"""`cp-sat`: the best schedule and placement of small problems, proven; beyond that the best found, and a bound.

The schedule of a step as a constraint program (OR-Tools CP-SAT).

Every op has a start, an end and one device; items on one device, link or dispatcher do not overlap. A tensor goes to
each device that needs it once, over the links of its route, holding the devices that the copy blocks. Ops may be
delayed, and every order is free, so the program's optimum is no longer than the step of any placement under any
priorities. Effects that it leaves out only make steps longer: memory over time (only memory that is resident for the
whole step counts), co-running, launch bounds other than `run_ahead=1`, updates that wait for readers by hand-over. One
does not: where machines relay tensors (`transfer_sources`) fewer transfers cross, so groups are scheduled there.

Times are whole units, rounded down: with starts rounded down as well, any schedule stays one (s + p <= t implies
floor(s) + floor(p) <= floor(t)), so the optimum times the unit is a lower bound.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue, MissingExtra
from rlplace.graphs import group_ops
from rlplace.measure import Problem, Simulator
from rlplace.measure.bounds import figures, heads_and_tails, lower_bound_s
from rlplace.measure.simulate.compiled_problem import HANDOVER, JOB, compile_problem
from rlplace.search.groupings import majority_devices
from rlplace.search.methods import find
from rlplace.search.rules.baselines import solve_single
from rlplace.search.schedule.list_schedule import Units, group_units, host_resources, op_units
from rlplace.search.schedule.list_schedulers import solve_heft
from rlplace.search.task import Task

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

MOST_JOBS = 120
"""Ops up to which ops are scheduled, and the bound is one; beyond, groups."""
MOST_GROUPS = 40
"""Groups that are scheduled where there are more ops."""
EFFORT = 10.0
"""OR-Tools' deterministic time where the budget is in evaluations: some seconds for each, the same on every machine."""
GROUPS_EFFORT = 0.3
"""The same for groups, which prove nothing: better placements come early, or not at all."""
LEAST_S = 0.2
"""Least seconds of the solver."""


@dataclass(frozen=True, eq=False)
class Solved:
    """The result of CP-SAT on a problem.

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
    if int((~problem.graph.is_source).sum()) <= MOST_JOBS and not problem.host.machine_of.any():
        solved = schedule(problem, seconds, start=task.best_devices)
        if isinstance(task.timer, Simulator) and task.timer.problem is problem and task.timer.objective == "latency":
            task.lower_bound_s = max(task.lower_bound_s, solved.bound_s)
    else:
        solved = schedule_groups(problem, seconds, start=task.best_devices)
    if len(solved.placements):
        task.score_distinct(solved.placements[::-1])


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
        problem: the problem to place.
        seconds: wall time; infinite for a fixed effort.
        start: (N,) a placement to begin with; HEFT's by default.
        is_narrowed: whether the program is told the other lower bounds.
        effort: OR-Tools' deterministic time where `seconds` is infinite.

    Raises:
        MissingExtra: OR-Tools is not installed.
    """
    simulator = Simulator(problem, threads=1)
    if start is None:
        start = find(problem, "heft", simulator).devices
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
    solved = _solve(built, seconds, effort)
    return replace(solved, bound_s=max(bound_s, solved.bound_s))


def schedule_groups(problem: Problem, seconds: float = math.inf, *, start: NDArray[np.int32] | None = None) -> Solved:
    """Schedules groups, at most 40 of them where ops may run anywhere; proves no bound.

    Args:
        problem: the problem to place.
        seconds: wall time; infinite for a fixed effort.
        start: (N,) a placement to begin with: every group goes where most of its work is.

    Raises:
        MissingExtra: OR-Tools is not installed.
    """
    coarse = problem
    if problem.grouping.num_groups > MOST_GROUPS:
        grouping = group_ops(problem.graph, problem.costs.op_time_s.mean(axis=1), MOST_GROUPS, allowed=problem.allowed)
        with suppress(InvalidValue):  # its groups tie together ops that no device may hold
            coarse = replace(problem, grouping=grouping)
    units = group_units(coarse)
    built = ScheduleModel(coarse, units, float(units.time_s.max(axis=1).sum()) + _transfers_s(problem), are_ops=False)
    if start is not None:
        built.hint(majority_devices(coarse, start))
    solved = _solve(built, seconds, GROUPS_EFFORT)
    return replace(solved, placements=coarse.grouping.expand(solved.placements), bound_s=0.0)


def _longest_s(problem: Problem) -> float:
    """Seconds of one thing after the other: a step need not be longer, if it can be done at all."""
    job_s = problem.costs.op_time_s[~problem.graph.is_source].max(axis=1)
    return float(job_s.sum()) + _transfers_s(problem) + problem.host.dispatch_s * len(job_s) + 1e-9


def _transfers_s(problem: Problem) -> float:
    graph, host = problem.graph, problem.host
    worst_s = float(problem.transfer_latency_s.max()) + graph.tensor_bytes * float(problem.transfer_s_per_byte.max())
    copies = np.minimum(np.diff(graph.readers[0]), host.num_devices - 1)
    return float(((worst_s + host.copy_dispatch_s) * copies).sum())


def _solve(built: ScheduleModel, seconds: float, effort: float) -> Solved:
    """The result for units in place of ops."""
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
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.max_deterministic_time = effort if math.isinf(seconds) else math.inf
    status = solver.solve(built.model, Collector())
    is_found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    value_s = solver.objective_value * built.unit_s if is_found else math.inf
    bound = solver.best_objective_bound if is_found or status == cp_model.UNKNOWN else 0.0
    rows = np.array(found, dtype=np.int32).reshape(len(found), len(built.starts))
    return Solved(rows, value_s, max(bound, 0.0) * built.unit_s, status == cp_model.OPTIMAL)


UNITS = 1 << 30
"""Time units from 0 to the horizon."""


def load_ortools() -> Any:
    """The module `ortools.sat.python.cp_model`.

    Raises:
        MissingExtra: OR-Tools is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise MissingExtra("ortools", "exact") from None
    return cp_model


class ScheduleModel:
    """The constraint program of a problem's units.

    Attributes:
        model: the program, its goal the end of the last unit.
        unit_s: seconds of a time unit.
        starts: the start of every unit; 0 for sources.
        on: for every label, the variable of each device where it may be.
    """

    def __init__(self, problem: Problem, units: Units, horizon_s: float, *, are_ops: bool = True) -> None:
        """Build the program.

        Args:
            problem: where launches, updates and routes come from.
            units: the problem to place.
            horizon_s: no schedule that matters is longer.
            are_ops: whether units are ops; launches and updates are left out for groups.

        Raises:
            MissingExtra: OR-Tools is not installed.
        """
        self._problem, self._units, self._are_ops = problem, units, are_ops
        self._compiled = compile_problem(problem)
        self._resources = host_resources(problem)
        self.model: cp_model.CpModel = load_ortools().CpModel()
        self.unit_s = max(horizon_s, 1e-30) / UNITS
        self._busy: dict[tuple[str, int], list[Any]] = defaultdict(list)
        self._begins: dict[int, Any] = {}  # launches that wait for the inputs of their op
        self._loads: dict[tuple[str, int], list[Any]] = defaultdict(list)
        self._transfers: dict[int, list[tuple[int, Any, Any, int]]] = defaultdict(list)
        self.on = [self._label_variables(label) for label in range(len(units.label_allowed))]
        self.starts = [self._time(f"s{unit}") for unit in range(len(units.label))]
        self._ends = [self._time(f"e{unit}") for unit in range(len(units.label))]
        for unit in range(len(units.label)):
            self._run_unit(unit)
        for tensor in range(len(units.tensor_unit)):
            self._send_tensor(tensor)
        if are_ops:
            self._wait_to_update()
        self._hold_residents()
        self.makespan = self._time("makespan")
        for key, intervals in self._busy.items():
            if len(intervals) > 1:
                self.model.add_no_overlap(intervals)
                self.model.add(self.makespan >= sum(self._loads[key]))
        for end in self._ends:
            self.model.add(self.makespan >= end)
        self.model.minimize(self.makespan)

    def whole(self, seconds: float) -> int:
        """Time units in `seconds`, rounded down, beyond the doubt of the division; times beyond the horizon are cut."""
        return math.floor(min(seconds / self.unit_s * (1 - 2.0**-50), UNITS + 2))

    def narrow(self, heads: NDArray[np.float64], tails: NDArray[np.float64], least_s: float) -> None:
        """Gives the program known facts: least heads and tails of units, and of the step."""
        for unit, (head, tail) in enumerate(zip(heads.tolist(), tails.tolist(), strict=True)):
            if not self._units.is_source[unit]:
                self.model.add(self.starts[unit] >= self.whole(head))
                self.model.add(self.makespan >= self._ends[unit] + self.whole(tail))
        self.model.add(self.makespan >= self.whole(least_s))

    def hint(self, devices: NDArray[np.int32], starts_s: NDArray[np.float64] | None = None) -> None:
        """Suggests devices of units, and starts."""
        for label, variables in enumerate(self.on):
            first = int(np.argmax(self._units.label == label))
            for device, variable in variables.items():
                self.model.add_hint(variable, int(devices[first] == device))
        if starts_s is not None:
            for start, seconds in zip(self.starts, starts_s.tolist(), strict=True):
                self.model.add_hint(start, self.whole(seconds))

    def devices(self, value: Any) -> NDArray[np.int32]:
        """(U,) int32: where a solution puts the units; `value` gives a variable's value."""
        chosen = [next(device for device, variable in of.items() if value(variable)) for of in self.on]
        return np.array(chosen, dtype=np.int32)[self._units.label]

    def _label_variables(self, label: int) -> dict[int, Any]:
        devices = np.flatnonzero(self._units.label_allowed[label]).tolist()
        variables = {device: self.model.new_bool_var(f"x{label},{device}") for device in devices}
        self.model.add_exactly_one(variables.values())
        return variables

    def _time(self, name: str) -> Any:
        return self.model.new_int_var(0, UNITS + 1, name)

    def _place(self, unit: int) -> dict[int, Any]:
        return self.on[int(self._units.label[unit])]

    def _atoms(self, device: int) -> list[int]:
        offsets = self._resources.device_offsets
        return list(self._resources.device_holds[offsets[device] : offsets[device + 1]].tolist())

    def _keep_busy(self, kind: str, which: int, interval: Any, load: Any) -> None:
        self._busy[kind, which].append(interval)
        self._loads[kind, which].append(load)

    def _launch(self, name: str, cost_s: float, start: Any, places: dict[int, Any]) -> Any:
        """Adds a launch before `start` on the dispatcher of the device in use; its start, or None where it is free."""
        cost = self.whole(cost_s)
        launching = {d: on for d, on in places.items() if self._compiled.dispatcher[d] >= 0}
        if not (self._are_ops and cost > 0 and launching):
            return None
        begin = self._time(f"{name} launch")
        for device, on in launching.items():
            interval = self.model.new_optional_fixed_size_interval_var(begin, cost, on, f"{name} launch {device}")
            self._keep_busy("dispatcher", int(self._compiled.dispatcher[device]), interval, cost * on)
            self.model.add(start >= begin + cost).only_enforce_if(on)
        return begin

    def _run_unit(self, unit: int) -> None:
        units, start, end, places = self._units, self.starts[unit], self._ends[unit], self._place(unit)
        if units.is_source[unit]:
            self.model.add(start == 0)
            self.model.add(end == 0)
            return
        durations = {device: self.whole(float(units.time_s[unit, device])) for device in places}
        self.model.add(end == start + sum(durations[device] * on for device, on in places.items()))
        begin = self._launch(f"u{unit}", self._compiled.dispatch_s, start, places)
        is_idle_launch = begin is not None and self._compiled.run_ahead == 1
        for device, on in places.items():
            name, load = f"u{unit},{device}", durations[device] * on
            if is_idle_launch and self._compiled.dispatcher[device] >= 0:
                load = (durations[device] + self.whole(self._compiled.dispatch_s)) * on
                interval = self.model.new_optional_interval_var(begin, self._time(name), end, on, name)
            elif durations[device] > 0:
                interval = self.model.new_optional_fixed_size_interval_var(start, durations[device], on, name)
            else:
                continue
            for atom in self._atoms(device):
                self._keep_busy("resource", atom, interval, load)
        first, last = units.input_offsets[unit], units.input_offsets[unit + 1]
        waits_first = is_idle_launch and self._compiled.by_request
        if waits_first:
            self._begins[unit] = begin
        for producer in set(units.tensor_unit[units.input_tensors[first:last]].tolist()):
            if not units.is_source[producer]:
                self.model.add(start >= self._ends[producer])
                for device, on in places.items() if waits_first else ():
                    if self._compiled.dispatcher[device] >= 0:
                        self.model.add(begin >= self._ends[producer]).only_enforce_if(on)

    def _send_tensor(self, tensor: int) -> None:
        units, compiled = self._units, self._compiled
        producer = int(units.tensor_unit[tensor])
        first, last = units.reader_offsets[tensor], units.reader_offsets[tensor + 1]
        readers = [r for r in units.readers[first:last].tolist() if units.label[r] != units.label[producer]]
        for destination in sorted({device for reader in readers for device in self._place(reader)}):
            kinds = compiled.route_kind[destination :: compiled.num_devices]  # of routes from each device
            sources = [d for d in self._place(producer) if d != destination and kinds[d] != HANDOVER]
            start = self._time(f"t{tensor}>{destination}") if sources else None
            for source in sources:
                self._send(tensor, source, destination, self._place(producer)[source], start, readers)

    def _send(
        self, tensor: int, source: int, destination: int, from_source: Any, start: Any, readers: list[int]
    ) -> None:
        units, compiled, resources, model = self._units, self._compiled, self._resources, self.model
        name = f"t{tensor},{source}>{destination}"
        pair = source * compiled.num_devices + destination
        bytes_s = units.tensor_bytes[tensor] * resources.s_per_byte[source, destination]
        duration = self.whole(float(resources.latency_s[source, destination] + bytes_s))
        sent = model.new_bool_var(name)
        model.add(start >= self._ends[int(units.tensor_unit[tensor])])
        begin = self._launch(name, compiled.copy_dispatch_s, start, {destination: sent})
        self._transfers[tensor].append((destination, sent, start, duration))
        whole = model.new_optional_fixed_size_interval_var(start, duration, sent, name) if duration > 0 else None
        first, last = resources.route_offsets[pair : pair + 2]
        held = set(resources.route_holds[first:last].tolist())
        if compiled.route_kind[pair] == JOB and begin is not None and compiled.run_ahead == 1:
            launched = model.new_optional_interval_var(begin, self._time(name), start + duration, sent, f"{name} job")
            load = (duration + self.whole(compiled.copy_dispatch_s)) * sent
            own = set(self._atoms(destination))
            for atom in sorted(own):
                self._keep_busy("resource", atom, launched, load)
            held -= own
        for resource in sorted(held) if whole is not None else ():
            self._keep_busy("resource", resource, whole, duration * sent)
        model.add_implication(sent, from_source)
        arrives = {reader: places[destination] for reader in readers if destination in (places := self._place(reader))}
        model.add_bool_or([sent.negated(), *arrives.values()])
        for reader, here in arrives.items():
            model.add_bool_or([from_source.negated(), here.negated(), sent])
            is_launched_after = reader in self._begins and compiled.dispatcher[destination] >= 0
            waits = self._begins[reader] if is_launched_after else self.starts[reader]
            model.add(waits >= start + duration).only_enforce_if([sent, here])

    def _wait_to_update(self) -> None:
        graph = self._problem.graph
        offsets, readers = graph.readers
        updaters: dict[int, list[int]] = defaultdict(list)
        for op, tensor in sorted(zip(graph.mutation_op.tolist(), graph.mutation_tensor.tolist(), strict=True)):
            updaters[tensor].append(op)
        for tensor, ops in updaters.items():
            home = self._place(int(graph.tensor_op[tensor]))
            others = set(readers[offsets[tensor] : offsets[tensor + 1]].tolist()) - set(ops)
            for earlier, later in itertools.pairwise(ops):
                if earlier != later:
                    self.model.add(self.starts[later] >= self._ends[earlier])
            for op in set(ops):
                for _, sent, start, duration in self._transfers[tensor]:
                    self.model.add(self.starts[op] >= start + duration).only_enforce_if(sent)
                for reader in sorted(others):
                    for device, here in self._place(reader).items():
                        if device in home:
                            self.model.add(self.starts[op] >= self._ends[reader]).only_enforce_if([here, home[device]])

    def _hold_residents(self) -> None:
        held: dict[int, list[Any]] = defaultdict(list)
        for num_bytes, variables in zip(
            self._units.label_resident_bytes.astype(np.int64).tolist(), self.on, strict=True
        ):
            for device, on in variables.items() if num_bytes > 0 else ():
                held[int(self._resources.account[device])].append(num_bytes * on)
        for account, parts in held.items():
            self.model.add(sum(parts) <= max(int(self._resources.room_bytes[account]), 0))
