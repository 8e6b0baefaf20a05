"""`replaced`: a run's step as a problem on another host, with all that the run knows; `search` places it.

`KnownRun`: the workload, host, costs, and best placement of a run folder.

`fitted_host`: the host model fitted to the measured steps of a run that stopped before it did so itself.

The report on a placement that went to another host, for people and programs: which devices, and which ops moved.
"""

from __future__ import annotations

import dataclasses
import shlex
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import UserError
from rlplace.graphs import Constraints, Grouping, OpGraph
from rlplace.locks import measuring_alone
from rlplace.measure import Costs, Host, Measurement, Placement, Plan, Problem, Simulator
from rlplace.measure.host_model import LearnedHost, Posterior, Scales, knowledge_of
from rlplace.measure.hosts.resolve import check_present
from rlplace.measure.placement import check_plan
from rlplace.measure.timing.threads import one_thread_here
from rlplace.policy import LearnConfig
from rlplace.say import Say, counted
from rlplace.search import Budget, SearchResult, Task
from rlplace.session.calibrate import LEAST, Known, calibrate_on, reference_s
from rlplace.session.prepare import capture_workload, make_problem, only_simulated, read_graph
from rlplace.session.session import Session
from rlplace.session.setup import Setup
from rlplace.store import Filter, MeasurementStore
from rlplace.training.config import TrainConfig
from rlplace.training.elastic.carried import (
    GONE,
    CarriedCosts,
    DeviceMatch,
    carried_costs,
    carried_host,
    carried_learned,
    carried_placement,
    match_devices,
)
from rlplace.training.method_choice import GUIDED, LEARNED, METHODS, POLICY, PORTFOLIO, method_of
from rlplace.workloads import Size, WorkloadSpec, build, parse_kept_workload, without_memory

STARTING = (PORTFOLIO, LEARNED, POLICY, GUIDED)
"""Methods that may be told where to start from."""


@dataclass(frozen=True, eq=False)
class Replaced:
    """A run's step on another host.

    Attributes:
        known: the state of the run.
        problem: on the new host, with op times and link figures as they were carried over, or profiled there.
        match: which device stands for which.
        carried: where the costs come from; None where they were profiled on the new host.
        learned: factors of the old host, by the names of the new one; None where nothing was learned.
    """

    known: KnownRun
    problem: Problem
    match: DeviceMatch
    carried: CarriedCosts | None = None
    learned: LearnedHost | None = None

    @cached_property
    def believed(self) -> Problem:
        """The problem under the most probable factors: the problem for searches without measurements."""
        return _believed(self.problem, self.learned)

    @cached_property
    def start(self) -> NDArray[np.int32] | None:
        """(N,) int32: the run's best placement, carried over; None where it has none."""
        if self.known.placement is None:
            return None
        simulator = Simulator(self.believed, threads=1)
        return carried_placement(self.believed, self.known.placement.devices, self.match, simulator)

    @cached_property
    def before_s(self) -> float:
        """Simulated step time of the run's placement on its own host; NaN where it has none."""
        known = self.known
        if known.placement is None:
            return float("nan")
        graph, problem = self.problem.graph, _problem_of(known, self.problem.graph)
        learned = carried_learned(known.learned, known.costs.source, match_devices(known.host, known.host))
        plan = check_plan(graph, known.host.num_devices, known.placement.plan, where=str(known.session.path))
        return Simulator(_believed(problem, learned), threads=1).retime(plan).step_time_s


def replaced(
    known: KnownRun,
    host: Host,
    *,
    say: Say,
    constraints: Constraints | None = None,
    isolated: bool | None = None,
    is_waiting: bool = True,
) -> Replaced:
    """The run's step as a problem on another host.

    The step is captured again. Nothing is measured, unless the host is of this machine and the run never measured one
    of its kinds of devices: then op times and links are profiled.

    Args:
        known: the state of the run.
        host: where its step is to go.
        say: told of long work.
        constraints: pins, exclusions, and ops that stay together; those of the run where None.
        isolated: whether ops are profiled in a worker process; see `make_problem`.
        is_waiting: wait for another search that measures on this machine, instead of giving up.

    Raises:
        FingerprintMismatch: the workload's step is not the run's any more.
        InvalidValue: the host is not simulated, and this machine lacks a device of it, or the workload is a graph file;
            or constraints leave an op no device.
        UnknownName: the run's constraints name a device that the host lacks.
        UserError: the workload cannot be built or captured.
    """
    check_present(host)
    match, config = match_devices(known.host, host), known.config
    constraints = _constraints(known, host) if constraints is None else constraints
    say(f"capturing the step of {known.spec} again")
    graph = step_of(known, host)
    known = _with_learned(known, graph, say)
    carried = carried_costs(graph, known.host, known.costs, host)
    if carried is None:
        say(f"{known.session.path.parent} knows no op times for {host.name}: profiling there")
        with measuring_alone(host, say=say, is_waiting=is_waiting):
            problem = make_problem(
                graph,
                host,
                config.num_groups,
                say,
                grouping=config.grouping,
                acyclic=config.acyclic,
                constraints=constraints,
                isolated=isolated,
            )
    else:
        problem = Problem.grouped(
            graph,
            carried_host(match),
            carried.costs,
            config.num_groups,
            config.grouping,
            acyclic=config.acyclic,
            constraints=constraints,
        )
    problem = dataclasses.replace(problem, op_order=known.session.facts.op_order)
    learned = carried_learned(known.learned, problem.costs.source, match)
    return Replaced(known, problem, match, carried, learned)


@one_thread_here()
def search_again(replaced: Replaced, budget: Budget, *, method: str = PORTFOLIO, seed: int = 0) -> SearchResult:
    """The best simulated placement on the new host that a method finds from the carried one, which is the least of it.

    Args:
        replaced: the problem and the run's state.
        budget: placements or seconds.
        method: a name of `METHODS`.
        seed: of every draw.

    Raises:
        UnknownName: no such method.
        InvalidValue: a budget without an end.
    """
    task = Task(replaced.believed, Simulator(replaced.believed), budget, seed=seed)
    chosen, start = METHODS[method], replaced.start
    if start is not None:
        task.score(start)
    options = {"start": start} if start is not None and method in STARTING else {}
    return SearchResult.of(task, chosen.run(task, **options))


def step_of(known: KnownRun, host: Host) -> OpGraph:
    """The run's step, captured again; with values where it had them, or where it may have to run.

    Raises:
        FingerprintMismatch: it is another step now.
        UserError: as `replaced`.
    """
    count, asked = known.session.cut
    if known.spec.is_file:
        if not host.is_simulated:
            raise only_simulated(known.spec)
        # a file may hold a step that was cut when it was captured, and is read as it is
        graphs = (read_graph(known.spec, each) for each in dict.fromkeys((1, count)))
        graph = next((each for each in graphs if each.fingerprint == known.session.facts.graph_fingerprint), None)
        graph = read_graph(known.spec) if graph is None else graph
    else:
        has_values = not (known.host.is_simulated and host.is_simulated)
        with nullcontext() if has_values else without_memory():
            workload = build(known.spec, seed=known.session.request.workload_seed)
        graph = capture_workload(workload, count, asked)
    known.session.require_graph(graph)
    return dataclasses.replace(graph, name=str(known.spec))


def _problem_of(known: KnownRun, graph: OpGraph) -> Problem:
    """The run's problem, all ops in one group: where nothing is searched, groups do not matter."""
    whole = Grouping(np.zeros(graph.num_ops, dtype=np.int32))
    return Problem(graph, known.host, known.costs, whole, op_order=known.session.facts.op_order)


def _with_learned(known: KnownRun, graph: OpGraph, say: Say) -> KnownRun:
    """The run with a host model fitted to its measured steps, where it stopped before it had one."""
    if known.learned is not None or known.host.is_simulated:
        return known
    try:
        return dataclasses.replace(known, learned=fitted_host(known.session.measurements, _problem_of(known, graph)))
    except UserError as error:
        say(f"warning: what was measured does not count: {error}")
        return known


def _believed(problem: Problem, learned: LearnedHost | None) -> Problem:
    knowledge = None if learned is None else knowledge_of([learned], problem.costs.source)
    if learned is None or knowledge is None:
        return problem
    return Posterior.prior(Scales(problem, learned.prior, knowledge)).problem


def without_policy(config: TrainConfig, host: Host) -> TrainConfig:
    """`config` without options of a policy where `host` is real and `learned` runs: a simulated host had the policy."""
    if not host.is_simulated and method_of(config, is_simulated=False) == LEARNED and config.guide is None:
        return dataclasses.replace(config, learn=LearnConfig())
    return config


def _constraints(known: KnownRun, host: Host) -> Constraints:
    """The run's, if the host has their devices."""
    constraints = known.config.constraints or Constraints()
    try:
        constraints.check_devices([device.name for device in host.devices], [device.kind for device in host.devices])
    except Exception as error:
        error.add_note("The run was pinned to it: give `--pin` and `--exclude` again for the new host, all of them.")
        raise
    return constraints


@dataclass(frozen=True, eq=False)
class KnownRun:
    """The state of a run.

    Attributes:
        session: of the run, as it is now; it cannot be changed.
        spec: its workload, with the size that it had.
        config: how it searched.
        host: with the link figures that were measured or given.
        costs: (N, D) as profiled, estimated or given.
        placement: its best one; None where it stopped before there was one.
        learned: the host model from its measured steps; None where there is none.
    """

    session: Session
    spec: WorkloadSpec
    config: TrainConfig
    host: Host
    costs: Costs
    placement: Placement | None
    learned: LearnedHost | None

    def setup(self, host: Host, host_word: str, *, gangs: bool) -> Setup:
        """The run's step on another host."""
        request = self.session.request
        return Setup(
            spec=self.spec,
            host=host,
            host_word=host_word,
            gangs=gangs,
            asked=request.asked,
            workload_seed=request.workload_seed,
        )

    @classmethod
    def of(cls, session: Session, spec: WorkloadSpec) -> KnownRun:
        """The state in the session of a run; `spec` is its workload.

        Raises:
            FileProblem: the run stopped before it had a problem.
            InvalidValue, UnknownName: something in the session is malformed.
            FingerprintMismatch: its placement is of another graph or host.
        """
        return cls(
            session,
            spec,
            session.required("config", TrainConfig),
            session.host,
            session.costs,
            session.best_placement() if session.has("placement") else None,
            session.learned,
        )


def read_known(folder: Path, workload: str | None = None) -> KnownRun:
    """The state of the run in a folder; nothing is built, captured or run.

    Args:
        folder: of the run.
        workload: the workload again, where the run is of a user's function or file.

    Raises:
        FileProblem: there is no run, it stopped before it had a problem, or its session cannot be read.
        InvalidValue, UnknownName: its session is malformed; or the run is of a user's function or file, and
            `workload` does not name it again.
        FingerprintMismatch: its placement is of another graph or host.
    """
    session = Session.read(folder)
    try:
        request = session.request
        command = shlex.join(["--workload", request.workload])
        spec = parse_kept_workload(request.workload, workload, where=str(session.path), command=command)
        return KnownRun.of(session, sized(spec, request.default_size))
    except BaseException:
        session.close()
        raise


def sized(spec: WorkloadSpec, size: Size) -> WorkloadSpec:
    """The workload with a size, where it is a name without one; parts of several likewise.

    Another host may have another default size, and the step is to stay the same.
    """
    if spec.is_file or spec.is_function:
        return spec
    if spec.is_multi:
        parts = (dataclasses.replace(part, spec=sized(part.spec, size)) for part in spec.parts)
        return dataclasses.replace(spec, parts=tuple(parts))
    return spec if spec.size else dataclasses.replace(spec, size=size)


MOST = 64
"""The latest plans are enough, and fitted within seconds."""


def fitted_host(measurements: MeasurementStore, problem: Problem) -> LearnedHost | None:
    """The host model fitted to the step times of a run; None where they are too few, or it predicts worse.

    Args:
        measurements: of the run.
        problem: of the run, as it was profiled.

    Raises:
        FileProblem, InvalidValue, UnknownName: they cannot be read, or are malformed.
    """
    known = _measured(measurements, problem)
    found = calibrate_on(known) if len(known.plans) >= LEAST else None
    return LearnedHost.of(found.posterior) if found is not None and found.is_kept else None


def _measured(store: MeasurementStore, problem: Problem) -> Known:
    """The latest plans that ran, and the step time of each, as beside one reference: a drift of the machine cancels."""
    graph, host = problem.graph, problem.host
    found: dict[str, tuple[Plan, Measurement]] = {}
    for row in store.measurements(Filter(graph=graph.fingerprint, host=host.fingerprint, status="ok")):
        if row.plan not in found:
            plan = store.plan(row.plan)
            with suppress(UserError):  # of another version, or a stranger's: it says nothing of this step
                found[row.plan] = check_plan(graph, host.num_devices, plan), row.measurement
        if len(found) == MOST:
            break
    scale_s = reference_s(outcome for _, outcome in found.values())
    return Known(
        problem, [plan for plan, _ in found.values()], [outcome.beside(scale_s) for _, outcome in found.values()]
    )


MOST_LINES = 6
"""Pairs of devices that are told one by one, those with the most time first."""


def moves(problem: Problem, match: DeviceMatch, before: NDArray[np.int32], after: NDArray[np.int32]) -> dict[str, Any]:
    """Ops that are not on the device that stands for their old one, as `--json` prints them.

    Args:
        problem: on the new host.
        match: of the two hosts.
        before: (N,) devices of the old one.
        after: (N,) of the new one.

    Returns:
        `num_ops` that moved, their `share` of the step's mean time, and `pairs`: `from`, `to`, `num_ops` and `share` of
        every pair of devices that ops moved between, the largest share first.
    """
    mean_s = problem.costs.op_time_s.mean(axis=1)
    whole_s = max(float(mean_s.sum()), 1e-30)
    has_moved = np.array(match.to, dtype=np.int32)[before] != after
    num_new = problem.host.num_devices
    keys, place = np.unique(before[has_moved].astype(np.int64) * num_new + after[has_moved], return_inverse=True)
    counts = np.bincount(place, minlength=len(keys))
    seconds = np.bincount(place, weights=mean_s[has_moved], minlength=len(keys))
    pairs = [
        {
            "from": match.old.devices[int(key) // num_new].name,
            "to": problem.host.devices[int(key) % num_new].name,
            "num_ops": int(count),
            "share": float(second_s) / whole_s,
        }
        for key, count, second_s in sorted(zip(keys, counts, seconds, strict=True), key=lambda one: (-one[2], one[0]))
    ]
    return {
        "num_ops": int(np.count_nonzero(has_moved)),
        "share": float(mean_s[has_moved].sum()) / whole_s,
        "pairs": pairs,
    }


def describe_devices(match: DeviceMatch) -> dict[str, Any]:
    """The devices of both hosts, as `--json` prints them: which stands for which, which are gone, which were added."""
    return {"kept": match.renamed, "gone": list(match.gone), "added": list(match.added)}


def describe_costs(carried: CarriedCosts | None, match: DeviceMatch) -> dict[str, list[str]]:
    """Kinds of devices by where their op times come from, as `--json` prints them."""
    kinds = list(dict.fromkeys(device.kind for device in match.new.devices))
    if carried is None:
        return {"known": [], "estimated": [], "profiled": kinds}
    return {"known": list(carried.known), "estimated": list(carried.estimated), "profiled": []}


def device_lines(match: DeviceMatch) -> list[str]:
    """Changes of the devices, a line each."""
    others = [
        f"{old.name} is {match.new.devices[index].name} now"
        for old, index in zip(match.old.devices, match.to, strict=True)
        if index != GONE and match.new.devices[index].name != old.name
    ]
    told = {"devices": others, "gone": match.gone, "added": match.added}
    return [f"{what}: {', '.join(names)}" for what, names in told.items() if names]


def move_lines(moved: dict[str, Any], num_ops: int) -> list[str]:
    """Ops that moved: a line for all, and one for each of the first pairs of devices."""
    if not moved["num_ops"]:
        return ["no op moved"]
    pairs = moved["pairs"]
    more = f"  and between {counted(len(pairs) - MOST_LINES, 'more pair')} of devices"
    return [
        f"moved: {moved['num_ops']:,} of {counted(num_ops, 'op')}, {moved['share']:.0%} of the step's time",
        *(
            f"  {pair['from']} to {pair['to']}: {counted(pair['num_ops'], 'op')}, {pair['share']:.0%}"
            for pair in pairs[:MOST_LINES]
        ),
        *([more] if len(pairs) > MOST_LINES else []),
    ]
