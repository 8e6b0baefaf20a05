"""Every op of a step goes with the layer that it belongs to."""

from __future__ import annotations

import dataclasses

import numpy as np
from micro_batched import cut_graph, layered_step

from rlplace.search.parallel.step_roles import step_roles


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
