"""Placements without search, on problems worked out by hand.

Splits by module names, on paths as real models have them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from micrographs import op_graph
from random_problems import plain_host

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search import eft
from rlplace.search.methods import find
from rlplace.search.rules import baselines
from rlplace.search.rules.baselines import find_blocks, halves, layers, numbered, solve_expert
from rlplace.search.task import Budget, Task


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


def chain(modules: list[str], *, num_devices: int = 2, costs: list[float] | None = None) -> Problem:
    """Ops one after the other, one for each module path."""
    count = len(modules)
    graph = replace(op_graph([[k - 1] if k else [] for k in range(count)]), modules=tuple(modules))
    table = np.repeat(np.array(costs or [1.0] * count)[:, None], num_devices, axis=1)
    return Problem(graph, plain_host(num_devices, 1e9), Costs(table, "estimated"), Grouping(np.arange(count)))


NMT = [
    "encoder.embedding", "encoder.layers.0.gates", "encoder.layers.0", "encoder.layers.1.gates", "encoder",
    "decoder.embedding", "decoder.layers.0", "decoder.layers.1", "decoder.attention.keys", "projection", "",
]  # fmt: skip


def test_blocks_are_numbered_layers_and_what_stands_beside_them() -> None:
    split = find_blocks(chain(NMT))
    assert split.paths == (
        "encoder.embedding",
        "encoder.layers.0",
        "encoder.layers.1",
        "decoder.embedding",
        "decoder.layers.0",
        "decoder.layers.1",
        "decoder.attention",
        "projection",
    )
    # the encoder's own op follows the layer that it reads, the loss the projection
    assert split.op_block.tolist() == [0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 7]
    assert split.cost_s.tolist() == [1.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 2.0]


def test_layer_k_of_every_stack_shares_a_device() -> None:
    split = find_blocks(chain(NMT))
    assert numbered(split, 2).tolist() == [0, 0, 1, 1, 0, 1, 1, 1]
    deep = find_blocks(chain(["embed", *(f"h.{k}" for k in range(6)), "head"]))
    assert numbered(deep, 2).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_runs_of_layers_have_equal_cost() -> None:
    split = find_blocks(chain(["embed", "h.0", "h.1", "h.2", "head"], costs=[1.0, 2.0, 2.0, 2.0, 3.0]))
    assert layers(split, 2).tolist() == [0, 0, 0, 1, 1]


def test_encoder_and_decoder_take_half_of_the_devices_each() -> None:
    split = find_blocks(chain(NMT))
    assert halves(split, 2).tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert halves(split, 4).tolist() == [0, 0, 1, 2, 2, 2, 3, 3]


def test_two_towers_take_half_of_the_devices_each() -> None:
    towers = chain(["text.encoder.0", "text.encoder.1", "vision.encoder.0", "vision.encoder.1", "joint"])
    assert halves(find_blocks(towers), 2).tolist() == [0, 0, 1, 1, 1]


def test_ops_without_any_names_are_one_block() -> None:
    split = find_blocks(chain(["", "", ""]))
    assert split.paths == ("",)
    assert layers(split, 2).tolist() == numbered(split, 2).tolist() == halves(split, 2).tolist()


def test_towers_run_side_by_side_and_parameters_go_with_their_classes() -> None:
    modules = ["text.0", "vision.0", "text.0", "vision.0", "text.1", "vision.1"]
    graph = op_graph(
        [[], [], [0], [1], [2], [3]],
        targets=["parameter", "parameter", *["aten.op"] * 4],
        colocation=[0, 1, 0, 1, -1, -1],
    )
    graph = replace(graph, modules=tuple(modules))
    costs = Costs(np.repeat([[0.0], [0.0], [3.0], [3.0], [2.0], [2.0]], 2, axis=1), "estimated")
    problem = Problem(graph, plain_host(2, 1e9), costs, Grouping(np.array([0, 1, 0, 1, 2, 3])))
    task = Task(problem, Simulator(problem, threads=1))
    solve_expert(task)
    assert task.best_s == 5.0
    assert task.best_devices is not None
    assert task.best_devices.tolist() == [0, 1, 0, 1, 0, 1]
    allowed = np.ones((6, 2), dtype=np.bool_)
    allowed[2, 0] = False
    pinned = replace(problem, allowed=allowed)
    task = Task(pinned, Simulator(pinned, threads=1))
    solve_expert(task)
    assert task.best_devices is not None
    assert task.best_devices[[0, 2]].tolist() == [1, 1]
