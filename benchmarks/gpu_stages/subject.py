"""What the stages run: a small training step on a host, with placements drawn at random."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs import OpGraph
from rlplace.measure import Costs, Host, Plan, Problem, Simulator, resolve_host
from rlplace.measure.execute.device_threads import Crew
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.residents import Residents
from rlplace.session.prepare import capture_workload
from rlplace.workloads import build

SMALL = "nmt@layers=1,units=32,batch=8,steps=4,vocab=100"


@dataclass(frozen=True)
class Subject:
    """A problem with a planner."""

    problem: Problem
    simulator: Simulator

    @property
    def graph(self) -> OpGraph:
        return self.problem.graph

    @property
    def host(self) -> Host:
        return self.problem.host

    def plan_on(self, device: int) -> Plan:
        """Everything on one device."""
        return self.simulator.plan(np.full(self.graph.num_ops, device, dtype=np.int32))

    def draw_plans(self, count: int, *, seed: int = 0) -> list[Plan]:
        """Plans of groups placed at random."""
        groups = self.problem.draw_groups(np.random.default_rng(seed), count)
        return [self.simulator.plan(self.problem.grouping.expand(row)) for row in groups]

    def plan_of(self, devices: NDArray[np.int32]) -> Plan:
        """The plan of a placement of ops."""
        return self.simulator.plan(self.problem.check_placement(devices))

    @contextmanager
    def loaded(self, plan: Plan, crew: Crew | None = None) -> Iterator[PlacedStep]:
        """The plan as a step; threads of its own end with it."""
        used = Crew(self.host.devices) if crew is None else crew
        try:
            yield PlacedStep(self.graph, self.host, plan, Residents(self.graph, self.host), used)
        finally:
            if crew is None:
                used.stop()


def subject(host: str | Host, workload: str = SMALL, graph: OpGraph | None = None) -> Subject:
    """The step of a workload, or of a graph with a program, on a host; every op counts as equally dear."""
    host = resolve_host(host)
    graph = capture_workload(build(workload)) if graph is None else graph
    costs = Costs(np.where(graph.is_source[:, None], 0.0, np.full((graph.num_ops, host.num_devices), 1e-5)), "given")
    problem = Problem.grouped(graph, host, costs, 32)
    return Subject(problem, Simulator(problem))
