"""`replaced`: a run's step as a problem on another host, with all that the run knows; `search` places it."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import UserError
from rlplace.graphs.grouping.constraints import Constraints
from rlplace.graphs.grouping.groups import Grouping
from rlplace.graphs.opgraph import OpGraph
from rlplace.locks import measuring_alone
from rlplace.measure.host_model import LearnedHost, Posterior, Scales, knowledge_of
from rlplace.measure.hosts.host import Host
from rlplace.measure.hosts.resolve import check_present
from rlplace.measure.isolate.profiling import profile_isolated
from rlplace.measure.placement import check_plan
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timing.threads import one_thread_here
from rlplace.policy.options import LearnConfig
from rlplace.say import Say
from rlplace.search.methods import SearchResult
from rlplace.search.task import Budget, Task
from rlplace.session.steps import capture_workload, only_simulated, read_graph
from rlplace.training.config import TrainConfig
from rlplace.training.elastic.devices import DeviceMatch, match_devices
from rlplace.training.elastic.figures import CarriedCosts, carried_costs, carried_host, carried_learned
from rlplace.training.elastic.fitted import fitted_host
from rlplace.training.elastic.known import KnownRun
from rlplace.training.elastic.starts import carried_placement
from rlplace.training.methods import GUIDED, LEARNED, METHODS, POLICY, PORTFOLIO, method_of
from rlplace.workloads import build, without_memory

STARTING = (PORTFOLIO, LEARNED, POLICY, GUIDED)
"""Methods that may be told where to start from."""


@dataclass(frozen=True, eq=False)
class Replaced:
    """A run's step on another host.

    Attributes:
        known: what the run knows.
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
        """The problem under the most probable factors: what is searched where nothing is measured."""
        return _believed(self.problem, self.learned)

    @cached_property
    def start(self) -> NDArray[np.int32] | None:
        """(N,) int32: the run's best placement, carried over; None where it has none."""
        if self.known.placement is None:
            return None
        devices = self.known.placement.devices
        return carried_placement(self.believed, devices, self.match, Simulator(self.believed, threads=1))

    @cached_property
    def before_s(self) -> float:
        """Simulated step time of the run's placement on its own host; NaN where it has none."""
        known = self.known
        if known.placement is None:
            return float("nan")
        graph, problem = self.problem.graph, _problem_of(known, self.problem.graph)
        same = match_devices(known.host, known.host)
        learned = carried_learned(known.learned, known.costs.source, same)
        plan = check_plan(graph, known.host.num_devices, known.placement.plan, where=str(known.folder))
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
        known: what the run knows.
        host: where its step is to go.
        say: told what takes long.
        constraints: pins, exclusions and what stays together; those of the run where None.
        isolated: whether ops are profiled in a worker process; see `profile_isolated`.
        is_waiting: wait for another search that measures on this machine, instead of giving up.

    Raises:
        FingerprintMismatch: the workload's step is not the run's any more.
        InvalidValue: the host is not simulated, and this machine lacks a device of it, or the workload is a graph file;
            or constraints leave an op no device.
        UnknownName: the run's constraints name a device that the host lacks.
        UserError: the workload cannot be built or captured.
    """
    check_present(host)
    match, choices = match_devices(known.host, host), known.choices
    constraints = _constraints(known, host) if constraints is None else constraints
    say(f"capturing the step of {known.spec} again")
    graph = step_of(known, host)
    known = _with_learned(known, graph, say)
    carried = carried_costs(graph, known.host, known.costs, host)
    if carried is None:
        say(f"{known.folder} knows no op times for {host.name}: profiling there")
        with measuring_alone(host, say=say, is_waiting=is_waiting):
            problem = Problem.profile(
                graph,
                host,
                num_groups=choices.num_groups,
                grouping=choices.grouping,
                acyclic=choices.acyclic,
                constraints=constraints,
                progress=say,
                profiler=lambda graph, host, say: profile_isolated(graph, host, on_progress=say, isolated=isolated),
            )
    else:
        problem = Problem.grouped(
            graph,
            carried_host(match),
            carried.costs,
            choices.num_groups,
            choices.grouping,
            acyclic=choices.acyclic,
            constraints=constraints,
        )
    problem = dataclasses.replace(problem, op_order=known.op_order)
    learned = carried_learned(known.learned, problem.costs.source, match)
    return Replaced(known, problem, match, carried, learned)


@one_thread_here()
def search(replaced: Replaced, budget: Budget, *, method: str = PORTFOLIO, seed: int = 0) -> SearchResult:
    """The best simulated placement on the new host that a method finds from the carried one, which is the least of it.

    Args:
        replaced: the problem and what is known.
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
    learned = chosen.run(task, **options)
    return SearchResult.of(task, learned)


def step_of(known: KnownRun, host: Host) -> OpGraph:
    """The run's step, captured again; with values where it had them, or where it may have to run.

    Raises:
        FingerprintMismatch: it is another step now.
        UserError: as `replaced`.
    """
    if known.spec.is_file:
        if not host.is_simulated:
            raise only_simulated(known.spec)
        # a file may hold a step that was cut when it was captured, and is read as it is
        graphs = (read_graph(known.spec, count) for count in dict.fromkeys((1, known.count)))
        graph = next((each for each in graphs if each.fingerprint == known.graph_fingerprint), None)
        graph = read_graph(known.spec) if graph is None else graph
    else:
        has_values = not (known.host.is_simulated and host.is_simulated)
        with nullcontext() if has_values else without_memory():
            workload = build(known.spec, seed=known.choices.built_with)
        graph = capture_workload(workload, known.count, known.asked)
    known.require_graph(graph)
    return dataclasses.replace(graph, name=str(known.spec))


def _problem_of(known: KnownRun, graph: OpGraph) -> Problem:
    """The run's problem, all ops in one group: where nothing is searched, groups do not matter."""
    whole = Grouping(np.zeros(graph.num_ops, dtype=np.int32))
    return Problem(graph, known.host, known.costs, whole, op_order=known.op_order)


def _with_learned(known: KnownRun, graph: OpGraph, say: Say) -> KnownRun:
    """The run with what its measured steps say of its host, where it stopped before it had said so."""
    if known.learned is not None or known.host.is_simulated:
        return known
    try:
        return dataclasses.replace(known, learned=fitted_host(known.folder, _problem_of(known, graph)))
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
    constraints = known.choices.constraints or Constraints()
    try:
        constraints.check_devices([device.name for device in host.devices], [device.kind for device in host.devices])
    except Exception as error:
        error.add_note("The run was pinned to it: give `--pin` and `--exclude` again for the new host, all of them.")
        raise
    return constraints
