"""Layouts of hand-made steps: stages, replicas, owners, orders of devices, pins.

Every op of a step goes with the layer that it belongs to.

Stages against every way to cut a short chain.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from micro_batched import cut_graph, layered_step, step_problem
from random_problems import plain_host

from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.search.parallel.layouts import Chain, Layout, cut_stages, deal, layouts, placement_of, shapes, step_roles


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


def places(graph) -> dict[str, int]:
    return dict(zip(graph.names, step_roles(graph).op_position.tolist(), strict=True))


def test_what_belongs_to_a_layer_has_its_place() -> None:
    graph = cut_graph(layered_step(3), 2)
    step = step_roles(graph)
    assert step.num_positions == 4  # three layers and the loss
    at = dict(zip(graph.names, step.op_position.tolist(), strict=True))
    for micro_batch in (0, 1):
        assert at[f"op3/{micro_batch}"] == 0  # the input
        assert [at[f"op{op}/{micro_batch}"] for op in (4, 5, 6, 7)] == [0, 1, 2, 3]
        assert [at[f"op{op}/{micro_batch}"] for op in range(8, 14)] == [2, 2, 1, 1, 0, 0]
    assert [at[f"op{op}"] for op in (0, 1, 2)] == [0, 1, 2]  # parameters
    assert [at[f"op{op}"] for op in (14, 15, 16)] == [0, 1, 2]  # updates
    assert {at[name] for name in graph.names if name.startswith("sum")} == {0, 1, 2}


def test_what_all_micro_batches_share_follows_none() -> None:
    graph = cut_graph(layered_step(3), 4)
    follows = step_roles(graph).follows
    assert np.array_equal(follows, np.where(graph.colocation >= 0, -1, graph.micro_batch))


def test_without_modules_backward_ops_go_where_what_they_read_was_made() -> None:
    graph = dataclasses.replace(layered_step(3), modules=("",) * 17)
    with_modules = places(cut_graph(layered_step(3), 2))
    without = places(cut_graph(graph, 2))
    wrong = [name for name in without if abs(without[name] - with_modules[name]) > 1]
    assert not wrong


def test_partial_sums_are_where_the_parameter_is_whatever_their_module() -> None:
    graph = cut_graph(layered_step(3), 4)
    modules = tuple(
        "" if name.startswith("sum") else path for name, path in zip(graph.names, graph.modules, strict=True)
    )
    assert places(dataclasses.replace(graph, modules=modules)) == places(graph)


def test_a_step_that_is_not_cut_has_no_chain() -> None:
    step = step_roles(layered_step(3))
    assert step.num_positions == 0
    assert (step.follows == -1).all()


def test_a_chain_whose_forward_ops_are_all_owned_is_one_place() -> None:
    graph = cut_graph(layered_step(3), 2)
    step = step_roles(dataclasses.replace(graph, colocation=np.arange(graph.num_ops, dtype=np.int32)))
    assert step.num_positions == 1
    assert (step.position == 0).all()


def test_equal_links_are_cut_into_equal_stages() -> None:
    assert cut_stages(np.ones(6), np.ones(3)).tolist() == [0, 0, 1, 1, 2, 2]


def test_a_fast_stage_takes_more() -> None:
    assert cut_stages(np.ones(6), np.array([2.0, 1.0])).tolist() == [0, 0, 0, 0, 1, 1]


def test_a_thin_cut_is_worth_a_less_even_one() -> None:
    crossing = np.array([0.0, 9.0, 9.0, 9.0, 1.0, 9.0, 0.0])
    assert cut_stages(np.ones(6), np.ones(2), crossing).tolist() == [0, 0, 0, 0, 1, 1]


def test_fewer_links_than_stages_leave_some_empty() -> None:
    assert sorted(cut_stages(np.ones(2), np.ones(3)).tolist()) == sorted(
        set(cut_stages(np.ones(2), np.ones(3)).tolist())
    )
    assert cut_stages(np.zeros(0), np.ones(3)).tolist() == []


@pytest.mark.parametrize("seed", range(10))
def test_the_worst_stage_is_as_good_as_any_cut_allows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    load, rate, crossing = rng.uniform(0.1, 2, 9), rng.uniform(0.5, 2, 3), rng.uniform(0, 1, 10)
    crossing[[0, -1]] = 0.0

    def worst(cuts: tuple[int, ...]) -> float:
        ends = (0, *cuts, 9)
        return max(
            load[a:b].sum() / rate[stage] + crossing[a] + crossing[b]
            for stage, (a, b) in enumerate(itertools.pairwise(ends))
        )

    found = cut_stages(load, rate, crossing)
    cuts = tuple(np.searchsorted(found, [1, 2]).tolist())
    assert worst(cuts) == pytest.approx(min(worst(pair) for pair in itertools.combinations(range(1, 9), 2)))


def test_a_long_chain_is_cut_at_its_thin_places() -> None:
    crossing = np.ones(2001)
    crossing[::10] = 0.0
    found = cut_stages(np.ones(2000), np.ones(4), crossing)
    starts = np.searchsorted(found, [1, 2, 3])
    assert (starts % 10 == 0).all()
    assert np.bincount(found).max() <= 510
