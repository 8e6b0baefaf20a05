"""In-place updates as the kernels read them, and those that could never run."""

from __future__ import annotations

import numpy as np
import pytest
from micrographs import op_graph

from rlplace.errors import InvalidValue
from rlplace.measure.simulate.compiled_problem import lay_out_updates

ROUTE_KIND = np.zeros(4, dtype=np.int32)


def test_updates_by_op_and_by_tensor() -> None:
    """Op 2 updates tensor 0, which ops 3 and 4 read as well; op 4 updates tensors 0 and 1."""
    graph = op_graph([[], [], [0, 1], [0], [0, 1]], 100, mutations=[(4, 1), (2, 0), (4, 0), (4, 0)])
    updates = lay_out_updates(graph, ROUTE_KIND, 2)
    assert updates.updated_offsets.tolist() == [0, 0, 0, 1, 1, 3]
    assert updates.updated_tensors.tolist() == [0, 0, 1]
    assert updates.updater_offsets.tolist() == [0, 2, 3, 3, 3, 3]
    assert updates.updater_ops.tolist() == [2, 4, 4]
    assert updates.concerned.tolist() == [0, 0, 1, 1, 1]


def test_updates_that_wait_for_each_other_are_refused() -> None:
    graph = op_graph([[], [0], [0, 1]], targets=["parameter", "aten.a", "aten.b"], mutations=[(1, 0)])
    with pytest.raises(InvalidValue, match="waits for a reader that waits for it"):
        lay_out_updates(graph, ROUTE_KIND, 2)


def test_a_reader_of_a_higher_index_may_still_come_before() -> None:
    graph = op_graph([[], [0], [0]], targets=["parameter", "update.sgd", "aten.mm"], mutations=[(1, 0)])
    assert lay_out_updates(graph, ROUTE_KIND, 2).updater_ops.tolist() == [1]
