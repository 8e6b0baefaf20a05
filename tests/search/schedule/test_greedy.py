"""Every feature of the scheduler, by hand: with its weight alone, it decides as its description says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from micrographs import op_graph
from random_problems import plain_host, random_problem
from search_problems import barred, chain_problem, tight_problem

from rlplace.graphs import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Route
from rlplace.measure.problem import Problem
from rlplace.search.schedule.partial_schedule import FEATURES, Greedy


def problem(
    reads: list[list[int]], cost_s: list[list[float]], output_bytes: list[int] | int = 1, **facts: object
) -> Problem:
    graph = op_graph(reads, output_bytes, **facts)  # type: ignore[arg-type]
    costs = Costs(np.array(cost_s), "estimated")
    return Problem(graph, plain_host(len(cost_s[0])), costs, Grouping(np.arange(len(reads))))


def place(on: Problem, **weights: float) -> list[int]:
    row = np.array([weights.get(name, 0.0) for name in FEATURES])
    return Greedy.of(on).place(row)[0].tolist()


def test_finish_takes_the_device_where_the_first_op_ends_first() -> None:
    # two lone ops: the second ends at 2 on the free device, at 4 behind the first
    assert place(problem([[], []], [[2.0, 2.0], [2.0, 2.0]]), finish=1.0) == [0, 1]
    # a copy of 300 bytes takes 3 seconds: the reader stays
    assert place(problem([[], [0]], [[1.0, 1.0], [2.0, 1.5]], 300), finish=1.0) == [0, 0]
    # and goes where it runs 4 seconds faster
    assert place(problem([[], [0]], [[1.0, 2.0], [6.0, 2.0]], 300), finish=1.0) == [0, 1]


def test_cost_takes_the_faster_device() -> None:
    assert place(problem([[], [0]], [[1.0, 2.0], [2.0, 1.0]], 10_000), cost=1.0) == [0, 1]


def test_load_takes_the_device_with_least_to_do() -> None:
    # ranks: the chain's head first; then 1 and 2 in turn
    assert place(chain_problem(4, 2), load=1.0) == [0, 1, 0, 1]


def test_cut_in_follows_what_is_read_and_cut_out_what_reads() -> None:
    # 2 reads 300 bytes of 0 and 100 of 1; load alone puts 0 and 1 apart
    join = problem([[], [], [0, 1]], [[1.0, 1.0]] * 3, [300, 100, 1])
    assert place(join, load=0.1, cut_in=10.0) == [0, 1, 0]
    join = problem([[], [], [0, 1]], [[1.0, 1.0]] * 3, [100, 300, 1])
    placed = place(join, load=0.1, cut_in=10.0)
    assert placed[2] == placed[1] != placed[0]
    # group 0 holds op 0; group 1 holds ops 1 and 3, group 2 op 2. Group 1 reads 0; 2 reads 0 and is read by 3
    fork = op_graph([[], [0], [0], [2]], [1, 1, 500, 1])
    costs = Costs(np.array([[3.0, 3.0], [5.0, 5.0], [1.0, 1.0], [1.0, 1.0]]), "estimated")
    fork_problem = Problem(fork, plain_host(2), costs, Grouping(np.array([0, 1, 2, 1])))
    placed = place(fork_problem, load=0.1, cut_out=10.0)
    assert placed[2] == placed[1]


def test_memory_fills_the_emptiest_device() -> None:
    tight = tight_problem(2, 2)
    assert sorted(place(tight, memory=1.0)) == [0, 1]


def test_twin_and_module_follow_the_module_in_its_other_and_its_own_phase() -> None:
    graph = op_graph([[], [0], [1], [2]], phases=[0, 0, 1, 1])
    costs = Costs(np.ones((4, 2)), "estimated")
    twins = Problem(replace(graph, modules=("a", "b", "b", "a")), plain_host(2), costs, Grouping(np.arange(4)))
    assert place(twins, load=1e-3, twin=1.0) == [0, 1, 1, 0]
    alike = Problem(
        replace(graph, modules=("a", "b", "b", "a"), phases=np.zeros(4)), plain_host(2), costs, twins.grouping
    )
    assert place(alike, load=1e-3, module=1.0) == [0, 1, 1, 0]


def test_order_stays_where_the_group_before_went() -> None:
    assert place(chain_problem(4, 2), load=0.1, order=10.0) == [0, 0, 0, 0]


def test_sources_that_nobody_reads_are_placed_too() -> None:
    lone = problem([[], []], [[1.0, 1.0], [0.0, 0.0]], targets=["aten.op", "input"])
    assert place(lone, load=1.0) == [0, 1]


def test_gangs_load_their_members() -> None:
    host = plain_host(2)
    gang = replace(host.devices[0], name="gang", members=("d0", "d1"))
    routes = [Route(*ends, ()) for name in ("d0", "d1") for ends in (("gang", name), (name, "gang"))]
    both = replace(host, devices=(*host.devices, gang), routes=(*host.routes, *routes))
    graph = op_graph([[], [0], [1]])
    costs = Costs(np.array([[4.0, 4.0, 1.0], [1.0, 1.0, 9.0], [1.0, 1.0, 9.0]]), "estimated")
    on = Problem(graph, both, costs, Grouping(np.arange(3)))
    assert place(on, load=1.0) == [2, 0, 1]


@settings(deadline=None)
@given(st.integers(0, 100_000))
def test_placements_keep_to_allowed_devices_and_are_the_same_again(seed: int) -> None:
    rng = np.random.default_rng(seed)
    on = random_problem(rng, 10)
    num_devices = on.host.num_devices
    on = barred(on, {int(op): (int(rng.integers(num_devices)),) for op in rng.integers(0, 10, 3)})
    weights = rng.normal(size=(4, len(FEATURES)))
    placed = Greedy.of(on).place(weights)
    assert np.array_equal(placed, Greedy.of(on).place(weights))
    assert on.group_allowed[np.arange(10), placed].all()


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_weights_mean_the_same_on_a_problem_of_another_speed(scale: float) -> None:
    rng = np.random.default_rng(3)
    on = random_problem(rng, 40, plain_host(3))
    host = plain_host(3, 100.0 / scale)
    scaled = Problem(on.graph, host, Costs(on.costs.op_time_s * scale, "estimated"), on.grouping)
    weights = rng.normal(size=(20, len(FEATURES)))
    assert (Greedy.of(on).place(weights) == Greedy.of(scaled).place(weights)).mean() > 0.95
