"""List schedulers: the papers' own examples, hand-worked cases, and what must hold on any problem."""

from __future__ import annotations

import importlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from micrographs import op_graph
from random_problems import BIG, plain_host, random_problem

from rlplace.graphs.grouping.groups import Grouping, group_ops
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.methods import METHODS
from rlplace.search.schedule.list_schedule import HostResources, group_units, host_resources, op_units
from rlplace.search.schedule.list_schedulers import (
    critical_path,
    eft,
    heft,
    m_etf,
    m_topo,
    mean_transfer_s,
    optimistic_cost_s,
    peft,
)
from rlplace.search.task import Task

SCHEDULERS = ("eft", "heft", "peft", "critical-path", "m-topo", "m-etf", "m-sct")


def pairwise_host(num_devices: int, *, memory_bytes: int = BIG, blocks: bool = False) -> Host:
    """A link for every ordered pair, one byte a second."""
    names = [f"d{k}" for k in range(num_devices)]
    pairs = [(a, b) for a in names for b in names if a != b]
    return Host(
        "pairs",
        tuple(Device(name, "k", "simulated", memory_bytes) for name in names),
        tuple(Link(f"{a}>{b}", 1.0) for a, b in pairs),
        tuple(Route(a, b, (f"{a}>{b}",), blocks, blocks) for a, b in pairs),
    )


def weighted_dag(edges: list[tuple[int, int, int]], costs: list[list[int]]) -> Problem:
    """Tasks from 1 on, a tensor for every edge (from, to, bytes), as papers on scheduling draw them."""
    edges = sorted(edges)
    count = len(costs)
    reads = [[t for t, (_, reader, _) in enumerate(edges) if reader == i + 1] for i in range(count)]
    graph = replace(
        op_graph([[] for _ in range(count)]),
        tensor_op=np.array([edge[0] - 1 for edge in edges]),
        tensor_output=np.zeros(len(edges)),
        tensor_bytes=np.array([edge[2] for edge in edges]),
        tensor_shapes=((1,),) * len(edges),
        tensor_dtypes=("uint8",) * len(edges),
        input_offsets=np.cumsum([0, *map(len, reads)]),
        input_tensors=np.array([t for read in reads for t in read]),
    )
    table = Costs(np.array(costs, dtype=np.float64), "estimated")
    return Problem(graph, pairwise_host(table.op_time_s.shape[1]), table, Grouping(np.arange(count)))


def without_contention(problem: Problem) -> HostResources:
    """Transfers that hold nothing, as the papers have it."""
    resources = host_resources(problem)
    return resources.replace(route_offsets=np.zeros_like(resources.route_offsets))


def topcuoglu() -> Problem:
    """Figure 2 and table 1 of Topcuoglu, Hariri, Wu 2002."""
    edges = [
        (1, 2, 18),
        (1, 3, 12),
        (1, 4, 9),
        (1, 5, 11),
        (1, 6, 14),
        (2, 8, 19),
        (2, 9, 16),
        (3, 7, 23),
        (4, 8, 27),
        (4, 9, 23),
        (5, 9, 13),
        (6, 8, 15),
        (7, 10, 17),
        (8, 10, 11),
        (9, 10, 13),
    ]
    costs = [
        [14, 16, 9],
        [13, 19, 18],
        [11, 13, 19],
        [13, 8, 17],
        [12, 13, 10],
        [13, 16, 9],
        [7, 15, 11],
        [5, 11, 14],
        [18, 12, 20],
        [21, 7, 16],
    ]
    return weighted_dag(edges, costs)


def arabnejad() -> Problem:
    """Figure 1 of Arabnejad and Barbosa 2014."""
    edges = [
        (1, 2, 17),
        (1, 3, 31),
        (1, 4, 29),
        (1, 5, 13),
        (1, 6, 7),
        (2, 8, 3),
        (2, 9, 30),
        (3, 7, 16),
        (4, 8, 11),
        (4, 9, 7),
        (5, 9, 57),
        (6, 8, 5),
        (7, 10, 9),
        (8, 10, 42),
        (9, 10, 7),
    ]
    costs = [
        [22, 21, 36],
        [22, 18, 18],
        [32, 27, 43],
        [7, 10, 4],
        [29, 27, 35],
        [26, 17, 24],
        [14, 25, 30],
        [29, 23, 36],
        [15, 21, 8],
        [13, 16, 33],
    ]
    return weighted_dag(edges, costs)


def test_heft_and_cpop_give_the_makespans_of_their_paper() -> None:
    problem = topcuoglu()
    units, resources = op_units(problem), without_contention(problem)
    assert heft(units, resources)[1] == 80.0
    assert critical_path(units, resources)[1] == 86.0


def test_peft_gives_the_table_and_makespan_of_its_paper() -> None:
    problem = arabnejad()
    units, resources = op_units(problem), without_contention(problem)
    table = optimistic_cost_s(units, mean_transfer_s(units, resources))
    assert table[:3].tolist() == [[64.0, 68.0, 86.0], [42.0, 39.0, 42.0], [27.0, 41.0, 43.0]]
    assert table[9].tolist() == [0.0, 0.0, 0.0]
    assert peft(units, resources)[1] == 122.0
    assert heft(units, resources)[1] == 133.0


def test_transfers_on_one_link_wait_for_each_other() -> None:
    # two sources of work on d0 (1 s each), both read on d1 only: 4-byte tensors over one link of 1 byte/s
    graph = op_graph([[], [], [0, 1]], 4)
    costs = Costs(np.array([[1.0, 99.0], [1.0, 99.0], [99.0, 1.0]]), "estimated")
    problem = Problem(graph, pairwise_host(2), costs, Grouping(np.arange(3)))
    assert heft(op_units(problem), without_contention(problem))[1] == 7.0  # 2 + 4, then 1
    devices, makespan_s = heft(op_units(problem), host_resources(problem))
    assert devices.tolist() == [0, 0, 1]
    assert makespan_s == 10.0  # 1 + 4 + 4, then 1
    assert Simulator(problem, threads=1).step_times(devices[None])[0] == 10.0


def test_a_copy_that_blocks_its_devices_holds_them() -> None:
    # d0 makes a (1 s), b needs it on d1, and c (independent) takes 2 s on d0
    graph = op_graph([[], [0], []], 4)
    costs = Costs(np.array([[1.0, 99.0], [99.0, 1.0], [2.0, 97.0]]), "estimated")
    for blocks, expected_s in ((False, 6.0), (True, 7.0)):
        problem = Problem(graph, pairwise_host(2, blocks=blocks), costs, Grouping(np.arange(3)))
        devices, makespan_s = heft(op_units(problem), host_resources(problem))
        assert devices.tolist() == [0, 1, 0]
        # not blocked: 1 + 4 + 1; blocked: the copy takes d0 from 1 to 5, and c runs from 5 to 7
        assert makespan_s == expected_s


def test_insertion_fills_a_gap_on_a_device() -> None:
    # a (d0) -> b (d1) -> c (d0): d0 idles from 1 to 5, where d (3 s, lowest rank) fits in
    graph = op_graph([[], [0], [1], []], 1)
    costs = Costs(np.array([[1.0, 99.0], [99.0, 2.0], [5.0, 99.0], [3.0, 99.0]]), "estimated")
    problem = Problem(graph, pairwise_host(2), costs, Grouping(np.arange(4)))
    assert heft(op_units(problem), host_resources(problem))[1] == 10.0  # 1 + 1 + 2 + 1 + 5


def test_m_topo_fills_devices_to_an_even_share_of_memory() -> None:
    reads = [[]] * 6 + [[k] for k in range(6)]
    graph = op_graph(reads, 4, targets=["parameter"] * 6 + ["aten.op"] * 6)
    problem = Problem(graph, pairwise_host(2), Costs(np.ones((12, 2)), "estimated"), Grouping(np.arange(12)))
    # share: 24 / 2 + 4 = 16 bytes: four parameters on the first device, two on the second, each with its reader
    assert m_topo(op_units(problem), host_resources(problem)).tolist() == [0, 0, 0, 0, 1, 1] * 2


def test_etf_starts_first_what_can_start_first() -> None:
    # two independent chains; copies are dear: each chain stays where it began
    graph = op_graph([[], [], [0], [1]], 100)
    problem = Problem(graph, pairwise_host(2), Costs(np.ones((4, 2)), "estimated"), Grouping(np.arange(4)))
    devices = m_etf(op_units(problem), host_resources(problem))
    assert devices[0] == devices[2] != devices[1] == devices[3]


def test_groups_that_read_each_other_become_a_dag_with_all_their_bytes() -> None:
    graph = op_graph([[], [0], [1], [2]], [3, 5, 7, 1])
    problem = Problem(graph, pairwise_host(2), Costs(np.ones((4, 2)), "estimated"), Grouping(np.array([0, 1, 0, 1])))
    units = group_units(problem)
    assert units.time_s.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert units.tensor_unit.tolist() == [0, 0, 0]
    assert sorted(units.tensor_bytes.tolist()) == [3.0, 5.0, 7.0]
    assert units.input_tensors.tolist() == [0, 1, 2]
    assert units.input_offsets.tolist() == [0, 0, 3]


def restricted(rng: np.random.Generator, num_ops: int) -> Problem:
    """A random problem with co-location classes, groups and ops that may not run everywhere."""
    problem = random_problem(rng, num_ops)
    classes = np.where(rng.random(num_ops) < 0.3, rng.integers(0, max(num_ops // 4, 1), num_ops), -1)
    graph = replace(problem.graph, colocation=classes.astype(np.int32))
    grouping = group_ops(graph, problem.costs.op_time_s.mean(axis=1), max(1, num_ops // 2))
    rows = rng.random((grouping.num_groups, problem.host.num_devices)) < 0.6
    rows[np.arange(len(rows)), rng.integers(0, problem.host.num_devices, len(rows))] = True
    return Problem(graph, problem.host, problem.costs, grouping, allowed=rows[grouping.op_group])


@pytest.mark.slow
@given(seed=st.integers(0, 2**32 - 1), num_ops=st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_every_scheduler_keeps_the_rules_and_gives_the_same_twice(seed: int, num_ops: int) -> None:
    problem = restricted(np.random.default_rng(seed), num_ops)
    simulator = Simulator(problem, threads=1)
    for name in SCHEDULERS:
        first, second = Task(problem, simulator), Task(problem, simulator)
        METHODS[name].run(first)  # a placement against co-location or `allowed` is refused by the simulator
        METHODS[name].run(second)
        assert 1 <= first.evaluations <= 8
        assert first.best_s == second.best_s
        if first.best_devices is not None:
            assert np.array_equal(first.best_devices, second.best_devices)
            assert simulator.step_times(first.best_devices[None])[0] == first.best_s < np.inf


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name != "eft"])
def test_memory_spreads_what_does_not_fit_one_device(name: str) -> None:
    # a chain over four parameters of 10 bytes, devices of 25: time says one device, memory says two each
    targets = ["parameter"] * 4 + ["aten.op"] * 4
    graph = op_graph([[]] * 4 + [[0], [1, 4], [2, 5], [3, 6]], [10] * 4 + [1] * 4, targets=targets)
    host = pairwise_host(2, memory_bytes=25)
    problem = Problem(graph, host, Costs(np.ones((8, 2)), "estimated"), Grouping(np.arange(8)))
    task = Task(problem, Simulator(problem, threads=1))
    METHODS[name].run(task)
    assert task.best_s < np.inf
    assert task.best_devices is not None
    assert set(task.best_devices.tolist()) == {0, 1}


def test_eft_goes_only_where_ops_may() -> None:
    graph = op_graph([[], [0], [1]], targets=["parameter", "aten.op", "aten.op"])
    allowed = np.array([[False, True], [True, True], [True, False]])
    costs = Costs(np.array([[0.0, 0.0], [1.0, 2.0], [9.0, 1.0]]), "estimated")
    problem = Problem(graph, plain_host(2, 1e9), costs, Grouping(np.arange(3)), allowed=allowed)
    assert eft(problem).tolist() == [1, 0, 0]


def test_every_home_in_the_table_of_methods_is_a_function() -> None:
    for name in SCHEDULERS:
        home = METHODS[name].home
        assert isinstance(home, str)
        module, _, function = home.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
