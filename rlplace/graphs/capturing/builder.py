"""`GraphBuilder`: an `OpGraph` grown op by op."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlplace.errors import CaptureError
from rlplace.graphs.capturing.op_work import Facts, tensor_bytes
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.program import Program


class GraphBuilder:
    """The columns of a graph, as lists.

    Attributes:
        mutations: (op, tensor) for every update in place.
        colocated: ops that share a device, a tuple for each reason.
        tensor_values: what each tensor is, as a fake tensor.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.targets: list[str] = []
        self.modules: list[str] = []
        self.signatures: list[str] = []
        self.phases: list[int] = []
        self.facts: list[Facts] = []
        self.parameter_bytes: list[int] = []
        self.gradient_bytes: list[int] = []
        self.state_bytes: list[int] = []
        self.reads: list[tuple[int, ...]] = []
        self.micro_batches: list[int] = []
        self.tensor_op: list[int] = []
        self.tensor_output: list[int] = []
        self.tensor_values: list[torch.Tensor] = []
        self.mutations: list[tuple[int, int]] = []
        self.colocated: list[tuple[int, ...]] = []

    def add_op(
        self,
        name: str,
        target: str,
        module: str,
        phase: int,
        signature: str,
        op_facts: Facts,
        reads: tuple[int, ...] = (),
        parameter_bytes: int = 0,
        state: int = 0,
        micro_batch: int = -1,
    ) -> int:
        """Adds an op that reads tensors `reads`; what comes back is its index."""
        self.names.append(name)
        self.targets.append(target)
        self.modules.append(module)
        self.phases.append(phase)
        self.signatures.append(signature)
        self.facts.append(op_facts)
        self.reads.append(tuple(sorted(set(reads))))
        self.parameter_bytes.append(parameter_bytes)
        self.gradient_bytes.append(0)
        self.state_bytes.append(state)
        self.micro_batches.append(micro_batch)
        return len(self.names) - 1

    def add_tensor(self, op: int, output: int, value: torch.Tensor) -> int:
        """Adds an output of an op; what comes back is the tensor's index.

        Raises:
            CaptureError: it is sparse.
        """
        if value.layout is not torch.strided:
            raise CaptureError(
                f"output {output} of op {self.targets[op]} in module {self.modules[op] or 'the root'} is sparse "
                f"({value.layout}), expected a dense tensor; compute it densely, or densify the input outside.",
                op=self.targets[op],
            )
        self.tensor_op.append(op)
        self.tensor_output.append(output)
        self.tensor_values.append(value)
        return len(self.tensor_op) - 1

    def graph(self, program: Program, outputs: list[int]) -> OpGraph:
        """What was added, as a graph that returns tensors `outputs`."""
        flops, moved, workspace = zip(*self.facts, strict=True)
        return OpGraph(
            names=_unique(self.names),
            targets=tuple(self.targets),
            modules=tuple(self.modules),
            signatures=tuple(self.signatures),
            phases=np.array(self.phases, dtype=np.int8),
            flops=np.array(flops),
            bytes_moved=np.array(moved),
            parameter_bytes=np.array(self.parameter_bytes, dtype=np.int64),
            gradient_bytes=np.array(self.gradient_bytes, dtype=np.int64),
            state_bytes=np.array(self.state_bytes, dtype=np.int64),
            workspace_bytes=np.array(workspace, dtype=np.int64),
            colocation=_classes(len(self.names), self.colocated),
            tensor_op=np.array(self.tensor_op, dtype=np.int32),
            tensor_output=np.array(self.tensor_output, dtype=np.int32),
            tensor_bytes=np.array([tensor_bytes(value) for value in self.tensor_values], dtype=np.int64),
            tensor_shapes=tuple(tuple(value.shape) for value in self.tensor_values),
            tensor_dtypes=tuple(str(value.dtype).removeprefix("torch.") for value in self.tensor_values),
            input_offsets=np.concatenate(([0], np.cumsum([len(read) for read in self.reads]))).astype(np.int32),
            input_tensors=np.array([tensor for read in self.reads for tensor in read], dtype=np.int32),
            mutation_op=np.array([op for op, _ in self.mutations], dtype=np.int32),
            mutation_tensor=np.array([tensor for _, tensor in self.mutations], dtype=np.int32),
            output_tensors=np.array(outputs, dtype=np.int32),
            micro_batch=np.array(self.micro_batches, dtype=np.int32),
            program=program,
        )


def _unique(names: list[str]) -> tuple[str, ...]:
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        count = seen.get(name, 0)
        seen[name] = count + 1
        unique.append(name if not count else f"{name}#{count}")
    return tuple(unique)


def _classes(num_ops: int, together: list[tuple[int, ...]]) -> np.ndarray[Any, np.dtype[np.int32]]:
    parent = list(range(num_ops))

    def find(op: int) -> int:
        while parent[op] != op:
            parent[op] = parent[parent[op]]
            op = parent[op]
        return op

    for members in together:
        for other in members[1:]:
            low, high = sorted((find(members[0]), find(other)))
            parent[high] = low
    touched = sorted({op for members in together for op in members})
    roots = {root: index for index, root in enumerate(dict.fromkeys(find(op) for op in touched))}
    classes = np.full(num_ops, -1, dtype=np.int32)
    for op in touched:
        classes[op] = roots[find(op)]
    return classes
