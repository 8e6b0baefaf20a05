"""From cells to an `OpGraph`: costs drawn, gradients mirrored, weights updated in place."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from rlplace.graphs.opgraph import BACKWARD, FORWARD, UPDATE, OpGraph
from rlplace.graphs.synthetic.families import ADD, MATMUL, Cell

UPDATES = {"sgd": (2.0, 0), "momentum": (4.0, 1), "adam": (14.0, 2), "adamw": (16.0, 2)}
"""FLOPs and elements of state for each element of a parameter, by optimizer."""
_ELEMENT_BYTES = 4  # of float32


class Sizes:
    """Draws the FLOPs and output elements of each kind of cell, once."""

    def __init__(
        self, rng: np.random.Generator, *, flops: float, output_bytes: float, spread: float, rows: int
    ) -> None:
        self.rng = rng
        self.flops = flops
        self.elements = output_bytes / _ELEMENT_BYTES
        self.spread = spread
        self.rows = rows
        self.drawn: dict[str, tuple[float, int]] = {}

    def of(self, cell: Cell) -> tuple[float, int]:
        """FLOPs and elements of the output; a weight's elements are `flops / (2 * rows)`."""
        if cell.kind not in self.drawn:
            work, size = (math.exp(self.spread * draw) for draw in self.rng.standard_normal(2).tolist())
            elements = max(1, round(self.elements * size * cell.scale))
            weight = max(1, round(self.flops * work * cell.scale / (2 * self.rows)))
            self.drawn[cell.kind] = (2.0 * self.rows * weight if cell.weight else float(elements), elements)
        return self.drawn[cell.kind]


class Step:
    """One step in the making: ops and tensors in order."""

    def __init__(self, cells: Sequence[Cell], sizes: Sizes) -> None:
        self.cells = cells
        self.sizes = sizes
        self.names: list[str] = []
        self.targets: list[str] = []
        self.modules: list[str] = []
        self.phases: list[int] = []
        self.flops: list[float] = []
        self.moved: list[float] = []
        self.reads: list[list[int]] = []
        self.parameter_bytes: dict[int, int] = {}
        self.state_bytes: dict[int, int] = {}
        self.tensor_op: list[int] = []
        self.tensor_output: list[int] = []
        self.elements: list[int] = []
        self.weights: dict[str, int] = {}  # tensor of each weight
        self.weight_gradients: dict[str, list[int]] = defaultdict(list)
        self.mutations: list[tuple[int, int]] = []
        self.classes: list[tuple[int, ...]] = []
        (self.input,) = self._add("input", "input", "", FORWARD, 0.0, [], [max(1, round(sizes.elements))])
        for cell in cells:
            if cell.weight and cell.weight not in self.weights:
                size = round(sizes.of(cell)[0] / (2 * sizes.rows))
                (tensor,) = self._add(cell.weight, "parameter", cell.module, FORWARD, 0.0, [], [size])
                self.weights[cell.weight] = tensor
                self.parameter_bytes[self.tensor_op[tensor]] = size * _ELEMENT_BYTES
        self.outputs = self._forward()
        read = {place for cell in cells for place in cell.reads}
        self.results = [tensor for place, tensor in enumerate(self.outputs) if place not in read]

    def _forward(self) -> list[int]:
        outputs: list[int] = []
        for place, cell in enumerate(self.cells):
            flops, elements = self.sizes.of(cell)
            reads = [outputs[i] for i in cell.reads] or [self.input]
            reads += [self.weights[cell.weight]] if cell.weight else []
            name = f"{cell.kind}.{place}.forward"
            outputs += self._add(name, cell.target, cell.module, FORWARD, flops, reads, [elements])
        return outputs

    def add_backward(self) -> None:
        """Adds the loss and, from the last cell to the first, gradients of inputs and of weights."""
        (loss,) = self._add("loss", "aten.mean.default", "", FORWARD, self._total(self.results), self.results, [1])
        seed = self._add(
            "loss.backward",
            "aten.expand.default",
            "",
            BACKWARD,
            self._total(self.results),
            [loss],
            [self.elements[tensor] for tensor in self.results],
        )
        self.results, sinks = [loss], self.results
        gradients: dict[int, list[int]] = defaultdict(list)  # by forward tensor
        for tensor, gradient in zip(sinks, seed, strict=True):
            gradients[tensor].append(gradient)
        for place in range(len(self.cells) - 1, -1, -1):
            cell, output = self.cells[place], self.outputs[place]
            flops, name = self.sizes.of(cell)[0], f"{cell.kind}.{place}.backward"
            upstream = self._sum(gradients.pop(output), name, cell.module)
            inputs = [self.outputs[i] for i in cell.reads]
            if inputs:
                kept = [self.weights[cell.weight]] if cell.weight else [output]
                made = self._add(
                    name,
                    cell.target if cell.weight else _backward_of(cell.target),
                    cell.module,
                    BACKWARD,
                    flops,
                    [upstream, *kept],
                    [self.elements[tensor] for tensor in inputs],
                )
                for tensor, gradient in zip(inputs, made, strict=True):
                    gradients[tensor].append(gradient)
            if cell.weight:
                reads = [upstream, *(inputs or [self.input])]
                self.weight_gradients[cell.weight] += self._add(
                    f"{name}.weight",
                    MATMUL,
                    cell.module,
                    BACKWARD,
                    flops,
                    reads,
                    [self.elements[self.weights[cell.weight]]],
                )

    def add_updates(self, optimizer: str) -> None:
        """Adds up each weight's gradients and updates it where it lives."""
        flops, kept = UPDATES[optimizer]
        for weight, tensor in self.weights.items():
            op, size = self.tensor_op[tensor], self.elements[tensor]
            gradient = self._sum(self.weight_gradients[weight], f"{weight}.gradient", self.modules[op])
            update = len(self.names)
            self._add(
                f"update_{weight}",
                f"update.{optimizer}",
                self.modules[op],
                UPDATE,
                flops * size,
                [tensor, gradient],
                [],
            )
            self.state_bytes[update] = kept * size * _ELEMENT_BYTES
            self.moved[update] = float((3 + 2 * kept) * size * _ELEMENT_BYTES)
            self.mutations.append((update, tensor))
            self.classes.append((op, self.tensor_op[gradient], update))

    def graph(self) -> OpGraph:
        """What has been added so far."""
        n = len(self.names)
        colocation = np.full(n, -1, dtype=np.int32)
        for number, members in enumerate(self.classes):
            colocation[list(members)] = number
        parameter_bytes = _column(self.parameter_bytes, n)
        has_gradient = np.isin(np.arange(n), [members[0] for members in self.classes])
        figures = zip(self.targets, self.flops, self.moved, strict=True)
        return OpGraph(
            names=tuple(self.names),
            targets=tuple(self.targets),
            modules=tuple(self.modules),
            signatures=tuple(f"{target}({flops:.0f} FLOPs, {moved:.0f} bytes)" for target, flops, moved in figures),
            phases=np.array(self.phases, dtype=np.int8),
            flops=np.array(self.flops, dtype=np.float64),
            bytes_moved=np.array(self.moved, dtype=np.float64),
            parameter_bytes=parameter_bytes,
            gradient_bytes=np.where(has_gradient, parameter_bytes, 0),
            state_bytes=_column(self.state_bytes, n),
            workspace_bytes=np.zeros(n, dtype=np.int64),
            colocation=colocation,
            tensor_op=np.array(self.tensor_op, dtype=np.int32),
            tensor_output=np.array(self.tensor_output, dtype=np.int32),
            tensor_bytes=np.array(self.elements, dtype=np.int64) * _ELEMENT_BYTES,
            tensor_shapes=tuple((elements,) for elements in self.elements),
            tensor_dtypes=("float32",) * len(self.elements),
            input_offsets=np.cumsum([0, *map(len, self.reads)]),
            input_tensors=np.array([tensor for read in self.reads for tensor in read], dtype=np.int32),
            mutation_op=np.array([op for op, _ in self.mutations], dtype=np.int32),
            mutation_tensor=np.array([tensor for _, tensor in self.mutations], dtype=np.int32),
            output_tensors=np.array(self.results, dtype=np.int32),
        )

    def _add(
        self,
        name: str,
        target: str,
        module: str,
        phase: int,
        flops: float,
        reads: Sequence[int],
        outputs: Sequence[int],
    ) -> list[int]:
        """The tensors of a new op with outputs of so many elements."""
        op, first = len(self.names), len(self.elements)
        distinct = sorted(set(reads))
        self.names.append(name)
        self.targets.append(target)
        self.modules.append(module)
        self.phases.append(phase)
        self.flops.append(flops)
        is_source = target in ("input", "parameter")
        self.moved.append(0.0 if is_source else _ELEMENT_BYTES * (self._total(distinct) + sum(outputs)))
        self.reads.append(distinct)
        self.tensor_op += [op] * len(outputs)
        self.tensor_output += range(len(outputs))
        self.elements += outputs
        return list(range(first, first + len(outputs)))

    def _sum(self, gradients: Sequence[int], name: str, module: str) -> int:
        """One tensor from several of one size, two at a time as autograd adds them."""
        total, *others = gradients
        for number, gradient in enumerate(others):
            size = self.elements[gradient]
            (total,) = self._add(f"{name}.sum{number}", ADD, module, BACKWARD, float(size), [total, gradient], [size])
        return total

    def _total(self, tensors: Sequence[int]) -> float:
        return float(sum(self.elements[tensor] for tensor in tensors))


def _backward_of(target: str) -> str:
    namespace, name, overload = target.split(".")
    return target if target == ADD else f"{namespace}.{name}_backward.{overload}"


def _column(values: dict[int, int], length: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    column = np.zeros(length, dtype=np.int64)
    column[list(values)] = list(values.values())
    return column
