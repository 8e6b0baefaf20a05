"""What columns must be to make an `OpGraph`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from micrographs import op_graph

from rlplace.errors import InvalidValue
from rlplace.graphs.opgraph import edge_readers

DIAMOND = op_graph([[], [0], [0], [0, 1, 2]], [8, 4, 2, 1])


def test_each_edge_has_its_reader() -> None:
    assert edge_readers(np.array([0, 0, 1, 2, 5], dtype=np.int32)).tolist() == [1, 2, 3, 3, 3]
    assert edge_readers(np.array([0], dtype=np.int32)).tolist() == []


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"targets": ("aten.op",) * 3}, "targets"),
        ({"flops": np.zeros(3)}, "flops"),
        ({"tensor_bytes": np.zeros(5)}, "tensor_bytes"),
        ({"names": ("a", "b", "c", "a")}, "names"),
        ({"flops": np.array([0, 0, 0, -1.0])}, "flops"),
        ({"flops": np.array([0, 0, 0, np.nan])}, "flops"),
        ({"tensor_op": np.array([0, 2, 1, 3])}, "tensor_op"),
        ({"tensor_op": np.array([0, 1, 2, 4])}, "tensor_op"),
        ({"input_tensors": np.array([0, 0, 0, 1, 4])}, "input_tensors"),
        ({"input_offsets": np.array([0, 0, 2, 1, 5])}, "input_offsets"),
        ({"input_offsets": np.array([0, 0, 1, 2, 4])}, "input_offsets"),
        ({"input_tensors": np.array([1, 0, 0, 1, 2])}, "input_tensors"),
        ({"input_tensors": np.array([0, 0, 1, 0, 2])}, "input_tensors"),
        ({"input_tensors": np.array([0, 0, 1, 1, 2])}, "input_tensors"),
        ({"phases": np.array([0, 0, 0, 3])}, "phases"),
        ({"colocation": np.array([-2, 0, 0, 0])}, "colocation"),
        ({"colocation": np.array([4, 0, 0, 0])}, "colocation"),
        ({"tensor_output": np.array([-1, 0, 0, 0])}, "tensor_output"),
        ({"tensor_bytes": np.array([2**60, 2**60, 0, 0])}, "tensor_bytes"),
        ({"mutation_op": np.array([0])}, "mutation_tensor"),
        ({"mutation_op": np.array([9]), "mutation_tensor": np.array([0])}, "mutation_op"),
        ({"output_tensors": np.array([-1])}, "output_tensors"),
    ],
)
def test_what_makes_no_graph_is_refused(change: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        dataclasses.replace(DIAMOND, **change)
    assert refused.value.field == field
