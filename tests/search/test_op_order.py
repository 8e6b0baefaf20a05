"""Op orders against all orders of small problems.

Paths of a placement, worked out by hand.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from bench_problems import synthetic_problem
from hypothesis import given, settings
from hypothesis import strategies as st
from micro_batched import cut_graph, layered_step, step_problem
from micrographs import op_graph
from random_problems import BIG, plain_host, random_graph, random_problem

from rlplace.errors import InvalidValue
from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Device, Host
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.compiled_problem import upward_ranks
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.op_order import least_memory_order, placed_paths, shorten

seeds = st.integers(0, 2**32 - 1)


def on_one_device(rng: np.random.Generator, num_ops: int) -> Problem:
    graph = random_graph(rng, num_ops)
    host = Host("one", (Device("d0", "any", "simulated", BIG, memory_granularity_bytes=int(rng.choice([1, 64]))),))
    costs = Costs(rng.uniform(0.1, 1.0, (num_ops, 1)), "estimated")
    return Problem(graph, host, costs, Grouping(np.arange(num_ops)))


def test_the_lightest_order_finishes_one_branch_before_the_other() -> None:
    # two branches: a large tensor (100) each, shrunk to 1 before the join; breadth first holds both large ones
    graph = op_graph([[], [0], [0], [1], [2], [3, 4]], [1, 100, 100, 1, 1, 1])
    host = Host("one", (Device("d0", "any", "simulated", 1000),))
    problem = Problem(graph, host, Costs(np.ones((6, 1)), "estimated"), Grouping(np.arange(6)))
    devices = np.zeros(6, dtype=np.int32)
    order = least_memory_order(problem, devices).tolist()
    assert order in ([0, 1, 3, 2, 4, 5], [0, 2, 4, 1, 3, 5])
    simulator = Simulator(problem, threads=1)
    # breadth first: both large tensors and the first small one; one branch after the other: 1 + 100 + 1 and no more
    assert simulator.plan_and_time(devices)[1].peak_bytes == (201,)
    assert simulator.plan_and_time(devices, priorities(6, order))[1].peak_bytes == (102,)


@given(seed=seeds, num_ops=st.integers(1, 7))
@settings(max_examples=40, deadline=None)
def test_the_lightest_order_is_the_best_of_all_orders(seed: int, num_ops: int) -> None:
    problem = on_one_device(np.random.default_rng(seed), num_ops)
    devices = np.zeros(num_ops, dtype=np.int32)
    simulator = Simulator(problem, threads=1)
    jobs = np.flatnonzero(~problem.graph.is_source)
    least = min(
        simulator.plan_and_time(devices, priorities(num_ops, order))[1].peak_bytes[0]
        for order in itertools.islice(itertools.permutations(jobs), 800)
    )
    order = least_memory_order(problem, devices)
    assert sorted(order.tolist()) == jobs.tolist()
    found = simulator.plan_and_time(devices, priorities(num_ops, order))[1].peak_bytes[0]
    if len(jobs) <= 6:  # all 720 orders were looked at
        assert found == least
    assert found <= least


def priorities(num_ops: int, order: object) -> np.ndarray:
    keys = np.zeros(num_ops)
    for place, op in enumerate(order):  # type: ignore[arg-type, var-annotated]
        keys[op] = num_ops - place
    return keys


@given(seed=seeds, num_ops=st.integers(1, 30))
@settings(max_examples=25, deadline=None)
def test_nothing_gets_worse_on_any_host(seed: int, num_ops: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, num_ops)
    devices = rng.integers(0, problem.host.num_devices, num_ops).astype(np.int32)
    simulator = Simulator(problem, threads=1)
    shorter = shorten(problem, devices, evaluations=30, seed=1)
    assert simulator.step_times(devices[None], shorter.priorities)[0] <= simulator.step_times(devices[None])[0]


def test_a_narrow_beam_still_gives_an_order_of_all_ops() -> None:
    problem = synthetic_problem(150, 2)
    devices = np.random.default_rng(0).integers(0, 2, 150).astype(np.int32)
    wide, narrow = (least_memory_order(problem, devices, states) for states in (20, 1))
    assert sorted(wide.tolist()) == sorted(narrow.tolist()) == list(range(150))
    assert np.array_equal(wide, least_memory_order(problem, devices, 20))


@pytest.mark.parametrize("seed", range(6))
def test_the_shortest_order_is_the_best_of_all_priorities(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, 6, plain_host(2, 200.0))
    devices = rng.integers(0, 2, 6).astype(np.int32)
    simulator = Simulator(problem, threads=1)
    every = itertools.permutations(range(6))
    best_s = min(simulator.step_times(devices[None], np.array(keys, dtype=np.float64))[0] for keys in every)
    found = shorten(problem, devices, evaluations=400, seed=0)
    assert simulator.step_times(devices[None], found.priorities)[0] == pytest.approx(best_s, rel=1e-12)
    again = shorten(problem, devices, evaluations=400, seed=0)
    assert np.array_equal(found.priorities, again.priorities)


def test_it_says_what_it_gained() -> None:
    # d0 has two ops of 3 s; the second feeds 5 s on d1 after a cheap transfer, but mean costs hide that
    graph = op_graph([[], [], [1]], [1, 1, 1])
    costs = Costs(np.array([[3.0, 30.0], [3.0, 3.0], [1.0, 5.0]]), "estimated")
    problem = Problem(graph, plain_host(2, 1e6), costs, Grouping(np.arange(3)))
    devices = np.array([0, 0, 1], dtype=np.int32)
    assert upward_ranks(problem)[0] > upward_ranks(problem)[1]
    found = shorten(problem, devices, evaluations=20)
    simulator = Simulator(problem, threads=1)
    assert simulator.step_times(devices[None])[0] == pytest.approx(11.0, rel=1e-5)
    assert simulator.step_times(devices[None], found.priorities)[0] == pytest.approx(8.0, rel=1e-5)
    assert found.rule == "critical path"


def test_nonsense_is_refused() -> None:
    problem = replace(synthetic_problem(5, 2))
    with pytest.raises(InvalidValue, match="evaluations"):
        shorten(problem, np.zeros(5, dtype=np.int32), evaluations=0)
    with pytest.raises(InvalidValue, match="device"):
        shorten(problem, np.full(5, 7, dtype=np.int32))


def test_the_order_that_stays_is_named_as_the_problem_has_it() -> None:
    problem = step_problem(cut_graph(layered_step(2), 2), plain_host(2), "tilt")
    devices = np.zeros(problem.graph.num_ops, dtype=np.int32)
    assert shorten(problem, devices, evaluations=1).rule == "tilt"
    assert shorten(replace(problem, op_order="rank"), devices, evaluations=1).rule == "upward rank"


DEVICES = np.array([0, 0, 1, 0], dtype=np.int32)


def diamond(target: str = "aten.op") -> Problem:
    """Op 0 feeds 1 and 2, and 3 reads both: 20, 30 and 40 bytes at 10 bytes a second."""
    graph = op_graph([[], [0], [0], [1, 2]], [20, 30, 40, 1], targets=[target, *["aten.op"] * 3])
    costs = Costs(np.array([[1.0, 9.0], [2.0, 9.0], [9.0, 3.0], [4.0, 9.0]]), "estimated")
    return Problem(graph, plain_host(2, 10.0), costs, Grouping(np.arange(4)))


def test_paths_count_the_times_and_transfers_of_the_placement() -> None:
    op_s, before_s, after_s = placed_paths(diamond(), DEVICES)
    assert op_s.tolist() == [1.0, 2.0, 3.0, 4.0]
    # op 2 starts after 1 s and 20 bytes; op 3 after op 2 and 40 bytes
    assert before_s.tolist() == [0.0, 1.0, 3.0, 10.0]
    assert after_s.tolist() == [13.0, 4.0, 8.0, 0.0]


def test_without_transfers_only_ops_count() -> None:
    _, before_s, after_s = placed_paths(diamond(), DEVICES, transfers=False)
    assert before_s.tolist() == [0.0, 1.0, 1.0, 4.0]
    assert after_s.tolist() == [7.0, 4.0, 4.0, 0.0]


def test_sources_take_no_time() -> None:
    op_s, before_s, _ = placed_paths(diamond("parameter"), DEVICES)
    assert op_s[0] == 0.0
    assert before_s.tolist() == [0.0, 0.0, 2.0, 9.0]
