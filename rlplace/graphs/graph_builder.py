"""`GraphBuilder`: an `OpGraph` grown op by op.

`gradient_sums`: the tree in which the gradients of K micro-batches are added up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.opgraph import DTYPES, FORWARD, OpGraph

if TYPE_CHECKING:
    from rlplace.graphs.program import Program


@dataclass(slots=True)
class OpRow:
    """One op: a row of the columns of an `OpGraph`, which says what they hold; `reads` are tensors, ascending."""

    name: str
    target: str
    module: str = ""
    phase: int = FORWARD
    signature: str = ""
    reads: Sequence[int] = ()
    flops: float = 0.0
    bytes_moved: float = 0.0
    workspace_bytes: int = 0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    state_bytes: int = 0
    micro_batch: int = -1
    colocation: int = -1


@dataclass(slots=True)
class TensorRow:
    """One output of an op, likewise; `value` is the fake tensor that it was traced with."""

    op: int
    output: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    value: Any = None


class GraphBuilder:
    """The rows of a graph.

    Attributes:
        ops: in a topological order.
        tensors: by their producers.
        mutations: (op, tensor) for every update in place.
        together: ops that share a device, a tuple for each reason; ops with a reason in common are one class.
    """

    def __init__(self) -> None:
        self.ops: list[OpRow] = []
        self.tensors: list[TensorRow] = []
        self.mutations: list[tuple[int, int]] = []
        self.together: list[Sequence[int]] = []

    def add(self, row: OpRow) -> int:
        """Adds an op, whose index comes back; its `reads` may come in any order, and repeat."""
        row.reads = sorted(set(row.reads))
        self.ops.append(row)
        return len(self.ops) - 1

    def add_tensor(self, row: TensorRow) -> int:
        """Adds an output of the last op, whose index comes back."""
        self.tensors.append(row)
        return len(self.tensors) - 1

    def add_outputs(self, op: int, num_bytes: Iterable[int], *, item_bytes: int = 1, dtype: str = "uint8") -> list[int]:
        """Adds flat outputs of the last op, of so many bytes each; returns their indices."""
        first = len(self.tensors)
        self.tensors += [
            TensorRow(op, place, size, (size // item_bytes,), dtype) for place, size in enumerate(num_bytes)
        ]
        return list(range(first, len(self.tensors)))

    def bytes_of(self, tensors: Iterable[int]) -> int:
        """Bytes of several tensors together."""
        return sum(self.tensors[tensor].bytes for tensor in tensors)

    def graph(self, outputs: Iterable[int] = (), program: Program | None = None) -> OpGraph:
        """The graph of all that was added; the step returns tensors `outputs`.

        Raises:
            InvalidValue: the rows make no graph; see `OpGraph`.
        """

        def column(rows: Sequence[object], name: str, field: str = "") -> NDArray[Any]:
            return np.array([getattr(row, name) for row in rows], dtype=DTYPES[field or name])

        ops, tensors = self.ops, self.tensors
        return OpGraph(
            names=tuple(row.name for row in ops),
            targets=tuple(row.target for row in ops),
            modules=tuple(row.module for row in ops),
            signatures=tuple(row.signature for row in ops),
            phases=column(ops, "phase", "phases"),
            flops=column(ops, "flops"),
            bytes_moved=column(ops, "bytes_moved"),
            parameter_bytes=column(ops, "parameter_bytes"),
            gradient_bytes=column(ops, "gradient_bytes"),
            state_bytes=column(ops, "state_bytes"),
            workspace_bytes=column(ops, "workspace_bytes"),
            colocation=joined_classes(len(ops), self.together) if self.together else column(ops, "colocation"),
            tensor_op=column(tensors, "op", "tensor_op"),
            tensor_output=column(tensors, "output", "tensor_output"),
            tensor_bytes=column(tensors, "bytes", "tensor_bytes"),
            tensor_shapes=tuple(row.shape for row in tensors),
            tensor_dtypes=tuple(row.dtype for row in tensors),
            input_offsets=np.cumsum([0, *(len(row.reads) for row in ops)], dtype=np.int32),
            input_tensors=np.array([tensor for row in ops for tensor in row.reads], dtype=np.int32),
            mutation_op=np.array([op for op, _ in self.mutations], dtype=np.int32),
            mutation_tensor=np.array([tensor for _, tensor in self.mutations], dtype=np.int32),
            output_tensors=np.array([*outputs], dtype=np.int32),
            micro_batch=column(ops, "micro_batch"),
            program=program,
        )


def joined_classes(num_ops: int, together: Iterable[Sequence[int]]) -> NDArray[np.int32]:
    """(N,) int32: one number for all ops that `together` joins, by their first op; -1 for an op that it does not name.

    Union-find whose roots are the first ops of their classes.
    """
    parent = list(range(num_ops))

    def find(op: int) -> int:
        while parent[op] != op:
            parent[op] = op = parent[parent[op]]
        return op

    classes = np.full(num_ops, -1, dtype=np.int32)
    for members in together:
        roots = sorted(map(find, members))
        for root in roots:
            parent[root] = roots[0]
        classes[list(members)] = 0
    named = np.flatnonzero(classes == 0)
    classes[named] = np.unique([find(op) for op in named.tolist()], return_inverse=True)[1]
    return classes


def unique_names(names: Sequence[str]) -> list[str]:
    """The names as they are where no two are the same, else with the number of each behind it."""
    return [*names] if len(set(names)) == len(names) else [f"{name}#{i}" for i, name in enumerate(names)]


LATER_HALF = -1
"""A `turn` with which every sum goes with its later half: the micro-batch that completes it."""


@dataclass(frozen=True)
class GradientSum:
    """One addition of two parts; a part below K is a micro-batch's own gradient, K + i is the i-th sum.

    Attributes:
        left: the part of the earlier micro-batches.
        right: the part of the later ones.
        micro_batch: which of them it goes with; -1 for the last sum, which lives with the parameter.
        last: the latest micro-batch in it: the sum can be computed once the gradient of that one is there.
    """

    left: int
    right: int
    micro_batch: int
    last: int


def gradient_sums(count: int, turn: int = 0) -> tuple[GradientSum, ...]:
    """The K - 1 additions of a balanced tree over micro-batches in order, each after its parts; the last is the root.

    Micro-batches that follow each other are added first. So where a device holds a run of them, their gradients are
    added there before anything is sent, and no more than log2(K) + 1 are there at a time. Each sum goes with one of
    its halves, the bits of `turn` say which: dealt out over parameters they spread the sums, and what is sent to them,
    evenly over replicas (recursive halving: Thakur, Rabenseifner and Gropp 2005).

    Args:
        count: K, at least 1.
        turn: a number of the parameter.

    >>> [(one.left, one.right, one.micro_batch) for one in gradient_sums(4, turn=1)]
    [(0, 1, 1), (2, 3, 3), (4, 5, -1)]
    """
    found: list[GradientSum] = []

    def add(first: int, end: int) -> tuple[int, int, int]:
        """The part that holds micro-batches `first` to `end - 1`, the one that it goes with, and its height."""
        if end - first == 1:
            return first, first, 0
        middle = first + (end - first + 1) // 2
        (left, near, height), (right, far, other) = add(first, middle), add(middle, end)
        height = max(height, other)
        goes_with = far if turn >> height & 1 else near
        found.append(GradientSum(left, right, goes_with, end - 1))
        return count + len(found) - 1, goes_with, height + 1

    add(0, count)
    if found:
        root = found[-1]
        found[-1] = GradientSum(root.left, root.right, -1, root.last)
    return tuple(found)
