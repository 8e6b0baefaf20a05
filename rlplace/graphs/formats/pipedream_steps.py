"""`LayerSteps`: a training step of profiled layers, cut into micro-batches, as a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.gradient_sums import gradient_sums
from rlplace.graphs.opgraph import BACKWARD, FORWARD, UPDATE, OpGraph

FORWARD_TARGET, BACKWARD_TARGET, SUM_TARGET = "layer.forward", "layer.backward", "aten.add.Tensor"


@dataclass(frozen=True)
class Layer:
    """What was profiled of a layer with one batch.

    Attributes:
        module: a path that no other layer has.
        forward_s: seconds of its forward.
        backward_s: seconds of its backward.
        activation_bytes: what it gives to others.
        parameter_bytes: its parameters, and their gradients.
        reads: layers whose outputs it reads, ascending; all of them come before it.
    """

    module: str
    forward_s: float
    backward_s: float
    activation_bytes: int
    parameter_bytes: int
    reads: tuple[int, ...]


class LayerSteps:
    """Builds the graph: parameters, then micro-batch by micro-batch forward and backward, then sums and updates.

    Args:
        layers: each after those that it reads.
        micro_batches: K.
    """

    def __init__(self, layers: Sequence[Layer], micro_batches: int) -> None:
        self._layers = layers
        self._count = micro_batches
        self._names: list[str] = []
        self._targets: list[str] = []
        self._modules: list[str] = []
        self._phases: list[int] = []
        self._micro_batch: list[int] = []
        self._seconds: list[float] = []
        self._reads: list[list[int]] = []
        self._tensor_op: list[int] = []
        self._tensor_output: list[int] = []
        self._tensor_bytes: list[int] = []
        self._parameters: dict[int, int] = {}
        self._classes: list[tuple[int, ...]] = []
        self._mutations: list[tuple[int, int]] = []
        self._build()

    def times_s(self) -> NDArray[np.float64]:
        """(N,) float64 seconds of the graph's ops."""
        return np.array(self._seconds)

    def graph(self) -> OpGraph:
        """The step; `micro_batch` is -1 everywhere where K is 1."""
        n = len(self._names)
        colocation = np.full(n, -1, dtype=np.int32)
        for number, members in enumerate(self._classes):
            colocation[list(members)] = number
        parameter_bytes = np.zeros(n, dtype=np.int64)
        for op in self._parameters.values():
            parameter_bytes[op] = self._tensor_bytes[op]  # parameters come first, each with one output
        moved = [float(sum(self._tensor_bytes[t] for t in read)) for read in self._reads]
        column = np.array(self._micro_batch, dtype=np.int32)
        figures = zip(self._targets, self._modules, strict=True)
        return OpGraph(
            names=tuple(self._names),
            targets=tuple(self._targets),
            modules=tuple(self._modules),
            signatures=tuple(f"{target}({module})" for target, module in figures),
            phases=np.array(self._phases, dtype=np.int8),
            flops=np.zeros(n),
            bytes_moved=np.array(moved) + np.bincount(self._tensor_op, weights=self._tensor_bytes, minlength=n),
            parameter_bytes=parameter_bytes,
            gradient_bytes=parameter_bytes,
            state_bytes=np.zeros(n, dtype=np.int64),
            workspace_bytes=np.zeros(n, dtype=np.int64),
            colocation=colocation,
            tensor_op=np.array(self._tensor_op, dtype=np.int32),
            tensor_output=np.array(self._tensor_output, dtype=np.int32),
            tensor_bytes=np.array(self._tensor_bytes, dtype=np.int64),
            tensor_shapes=tuple((size,) for size in self._tensor_bytes),
            tensor_dtypes=("uint8",) * len(self._tensor_bytes),
            input_offsets=np.cumsum([0, *map(len, self._reads)]),
            input_tensors=np.array([tensor for read in self._reads for tensor in read], dtype=np.int32),
            mutation_op=np.array([op for op, _ in self._mutations], dtype=np.int32),
            mutation_tensor=np.array([tensor for _, tensor in self._mutations], dtype=np.int32),
            output_tensors=np.zeros(0, dtype=np.int32),
            micro_batch=column if self._count > 1 else np.full(n, -1, dtype=np.int32),
        )

    def _build(self) -> None:
        layers, count = self._layers, self._count
        has_backward: list[bool] = []
        for layer in layers:
            needs = layer.parameter_bytes > 0 or any(has_backward[source] for source in layer.reads)
            has_backward.append(needs or layer.backward_s > 0)
        for index, layer in enumerate(layers):
            if layer.parameter_bytes:
                self._parameters[index] = len(self._names)
                self._add(layer, "", "parameter", FORWARD, -1, 0.0, [], [layer.parameter_bytes])
        largest = sorted(self._parameters, key=lambda index: -layers[index].parameter_bytes)
        sums = {index: gradient_sums(count, turn) for turn, index in enumerate(largest)}
        parts: dict[int, list[int]] = {index: [-1] * (2 * count - 1) for index in self._parameters}
        for micro_batch in range(count):
            outputs = self._forward(micro_batch)
            self._backward(micro_batch, outputs, has_backward, parts)
            for index in self._parameters:
                for number, one in enumerate(sums[index][:-1]):
                    if one.last == micro_batch:
                        read = [parts[index][one.left], parts[index][one.right]]
                        parts[index][count + number] = self._sum(layers[index], f"sum{number}", one.micro_batch, read)
        for index, parameter in self._parameters.items():
            total = parts[index][0]
            if count > 1:
                root = sums[index][-1]
                read = [parts[index][root.left], parts[index][root.right]]
                total = self._sum(layers[index], "gradient", -1, read)
            tensor, update = parameter, len(self._names)
            self._add(layers[index], "update", "update.sgd", UPDATE, -1, 0.0, [tensor, total], [])
            self._mutations.append((update, tensor))
            self._classes.append((parameter, self._tensor_op[total], update) if count > 1 else (parameter, update))

    def _forward(self, micro_batch: int) -> list[int]:
        """The output of each layer."""
        outputs: list[int] = []
        for index, layer in enumerate(self._layers):
            read = [outputs[source] for source in layer.reads]
            read += [self._parameters[index]] if index in self._parameters else []
            word, given = f"forward{self._copy(micro_batch)}", [layer.activation_bytes]
            outputs += self._add(layer, word, FORWARD_TARGET, FORWARD, micro_batch, layer.forward_s, read, given)
        return outputs

    def _backward(
        self, micro_batch: int, outputs: Sequence[int], has_backward: Sequence[bool], parts: dict[int, list[int]]
    ) -> None:
        """Adds the backward ops and keeps the gradients of parameters in `parts`."""
        gradients: list[list[int]] = [[] for _ in outputs]
        for index in range(len(outputs) - 1, -1, -1):
            layer = self._layers[index]
            if not has_backward[index]:
                continue
            wanted = [source for source in layer.reads if has_backward[source]]
            given = [self._layers[source].activation_bytes for source in wanted]
            read = [outputs[index], *gradients[index]]
            if index in self._parameters:
                read.append(self._parameters[index])
                given.append(layer.parameter_bytes)
            word = f"backward{self._copy(micro_batch)}"
            made = self._add(layer, word, BACKWARD_TARGET, BACKWARD, micro_batch, layer.backward_s, read, given)
            for source, gradient in zip(wanted, made, strict=False):
                gradients[source].append(gradient)
            if index in self._parameters:
                parts[index][micro_batch] = made[-1]

    def _sum(self, layer: Layer, word: str, micro_batch: int, read: list[int]) -> int:
        return self._add(layer, word, SUM_TARGET, BACKWARD, micro_batch, 0.0, read, [layer.parameter_bytes])[0]

    def _copy(self, micro_batch: int) -> str:
        return f".{micro_batch}" if self._count > 1 else ""

    def _add(
        self,
        layer: Layer,
        word: str,
        target: str,
        phase: int,
        micro_batch: int,
        seconds: float,
        read: Sequence[int],
        outputs: Sequence[int],
    ) -> list[int]:
        """The tensors of a new op of a layer, called after it and the word."""
        op, first = len(self._names), len(self._tensor_op)
        self._names.append(f"{layer.module}.{word}" if word else layer.module)
        self._targets.append(target)
        self._modules.append(layer.module)
        self._phases.append(phase)
        self._micro_batch.append(micro_batch)
        self._seconds.append(seconds)
        self._reads.append(sorted(set(read)))
        self._tensor_op += [op] * len(outputs)
        self._tensor_output += range(len(outputs))
        self._tensor_bytes += outputs
        return list(range(first, first + len(outputs)))
