"""Layouts of hand-made steps: stages, replicas, owners, orders of devices, pins."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from micro_batched import cut_graph, layered_step, step_problem
from random_problems import plain_host

from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.search.parallel.layouts import Chain, Layout, deal, layouts, placement_of, shapes
from rlplace.search.parallel.step_roles import step_roles


def problem_of(num_layers: int, count: int, num_devices: int, **facts: int) -> Problem:
    return step_problem(cut_graph(layered_step(num_layers, **facts), count), plain_host(num_devices))


def named(graph: OpGraph, devices: np.ndarray) -> dict[str, int]:
    return dict(zip(graph.names, devices.tolist(), strict=True))


def layout_of(problem: Problem, devices: list[list[int]], **changes: object) -> Layout:
    chain = Chain.of(problem, step_roles(problem.graph))
    return dataclasses.replace(chain.layout(np.array(devices, dtype=np.int32)), **changes)


def test_shapes_use_all_devices_first() -> None:
    assert shapes(4, 8) == [(1, 4), (2, 2), (4, 1), (1, 3), (3, 1), (1, 2), (2, 1)]
    assert shapes(4, 2) == [(2, 2), (4, 1), (3, 1), (1, 2), (2, 1)]
    assert shapes(1, 4) == [(1, 1)]


def test_micro_batches_are_dealt_in_blocks_by_speed() -> None:
    assert deal(8, np.ones(4)).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert deal(8, np.array([1.0, 3.0])).tolist() == [0] * 6 + [1] * 2
    assert deal(2, np.array([1.0, 9.0])).tolist() == [0, 1]


def test_data_parallelism_puts_a_micro_batch_with_its_gradients_on_one_device() -> None:
    problem = problem_of(3, 4, 2)
    graph = problem.graph
    devices = placement_of(problem, layout_of(problem, [[0, 1]]))
    own = (graph.micro_batch >= 0) & (graph.colocation < 0)
    assert np.array_equal(devices[own], graph.micro_batch[own] // 2)


def test_owners_are_spread_or_with_the_first_replica() -> None:
    problem = problem_of(4, 4, 2)
    at = named(problem.graph, placement_of(problem, layout_of(problem, [[0, 1]])))
    assert sorted(at[f"op{layer}"] for layer in range(4)) == [0, 0, 1, 1]
    first = named(problem.graph, placement_of(problem, layout_of(problem, [[0, 1]], owners="with-stage")))
    assert [first[f"op{layer}"] for layer in range(4)] == [0, 0, 0, 0]


def test_a_pipeline_has_layers_of_all_micro_batches_on_one_device() -> None:
    problem = problem_of(4, 2, 2)
    at = named(problem.graph, placement_of(problem, layout_of(problem, [[0], [1]])))
    for k in (0, 1):
        assert [at[f"op{op}/{k}"] for op in (5, 6, 7, 8, 9)] == [0, 0, 1, 1, 1]
        assert [at[f"op{op}/{k}"] for op in range(10, 18)] == [1, 1, 1, 1, 0, 0, 0, 0]
    assert [at[f"op{layer}"] for layer in range(4)] == [0, 0, 1, 1]


def test_both_orders_of_devices_are_tried() -> None:
    problem = problem_of(4, 4, 4)
    found = {
        tuple(map(tuple, layout.devices.tolist())) for layout in layouts(problem) if layout.devices.shape == (2, 2)
    }
    assert found == {((0, 1), (2, 3)), ((0, 2), (1, 3))}


def test_faster_devices_get_more_of_the_work() -> None:
    problem = problem_of(6, 4, 2)
    time_s = problem.costs.op_time_s * np.array([1.0, 3.0])
    problem = dataclasses.replace(problem, costs=Costs(time_s, "estimated"))
    replicas = placement_of(problem, layout_of(problem, [[0, 1]]))
    own = (problem.graph.micro_batch >= 0) & (problem.graph.colocation < 0)
    assert np.array_equal(replicas[own], np.array([0, 0, 0, 1])[problem.graph.micro_batch[own]])
    stages = placement_of(problem, layout_of(problem, [[0], [1]]))
    assert time_s[stages == 0, 0].sum() > 2 * time_s[stages == 1, 0].sum()


@pytest.mark.parametrize("num_devices", [2, 3, 4])
def test_every_layout_is_a_placement_that_the_problem_takes(num_devices: int) -> None:
    problem = problem_of(5, 4, num_devices)
    found = [placement_of(problem, layout) for layout in layouts(problem)]
    assert len(found) > num_devices
    for devices in found:
        problem.check_placement(devices)


def test_pins_are_kept() -> None:
    problem = problem_of(4, 4, 3)
    allowed = np.ones((problem.graph.num_ops, 3), dtype=np.bool_)
    names = list(problem.graph.names)
    allowed[names.index("op2")] = [False, False, True]
    allowed[names.index("op6/1"), 0] = False
    problem = dataclasses.replace(problem, allowed=allowed)
    for layout in layouts(problem):
        problem.check_placement(placement_of(problem, layout))


def test_a_step_that_is_not_cut_has_no_layouts() -> None:
    assert list(layouts(step_problem(layered_step(4), plain_host(2)))) == []


def expert_step() -> OpGraph:
    """Layers 1 and 2 of four are the two experts of a mixture."""
    graph = layered_step(4)
    paths = {"l1": "moe.experts.0", "l2": "moe.experts.1"}
    return dataclasses.replace(graph, modules=tuple(paths.get(path, path) for path in graph.modules))


def test_experts_are_apart_for_all_micro_batches() -> None:
    problem = step_problem(cut_graph(expert_step(), 2), plain_host(2))
    (layout,) = [one for one in layouts(problem) if one.name == "experts apart"]
    at = named(problem.graph, placement_of(problem, layout))
    for k in (0, 1):
        assert [at[f"op{op}/{k}"] for op in (5, 6, 7, 8)] == [k, 0, 1, k]
        assert [at[f"op{op}/{k}"] for op in (12, 13, 14, 15)] == [1, 1, 0, 0]
    assert [at["op1"], at["op2"]] == [0, 1]


def test_tables_are_apart_evenly_in_bytes() -> None:
    graph = layered_step(4)
    targets = list(graph.targets)
    for layer in (0, 1, 2):
        targets[5 + layer] = "aten.embedding.default"
    graph = dataclasses.replace(graph, targets=tuple(targets))
    sizes = graph.parameter_bytes.copy()
    sizes[:3] = [500, 300, 100]
    problem = step_problem(cut_graph(dataclasses.replace(graph, parameter_bytes=sizes), 2), plain_host(2))
    (layout,) = [one for one in layouts(problem) if one.name == "tables apart"]
    at = named(problem.graph, placement_of(problem, layout))
    assert [at[f"op{layer}"] for layer in (0, 1, 2)] == [0, 1, 1]
    assert [at[f"op{op}/1"] for op in (5, 6, 7, 8)] == [0, 1, 1, 1]
