"""Orders and longest paths by hand; what a cycle holds back is left out."""

from __future__ import annotations

import numpy as np
import pytest

from rlplace.graphs.paths import depth_first_order, longest_after, longest_before, topological_order


@pytest.mark.parametrize(
    ("num_ops", "edges", "order"),
    [
        (0, [], []),
        (3, [], [0, 1, 2]),
        (4, [(3, 0), (0, 1)], [2, 3, 0, 1]),
        (4, [(0, 3), (0, 3), (3, 1)], [0, 2, 3, 1]),
        (4, [(1, 2), (2, 1), (2, 3)], [0]),
        (2, [(0, 0)], [1]),
    ],
)
def test_an_op_comes_after_what_it_reads_and_otherwise_by_number(
    num_ops: int, edges: list[tuple[int, int]], order: list[int]
) -> None:
    assert topological_order(num_ops, edges) == order


def test_depth_first_an_op_comes_after_the_last_one_that_it_waited_for_and_cycles_are_left_out() -> None:
    # two chains 0 -> 2 -> 4 and 1 -> 3, and 4 reads 3 too: the second chain is finished before 4
    offsets, targets = np.array([0, 1, 2, 3, 4, 4]), np.array([2, 3, 4, 4])
    order, level = depth_first_order(5, offsets, targets)
    assert order.tolist() == [0, 2, 1, 3, 4]
    assert level.tolist() == [0, 0, 1, 1, 2]
    order, _ = depth_first_order(3, np.array([0, 0, 1, 2]), np.array([2, 1]))
    assert order.tolist() == [0]


def diamond() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Node 0 feeds 1 and 2, which 3 reads; offsets, producers and edges' times."""
    producers = np.array([0, 0, 1, 2], dtype=np.int32)
    return np.array([0, 0, 1, 2, 4], dtype=np.int32), producers, np.array([0.5, 4.0, 0.25, 1.0])


def test_the_longest_path_counts_nodes_and_edges_but_not_the_node_itself() -> None:
    node_s = np.array([1.0, 10.0, 2.0, 3.0])
    assert longest_before(node_s, *diamond()).tolist() == [0.0, 1.5, 5.0, 11.75]
    assert longest_after(node_s, *diamond()).tolist() == [13.75, 3.25, 4.0, 0.0]
    nothing = np.zeros(2, dtype=np.int32), np.zeros(0, dtype=np.int32), np.zeros(0)
    assert longest_before(np.ones(1), *nothing).tolist() == longest_after(np.ones(1), *nothing).tolist() == [0.0]
