"""Small problems that searches are checked on, and brute force over their placements."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
from micrographs import op_graph
from random_problems import plain_host

from rlplace.graphs import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator

FORK = [[], [0], [0], [0], [1, 2], [2, 3]]


def fork_problem(seed: int, num_devices: int = 2) -> Problem:
    """Six ops of random costs and bytes, each its own group."""
    generator = np.random.default_rng(seed)
    graph = op_graph(FORK, generator.integers(1, 300, len(FORK)).tolist())
    costs = Costs(generator.uniform(0.5, 3.0, (len(FORK), num_devices)), "estimated")
    return Problem(graph, plain_host(num_devices), costs, Grouping(np.arange(len(FORK))))


def chain_problem(num_ops: int, num_devices: int, **facts: object) -> Problem:
    """A chain of ops of one second and one byte, each its own group."""
    graph = op_graph([[], *([i] for i in range(num_ops - 1))], **facts)  # type: ignore[arg-type]
    costs = Costs(np.ones((num_ops, num_devices)), "estimated")
    return Problem(graph, plain_host(num_devices), costs, Grouping(np.arange(num_ops)))


def tight_problem(num_groups: int, num_devices: int, seed: int = 0) -> Problem:
    """Parameters, each with an op that reads it, of which a device holds little more than an even share."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(50, 150, num_groups).tolist()
    graph = op_graph(
        [*([] for _ in range(num_groups)), *([i] for i in range(num_groups))],
        [*sizes, *([1] * num_groups)],
        targets=[*(["parameter"] * num_groups), *(["aten.op"] * num_groups)],
    )
    host = plain_host(num_devices)
    room = int(1.15 * sum(sizes) / num_devices) + num_groups
    host = replace(host, devices=tuple(replace(device, memory_bytes=room) for device in host.devices))
    costs = Costs(generator.uniform(0.5, 3.0, (2 * num_groups, num_devices)), "estimated")
    return Problem(graph, host, costs, Grouping(np.tile(np.arange(num_groups), 2)))


def barred(problem: Problem, op_devices: dict[int, tuple[int, ...]]) -> Problem:
    """`problem` with some ops allowed on some devices only."""
    allowed = np.ones((problem.graph.num_ops, problem.host.num_devices), dtype=np.bool_)
    for op, devices in op_devices.items():
        allowed[op] = False
        allowed[op, list(devices)] = True
    return Problem(problem.graph, problem.host, problem.costs, problem.grouping, allowed)


def brute_force_s(problem: Problem) -> float:
    """The best step time over all placements of ops that the problem allows; infinite if none is feasible."""
    choices = problem.group_allowed
    rows = itertools.product(*(np.flatnonzero(row).tolist() for row in choices))
    every = problem.grouping.expand(np.array(list(rows), dtype=np.int32))
    return float(Simulator(problem, threads=1).step_times(every).min())


class Counting:
    """A timer that counts what it is asked, over the simulator's times; it gives up what a cutoff lets it."""

    def __init__(self, problem: Problem) -> None:
        self.simulator = Simulator(problem, threads=1)
        self.count = 0

    def step_times(self, placements: np.ndarray) -> np.ndarray:
        self.count += len(placements)
        return self.simulator.step_times(placements)

    def step_times_within(self, placements: np.ndarray, cutoff_s: np.ndarray) -> np.ndarray:
        self.count += len(placements)
        return self.simulator.step_times_within(placements, cutoff_s)


class ToTheEnd:
    """A timer that knows no cutoffs: the simulator as searches saw it without them."""

    def __init__(self, problem: Problem) -> None:
        self.simulator = Simulator(problem, threads=1)

    def step_times(self, placements: np.ndarray) -> np.ndarray:
        return self.simulator.step_times(placements)
