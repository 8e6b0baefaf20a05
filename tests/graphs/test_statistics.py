"""Figures of graphs, against hand-worked answers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from micrographs import fork_join, op_graph
from random_problems import random_graph

from rlplace.errors import InvalidValue
from rlplace.graphs.opgraph import BACKWARD, FORWARD, UPDATE
from rlplace.graphs.statistics import describe_graph, op_depths


def test_a_fork_and_join() -> None:
    found = describe_graph(fork_join(5, 2, 8))
    assert (found.num_micro_batches, found.num_shared) == (1, 13)
    assert (found.num_ops, found.num_edges, found.widest_level, found.critical_path_ops) == (13, 20, 5, 5)
    assert found.output_bytes == 13 * 8


def test_sources_are_neither_wide_nor_long() -> None:
    graph = op_graph([[], [], [], [0, 1], [2, 3]], targets=["parameter", "input", "constant", "aten.a", "aten.b"])
    found = describe_graph(graph)
    assert (found.num_sources, found.widest_level, found.critical_path_ops, found.output_bytes) == (3, 1, 2, 2)
    assert op_depths(graph).tolist() == [0, 0, 0, 1, 2]
    assert {row.target for row in found.top_targets} == {"aten.a", "aten.b"}


def test_sums_and_phases() -> None:
    graph = op_graph(
        [[], [0], [1], [0, 2]],
        targets=["parameter", "aten.a", "aten.b", "update.sgd"],
        phases=[FORWARD, FORWARD, BACKWARD, UPDATE],
        flops=[0, 6, 3, 1],
        colocation=[0, -1, 0, 0],
    )
    graph = dataclasses.replace(
        graph,
        gradient_bytes=np.array([4, 0, 0, 0]),
        state_bytes=np.array([0, 0, 0, 8]),
        workspace_bytes=np.array([0, 5, 7, 0]),
        bytes_moved=np.array([0, 1, 2, 3]),
    )
    found = describe_graph(graph, top=2)
    assert found.phases == {"forward": 2, "backward": 1, "update": 1}
    assert (found.parameter_bytes, found.gradient_bytes, found.state_bytes, found.workspace_bytes) == (1, 4, 8, 7)
    assert (found.flops, found.bytes_moved, found.colocation_classes) == (10, 6, 1)
    assert [(row.target, row.share) for row in found.top_targets] == [("aten.a", 0.6), ("aten.b", 0.3)]
    by_cost = describe_graph(graph, np.array([9.0, 1.0, 1.0, 2.0]))
    assert [(row.target, row.cost_s) for row in by_cost.top_targets][:2] == [("update.sgd", 2.0), ("aten.a", 1.0)]
    with pytest.raises(InvalidValue, match="cost_s"):
        describe_graph(graph, np.ones(3))


def test_an_empty_graph_has_nothing_and_micro_batches_are_counted() -> None:
    found = describe_graph(op_graph([]))
    assert (found.num_ops, found.widest_level, found.critical_path_ops, found.top_targets) == (0, 0, 0, ())
    graph = op_graph([[], [0], [], [2], [1, 3]])
    found = describe_graph(dataclasses.replace(graph, micro_batch=np.array([0, 0, 1, 1, -1])))
    assert (found.num_micro_batches, found.num_shared) == (2, 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 30))
def test_ops_of_one_depth_do_not_depend_on_each_other(seed: int, num_ops: int) -> None:
    import networkx as nx

    graph = random_graph(np.random.default_rng(seed), num_ops)
    depth = op_depths(graph)
    reached = nx.transitive_closure_dag(graph.to_networkx())
    runs = np.flatnonzero(~graph.is_source)
    assert not any(depth[i] == depth[j] for i, j in reached.edges if i in runs and j in runs)
    levels = np.bincount(depth[runs], minlength=1)
    assert describe_graph(graph).widest_level == levels.max()
    assert describe_graph(graph).critical_path_ops == np.count_nonzero(levels) == depth.max()
