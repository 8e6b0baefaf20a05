"""Problems whose host can be learned from step times, plans that tell a lot, and what they take under given factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from micrographs import op_graph
from numpy.typing import NDArray
from random_problems import plain_host

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Host, Link, Route
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.simulate.simulator import Simulator

TYPES = ("aten.mm", "aten.add", "aten.norm", "aten.conv")


def paired_host(num_devices: int) -> Host:
    """A link of its own for every pair of devices, each with other figures: `d0>d1` from the first to the second."""
    pairs = [(i, j) for i in range(num_devices) for j in range(num_devices) if i != j]
    links = tuple(Link(f"d{i}>d{j}", 100.0 * (1 + 0.3 * k), 0.05 * (1 + 0.2 * k)) for k, (i, j) in enumerate(pairs))
    routes = tuple(Route(f"d{i}", f"d{j}", (f"d{i}>d{j}",)) for i, j in pairs)
    return replace(plain_host(num_devices), links=links, routes=routes)


def learnable_problem(host: Host, num_ops: int = 24, seed: int = 0) -> Problem:
    """Ops of four types that take about a second on every device, and copies that take as long."""
    generator = np.random.default_rng(seed)
    reads = [[], *(sorted(set(generator.integers(max(0, i - 4), i, 2).tolist())) for i in range(1, num_ops))]
    graph = op_graph(
        reads, generator.integers(20, 120, num_ops).tolist(), targets=[TYPES[i % 4] for i in range(num_ops)]
    )
    costs = np.repeat(generator.uniform(0.5, 2.0, (num_ops, 1)), host.num_devices, axis=1)
    return Problem(graph, host, Costs(costs, "estimated"), Grouping(np.arange(num_ops)))


def on_cores(problem: Problem) -> Problem:
    """The problem as if it had been profiled on cores."""
    devices = tuple(replace(device, backend="cpu") for device in problem.host.devices)
    host = replace(problem.host, devices=devices)
    return replace(problem, host=host, costs=replace(problem.costs, source="profiled"))


def varied_plans(problem: Problem, generator: np.random.Generator, count: int) -> list[Plan]:
    """A third of them one run of ops on each device, the others any op anywhere."""
    n, num_devices = problem.graph.num_ops, problem.host.num_devices
    simulator, plans = Simulator(problem, threads=1), []
    for place in range(count):
        devices = generator.integers(0, num_devices, n)
        if place % 3 == 0:
            cuts = np.sort(generator.integers(0, n + 1, num_devices - 1))
            devices = generator.permutation(num_devices)[np.searchsorted(cuts, np.arange(n), side="right")]
        plans.append(simulator.plan(devices.astype(np.int32)))
    return plans


def step_times(problem: Problem, plans: Sequence[Plan]) -> NDArray[np.float64]:
    """(B,) seconds of exactly these plans."""
    simulator = Simulator(problem, threads=1)
    return np.array([outcome.step_time_s for outcome in simulator.retime_batch(simulator.check_plans(plans))])
