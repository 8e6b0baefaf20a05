"""Placements without search, on problems worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from micrographs import op_graph

from rlplace.graphs import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search import eft
from rlplace.search.registry import find
from rlplace.search.rules import baselines
from rlplace.search.task import Budget


def host(num_devices: int, *, bytes_per_s: float = 1.0, blocks: bool = False) -> Host:
    names = [f"d{k}" for k in range(num_devices)]
    return Host(
        "test",
        tuple(Device(name, "k", "simulated", 1 << 30) for name in names),
        tuple(Link(f"{a}>{b}", bytes_per_s) for a in names for b in names if a != b),
        tuple(Route(a, b, (f"{a}>{b}",), blocks_destination=blocks) for a in names for b in names if a != b),
    )


def problem(reads: list[list[int]], cost_s: list[float], on: Host, **facts: object) -> Problem:
    graph = op_graph(reads, **facts)  # type: ignore[arg-type]
    costs = np.repeat(np.array(cost_s)[:, None], on.num_devices, axis=1)
    return Problem(graph, on, Costs(costs, "estimated"), Grouping(np.arange(len(reads))))


def test_blocks_cut_a_chain_where_half_the_cost_is_done() -> None:
    chain = problem([[], [0], [1], [2]], [3.0, 1.0, 1.0, 1.0], host(2))
    assert baselines.blocks(chain).tolist() == [0, 1, 1, 1]


def test_round_robin_deals_groups_in_turn() -> None:
    assert baselines.round_robin(problem([[], [], [], [], []], [1.0] * 5, host(2))).tolist() == [0, 1, 0, 1, 0]


def test_random_draws_the_same_from_the_same_seed_and_keeps_groups_together() -> None:
    five = problem([[], [], [], [], []], [1.0] * 5, host(2))
    five = Problem(five.graph, five.host, five.costs, Grouping(np.array([0, 0, 1, 1, 2])))
    first = baselines.random(five, np.random.default_rng(3), 10)
    assert np.array_equal(first, baselines.random(five, np.random.default_rng(3), 10))
    assert first.shape == (10, 5)
    assert np.array_equal(first[:, 0], first[:, 1])
    assert len(np.unique(first, axis=0)) > 1


def test_random_scores_a_batch_however_little_time_there_is() -> None:
    work = problem([[], [0]], [1.0, 1.0], host(2))
    found = find(work, "random", Simulator(work, threads=1), Budget(seconds=1e-9))
    assert found.evaluations == 64
    assert found.step_time_s == 2.0


def test_eft_spreads_what_is_independent_when_copies_are_cheap() -> None:
    fork = problem([[], [0], [0], [1, 2]], [1.0, 5.0, 5.0, 1.0], host(2, bytes_per_s=100.0))
    placed = eft(fork)
    assert placed[1] != placed[2]


@pytest.mark.parametrize("blocks", [False, True])
def test_eft_keeps_a_chain_together(blocks: bool) -> None:
    chain = problem([[], [0], [1], [2]], [1.0] * 4, host(2, blocks=blocks))
    assert len(set(eft(chain).tolist())) == 1


def test_eft_stays_together_when_copies_are_dear() -> None:
    # running both branches on one device takes 12; sending the fork's output alone takes 20
    fork = problem([[], [0], [0], [1, 2]], [1.0, 5.0, 5.0, 1.0], host(2, bytes_per_s=0.05))
    assert len(set(eft(fork).tolist())) == 1


def test_eft_takes_the_faster_device() -> None:
    on = host(2)
    lone = problem([[], []], [1.0, 1.0], on)
    costs = Costs(np.array([[4.0, 1.0], [4.0, 1.0]]), "estimated")
    # ends: first op on d1 at 1, second on d1 at 2 (d0 would be 4)
    assert eft(Problem(lone.graph, on, costs, lone.grouping)).tolist() == [1, 1]


def test_eft_respects_colocation_and_puts_sources_with_their_first_reader() -> None:
    reads = [[], [], [0, 1], [0], [2, 3]]
    placed = eft(
        problem(
            reads,
            [0.0, 0.0, 3.0, 3.0, 1.0],
            host(2, bytes_per_s=100.0),
            targets=["input", "parameter", "aten.a", "aten.b", "update.sgd"],
            colocation=[-1, 0, -1, -1, 0],
        )
    )
    assert placed[1] == placed[4] == placed[2]
    assert placed[2] != placed[3]
