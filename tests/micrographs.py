"""Op graphs from literal lists, small enough to work out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlplace.graphs.opgraph import FORWARD, OpGraph


def op_graph(
    reads: Sequence[Sequence[int]],
    output_bytes: Sequence[int] | int = 1,
    *,
    targets: Sequence[str] | None = None,
    colocation: Sequence[int] | None = None,
    phases: Sequence[int] | None = None,
    flops: Sequence[float] | None = None,
    mutations: Sequence[tuple[int, int]] = (),
    outputs: Sequence[int] = (),
) -> OpGraph:
    """A graph in which op i has one output, tensor i, and reads the outputs of the ops `reads[i]`.

    Args:
        reads: for each op, the ops that it reads, ascending.
        output_bytes: bytes of each op's output, or one figure for all.
        targets: for each op; `aten.op` everywhere by default.
        colocation: for each op; -1 (free) by default.
        phases: for each op; forward by default.
        flops: for each op; 0 by default.
        mutations: (op, tensor) pairs: the op updates the tensor in place.
        outputs: tensors that the step returns.
    """
    n = len(reads)
    targets = ["aten.op"] * n if targets is None else targets
    tensor_bytes = [output_bytes] * n if isinstance(output_bytes, int) else output_bytes
    return OpGraph(
        names=tuple(f"op{i}" for i in range(n)),
        targets=tuple(targets),
        modules=("",) * n,
        signatures=tuple(f"{target}:{i}" for i, target in enumerate(targets)),
        phases=np.array([FORWARD] * n if phases is None else phases, dtype=np.int8),
        flops=np.array([0.0] * n if flops is None else flops),
        bytes_moved=np.zeros(n),
        parameter_bytes=np.array([b if t == "parameter" else 0 for b, t in zip(tensor_bytes, targets, strict=True)]),
        gradient_bytes=np.zeros(n),
        state_bytes=np.zeros(n),
        workspace_bytes=np.zeros(n),
        colocation=np.array([-1] * n if colocation is None else colocation),
        tensor_op=np.arange(n),
        tensor_output=np.zeros(n),
        tensor_bytes=np.array(tensor_bytes),
        tensor_shapes=tuple((b,) for b in tensor_bytes),
        tensor_dtypes=("uint8",) * n,
        input_offsets=np.cumsum([0, *(len(read) for read in reads)]),
        input_tensors=np.array([op for read in reads for op in read], dtype=np.int32),
        mutation_op=np.array([op for op, _ in mutations], dtype=np.int32),
        mutation_tensor=np.array([tensor for _, tensor in mutations], dtype=np.int32),
        output_tensors=np.array(outputs, dtype=np.int32),
    )


def fork_join(width: int, depth: int, num_bytes: int = 1) -> OpGraph:
    """`depth` stages of one fork op, `width` parallel ops and one join op, which is the next stage's fork."""
    reads: list[list[int]] = [[]]
    for _ in range(depth):
        fork = len(reads) - 1
        branches = [len(reads) + i for i in range(width)]
        reads += [[fork] for _ in branches]
        reads.append(branches)
    return op_graph(reads, num_bytes)
