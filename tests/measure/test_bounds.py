"""Lower bounds, by hand and against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from micrographs import op_graph

from rlplace.graphs import Grouping
from rlplace.measure.bounds import critical_path_s, lower_bound_s, total_work_s
from rlplace.measure.costs import Costs
from rlplace.measure.host import Device, Host, Link, Route
from rlplace.measure.problem import Problem
from rlplace.measure.simulator import Simulator


def problem(reads: list[list[int]], costs: list[list[float]], gang: bool = False) -> Problem:
    devices = [Device("d0", "k", "simulated", 1 << 30), Device("d1", "k", "simulated", 1 << 30)]
    if gang:
        devices.append(Device("d0-1", "gang", "simulated", 1 << 30, members=("d0", "d1")))
    names = [device.name for device in devices]
    links = tuple(Link(f"{a}>{b}", 1e9) for a in names for b in names if a != b)
    routes = tuple(Route(a, b, (f"{a}>{b}",)) for a in names for b in names if a != b)
    graph = op_graph(reads)
    return Problem(graph, Host("h", tuple(devices), links, routes), Costs(np.array(costs), "estimated"),
                   Grouping(np.arange(len(reads))))  # fmt: skip


def test_a_chain_is_bounded_by_its_path_and_a_fan_by_its_work() -> None:
    chain = problem([[], [0], [1]], [[1.0, 2.0], [4.0, 3.0], [1.0, 1.0]])
    assert critical_path_s(chain) == 5.0  # 1 + 3 + 1
    assert lower_bound_s(chain) == (5.0, "critical path")
    fan = problem([[], [], [], []], [[2.0, 2.0]] * 4)
    assert total_work_s(fan) == 4.0
    assert lower_bound_s(fan) == (4.0, "total work")


def test_work_on_a_gang_keeps_all_members_busy() -> None:
    # 2 s on one device, or 1.5 s on both: alone it is less work (2 against 3)
    assert total_work_s(problem([[]], [[2.0, 2.0, 1.5]], gang=True)) == 1.0
    assert total_work_s(problem([[]], [[2.0, 2.0, 0.5]], gang=True)) == 0.5


@pytest.mark.parametrize("seed", range(10))
def test_no_placement_beats_the_bound(seed: int) -> None:
    generator = np.random.default_rng(seed)
    reads = [sorted({int(r) for r in generator.integers(0, i, 2)}) if i else [] for i in range(6)]
    drawn = problem(reads, generator.uniform(0.1, 2.0, (6, 2)).tolist())
    every = np.array(list(itertools.product(range(2), repeat=6)), dtype=np.int32)
    best_s = Simulator(drawn, threads=1).step_times(every).min()
    assert lower_bound_s(drawn)[0] <= best_s * (1 + 1e-12)
