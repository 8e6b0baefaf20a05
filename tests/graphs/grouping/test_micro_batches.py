"""Groups of a step that is cut into micro-batches keep them apart, whatever the rule."""

from __future__ import annotations

import numpy as np
import pytest
from micro_batched import cut_graph, layered_step

from rlplace.graphs.grouping.groups import group_ops


@pytest.mark.parametrize("rule", ["heavy-edge", "colocation", "module", "metis", "none"])
@pytest.mark.parametrize("acyclic", [False, True])
def test_no_group_holds_ops_of_two_micro_batches(rule: str, acyclic: bool) -> None:
    if rule == "metis":
        pytest.importorskip("pymetis")
    graph = cut_graph(layered_step(6), 4)
    # sending takes much longer than computing: all that may be merged is
    grouping = group_ops(graph, np.ones(graph.num_ops), 12, rule, acyclic=acyclic, s_per_byte=1.0)
    follows = np.where(graph.colocation >= 0, -1, graph.micro_batch)
    for group in range(grouping.num_groups):
        assert len(np.unique(follows[grouping.op_group == group])) == 1
    if rule != "none":
        assert grouping.num_groups <= 16


def test_parameters_are_merged_with_those_that_are_read_next_to_them() -> None:
    graph = cut_graph(layered_step(8), 2)
    grouping = group_ops(graph, np.ones(graph.num_ops), 16)
    of_parameters = grouping.op_group[:8]
    assert len(np.unique(of_parameters)) == 4
    assert (np.diff(of_parameters) >= 0).all()
