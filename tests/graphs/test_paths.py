"""Every order by hand: sources first, otherwise by number; what a cycle holds back is left out."""

from __future__ import annotations

import pytest

from rlplace.graphs.paths import topological_order


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
