"""What `seq2seq` reads of a problem, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from micrographs import op_graph
from random_problems import plain_host

from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.policy.seq2seq import MOST_DIMS, MOST_OUTPUTS, seq2seq_inputs

READS = [[], [0], [1], [1, 2], [3]]
TARGETS = ["parameter", "aten.mm", "aten.relu", "aten.mm", "aten.sum"]
SHAPES = ((7,), (3, 1), (2, 2, 2), (4,), ())


def problem() -> Problem:
    """Groups {0, 1}, {2, 3} and {4}."""
    graph = op_graph(READS, [7, 3, 8, 4, 1], targets=TARGETS, outputs=[4])
    graph = replace(graph, tensor_shapes=SHAPES)
    costs = Costs(np.ones((5, 2)), "estimated")
    return Problem(graph, plain_host(2), costs, Grouping(np.array([0, 0, 1, 1, 2])))


def test_types_are_shares_of_a_groups_ops() -> None:
    inputs = seq2seq_inputs(problem())
    assert inputs.types == ("aten.mm", "aten.relu", "aten.sum", "parameter")
    assert inputs.type_shares.tolist() == [[0.5, 0, 0, 0.5], [0.5, 0.5, 0, 0], [0, 0, 1, 0]]


def test_adjacency_has_what_a_group_reads_then_what_reads_it() -> None:
    assert seq2seq_inputs(problem()).adjacency.tolist() == [
        [0, 0, 0, 0, 1, 0],
        [1, 0, 0, 0, 0, 1],
        [0, 1, 0, 0, 0, 0],
    ]


def test_shapes_are_those_of_tensors_that_leave_the_group() -> None:
    shapes = seq2seq_inputs(problem()).output_shapes.reshape(3, MOST_OUTPUTS, MOST_DIMS)
    largest = np.log1p(4)
    # tensors 0 and 2 stay inside; 1 and 3 are read by another group, 4 is returned and has no sizes
    assert shapes[0, 0].tolist() == pytest.approx([np.log1p(3) / largest, np.log1p(1) / largest, 0, 0, 0])
    assert shapes[1, 0].tolist() == pytest.approx([1, 0, 0, 0, 0])
    assert not shapes[:, 1:].any()
    assert not shapes[2].any()


def test_the_outputs_of_most_bytes_come_first_and_the_rest_is_left_out() -> None:
    count = MOST_OUTPUTS + 2
    graph = op_graph([*([] for _ in range(count)), list(range(count))], [*range(1, count + 1), 1])
    groups = Grouping(np.array([0] * count + [1]))
    wide = Problem(graph, plain_host(2), Costs(np.ones((count + 1, 2)), "estimated"), groups)
    sizes = seq2seq_inputs(wide).output_shapes.reshape(2, MOST_OUTPUTS, MOST_DIMS)[0, :, 0]
    by_hand = [np.log1p(size) / np.log1p(count) for size in range(count, 2, -1)]
    assert sizes.tolist() == pytest.approx(by_hand)
