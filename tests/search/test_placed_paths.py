"""Paths of a placement, worked out by hand."""

from __future__ import annotations

import numpy as np
from micrographs import op_graph
from random_problems import plain_host

from rlplace.graphs import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.problem import Problem
from rlplace.search.op_order import placed_paths

DEVICES = np.array([0, 0, 1, 0], dtype=np.int32)


def diamond(target: str = "aten.op") -> Problem:
    """Op 0 feeds 1 and 2, and 3 reads both: 20, 30 and 40 bytes at 10 bytes a second."""
    graph = op_graph([[], [0], [0], [1, 2]], [20, 30, 40, 1], targets=[target, *["aten.op"] * 3])
    costs = Costs(np.array([[1.0, 9.0], [2.0, 9.0], [9.0, 3.0], [4.0, 9.0]]), "estimated")
    return Problem(graph, plain_host(2, 10.0), costs, Grouping(np.arange(4)))


def test_paths_count_the_times_and_transfers_of_the_placement() -> None:
    paths = placed_paths(diamond(), DEVICES)
    assert paths.op_s.tolist() == [1.0, 2.0, 3.0, 4.0]
    # op 2 starts after 1 s and 20 bytes; op 3 after op 2 and 40 bytes
    assert paths.before_s.tolist() == [0.0, 1.0, 3.0, 10.0]
    assert paths.after_s.tolist() == [13.0, 4.0, 8.0, 0.0]


def test_without_transfers_only_ops_count() -> None:
    paths = placed_paths(diamond(), DEVICES, transfers=False)
    assert paths.before_s.tolist() == [0.0, 1.0, 1.0, 4.0]
    assert paths.after_s.tolist() == [7.0, 4.0, 4.0, 0.0]


def test_sources_take_no_time() -> None:
    paths = placed_paths(diamond("parameter"), DEVICES)
    assert paths.op_s[0] == 0.0
    assert paths.before_s.tolist() == [0.0, 0.0, 2.0, 9.0]
