"""Splits by module names, on paths as real models have them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from micrographs import op_graph
from random_problems import plain_host

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.rules.baselines import find_blocks, halves, layers, numbered, solve_expert
from rlplace.search.task import Task


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
