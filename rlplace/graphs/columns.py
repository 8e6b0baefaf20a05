"""`check_columns`: the types, lengths, ranges and order that the columns of an `OpGraph` must have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue

DTYPES: dict[str, type[np.generic]] = {
    "phases": np.int8,
    "flops": np.float64,
    "bytes_moved": np.float64,
    "parameter_bytes": np.int64,
    "gradient_bytes": np.int64,
    "state_bytes": np.int64,
    "workspace_bytes": np.int64,
    "colocation": np.int32,
    "tensor_op": np.int32,
    "tensor_output": np.int32,
    "tensor_bytes": np.int64,
    "input_offsets": np.int32,
    "input_tensors": np.int32,
    "mutation_op": np.int32,
    "mutation_tensor": np.int32,
    "output_tensors": np.int32,
    "micro_batch": np.int32,
}
"""What each array is held as."""
LARGEST_TOTAL = 2.0**60
"""FLOPs or bytes of a whole graph beyond this would leave what sums of int64 hold."""
_OF_OPS = (
    *("targets", "modules", "signatures", "phases", "flops", "bytes_moved", "parameter_bytes", "gradient_bytes"),
    *("state_bytes", "workspace_bytes", "colocation", "micro_batch"),
)
_OF_TENSORS = ("tensor_output", "tensor_bytes", "tensor_shapes", "tensor_dtypes")
_AMOUNTS = (
    *("flops", "bytes_moved", "parameter_bytes", "gradient_bytes", "state_bytes", "workspace_bytes"),
    "tensor_bytes",
)


def edge_readers(input_offsets: NDArray[np.int32]) -> NDArray[np.int32]:
    """(E,) int32: the reading op of each edge.

    Args:
        input_offsets: (N + 1,) where the edges of each op begin.
    """
    return np.repeat(np.arange(len(input_offsets) - 1, dtype=np.int32), np.diff(input_offsets))


def check_columns(columns: Mapping[str, Any], *, num_phases: int) -> None:
    """Checks that columns make a graph.

    Args:
        columns: the fields of an `OpGraph` by name, arrays as `DTYPES` has them.
        num_phases: how many phases there are.

    Raises:
        InvalidValue: they do not; names the first column that is wrong.
    """
    n, t = len(columns["names"]), len(columns["tensor_op"])
    lengths = dict.fromkeys(_OF_OPS, n) | dict.fromkeys(_OF_TENSORS, t)
    lengths |= {"input_offsets": n + 1, "mutation_tensor": len(columns["mutation_op"])}
    for name, length in lengths.items():
        if len(columns[name]) != length:
            raise InvalidValue(name, len(columns[name]), f"{length} entries", where="graph")
    if len(set(columns["names"])) != n:
        repeated = next(name for name, count in Counter(columns["names"]).items() if count > 1)
        raise InvalidValue("names", f"{repeated[:60]!r} more than once", "unique op names", where="graph")
    _check_ranges(columns, n, t, num_phases)
    _check_amounts(columns)
    _check_order(columns)


def _check_ranges(columns: Mapping[str, Any], n: int, t: int, num_phases: int) -> None:
    for name, low, high in (
        ("phases", 0, num_phases - 1),
        ("colocation", -1, n - 1),
        ("micro_batch", -1, n - 1),
        ("tensor_output", 0, np.iinfo(np.int32).max),
    ):
        array = columns[name]
        if len(array) and (array.min() < low or array.max() > high):
            raise InvalidValue(name, f"{array.min()}..{array.max()}", f"entries in {low}..{high}", where="graph")
    for name, bound in (
        ("tensor_op", n),
        ("input_tensors", t),
        ("mutation_op", n),
        ("mutation_tensor", t),
        ("output_tensors", t),
    ):
        array = columns[name]
        if len(array) and (array.min() < 0 or array.max() >= bound):
            raise InvalidValue(name, f"{array.min()}..{array.max()}", f"indices in 0..{bound - 1}", where="graph")


def _check_amounts(columns: Mapping[str, Any]) -> None:
    for name in _AMOUNTS:
        array = columns[name]
        if not np.all(np.isfinite(array)) or np.any(array < 0):
            raise InvalidValue(name, "a negative or non-finite entry", "finite numbers >= 0", where="graph")
        if float(np.sum(array, dtype=np.float64)) > LARGEST_TOTAL:
            raise InvalidValue(name, "more altogether", f"at most {LARGEST_TOTAL:.1e} in sum", where="graph")


def _check_order(columns: Mapping[str, Any]) -> None:
    """Tensors by producer, ops in a topological order, what an op reads ascending."""
    tensor_op, offsets, read = columns["tensor_op"], columns["input_offsets"], columns["input_tensors"]
    if np.any(np.diff(tensor_op) < 0):
        raise InvalidValue("tensor_op", "out of order", "tensors sorted by producer", where="graph")
    if offsets[0] != 0 or np.any(np.diff(offsets) < 0) or offsets[-1] != len(read):
        raise InvalidValue("input_offsets", "not a CSR", "offsets from 0 up to the number of edges", where="graph")
    readers = edge_readers(offsets)
    late = tensor_op[read] >= readers
    if np.any(late):
        edge = int(np.argmax(late))
        raise InvalidValue(
            "input_tensors",
            f"op {int(readers[edge])} reads op {int(tensor_op[read[edge]])}",
            "op indices in topological order (the graph is cyclic, or out of order)",
            where="graph",
        )
    unsorted = (np.diff(read) <= 0) & (np.diff(readers) == 0)
    if np.any(unsorted):
        raise InvalidValue(
            "input_tensors",
            f"not ascending at op {int(readers[int(np.argmax(unsorted))])}",
            "each tensor once, ascending within an op",
            where="graph",
        )
