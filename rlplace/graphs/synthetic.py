"""`synthetic`: a graph of a family, with drawn costs, and for a training step its mirror of gradients and updates.

The families: which cells there are, and which reads which. A cell is one forward op; its costs are drawn later.

From cells to an `OpGraph`: costs drawn, gradients mirrored, weights updated in place.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlplace.errors import InvalidValue, UnknownName
from rlplace.graphs.opgraph import BACKWARD, FORWARD, UPDATE, OpGraph
from rlplace.graphs.paths import topological_order

MAX_CELLS = 1_000_000
"""More forward ops than this are a mistake in the parameters."""


def synthetic(
    family: str,
    *,
    seed: int = 0,
    is_training: bool = True,
    optimizer: str = "adam",
    flops: float = 1e9,
    output_bytes: float = 1 << 20,
    spread: float = 1.0,
    rows: int = 64,
    **params: Any,
) -> OpGraph:
    """A synthetic graph; the same arguments give the same graph, to the bit.

    FLOPs and output sizes are lognormal around their medians, as those of ops of real models are. An op with a weight
    multiplies `rows` rows by it, so the weight has `flops / (2 * rows)` elements; other ops do one operation an
    element. With `is_training`, every forward op has its gradient twin (one for its inputs, one for its weight),
    gradients that several ops give are added up, and each weight has an in-place update that shares a device with it
    and with the op that makes its gradient, as in a captured step.

    Args:
        family: of `FAMILIES`; their docstrings say what `params` mean.
        seed: of all that is random.
        is_training: whether the step has a backward and updates.
        optimizer: `sgd`, `momentum`, `adam` or `adamw`.
        flops: median of an op with a weight.
        output_bytes: median of an op's output.
        spread: sigma of both lognormals; 0 makes all ops of a scale alike.
        rows: batch size times sequence length.
        **params: of the family.

    Raises:
        UnknownName: no such family, parameter or optimizer.
        InvalidValue: a parameter is of the wrong type or out of range.

    Example:
        >>> graph = synthetic("recurrent", layers=2, steps=3, seed=1)
        >>> graph.num_ops, int((graph.phases == 2).sum())
        (65, 3)
    """
    if family not in FAMILIES:
        raise UnknownName("synthetic family", family, FAMILIES)
    if optimizer not in UPDATES:
        raise UnknownName("optimizer", optimizer, UPDATES)
    where = f"synthetic {family}"
    known = {name: p.default for name, p in inspect.signature(FAMILIES[family]).parameters.items() if name != "rng"}
    for name, value in params.items():
        if name not in known:
            raise UnknownName(f"parameter of {where}", name, known)
        _check(name, value, known[name], where)
    for name, value, low in (("flops", flops, 1.0), ("output_bytes", output_bytes, 1.0), ("spread", spread, 0.0)):
        if not low <= value <= 1e15 or (name == "spread" and value > 3):
            raise InvalidValue(name, value, "a number from 0 to 3" if name == "spread" else "1 to 1e15", where=where)
    _check("rows", rows, 1, where)
    _check("seed", seed, 0, where)
    counts = [value for value in ({**known, **params}).values() if type(value) is int]
    if math.prod(counts) > MAX_CELLS:
        raise InvalidValue("parameters", math.prod(counts), f"a product of at most {MAX_CELLS}", where=where)
    rng = np.random.default_rng(seed)
    cells = FAMILIES[family](rng, **params)
    step = Step(cells, Sizes(rng, flops=flops, output_bytes=output_bytes, spread=spread, rows=rows))
    if is_training:
        step.add_backward()
        step.add_updates(optimizer)
    return step.graph()


def _check(name: str, value: object, default: object, where: str) -> None:
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise InvalidValue(name, value, "true or false", where=where)
    elif isinstance(default, int):
        low = 0 if name == "seed" else 1
        if type(value) is not int or value < low:
            raise InvalidValue(name, value, f"an integer >= {low}", where=where)
    elif not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise InvalidValue(name, value, "a number from 0 to 1", where=where)


MATMUL = "aten.mm.default"
ADD = "aten.add.Tensor"
RELU = "aten.relu.default"
SOFTMAX = "aten._softmax.default"
CONCAT = "aten.cat.default"
ATTENTION = "aten.scaled_dot_product_attention.default"


@dataclass(frozen=True, slots=True)
class Cell:
    """One forward op before it has costs.

    Cells of one `kind` cost the same; cells of one `weight` share that parameter.
    """

    reads: tuple[int, ...]
    """Cells before it; none reads the graph's input."""
    target: str
    module: str
    kind: str
    weight: str = ""
    scale: float = 1.0
    """Its work, relative to the others'."""


def layered(rng: np.random.Generator, *, layers: int = 10, width: int = 8, fan_in: int = 2) -> list[Cell]:
    """`layers` layers of `width` ops; each op reads `fan_in` random ops of the layer before.

    The ops of the first layer and half of the others (at random) have a weight of their own.
    """
    cells: list[Cell] = []
    for layer in range(layers):
        chosen = np.sort(np.argsort(rng.random((width, width)), axis=1)[:, :fan_in], axis=1) + (layer - 1) * width
        has_weight = rng.random(width) < 0.5
        for place in range(width):
            reads = chosen[place].tolist() if layer else []
            name = f"layer{layer}.{place}"
            is_matmul = bool(has_weight[place]) or not layer
            cells.append(
                Cell(
                    tuple(reads),
                    MATMUL if is_matmul else ADD if len(reads) > 1 else RELU,
                    f"layer{layer}",
                    name,
                    name if is_matmul else "",
                )
            )
    return cells


def fork_join(rng: np.random.Generator, *, stages: int = 5, width: int = 4, depth: int = 2) -> list[Cell]:
    """`stages` blocks in a row, each of `width` branches of `depth` weighted ops, between a fork and a join.

    The blocks of Inception and ResNeXt. A branch's work is drawn at random.
    """
    cells = [Cell((), MATMUL, "stem", "stem", "stem")]
    for stage in range(stages):
        fork, ends = len(cells) - 1, []
        for branch in range(width):
            scale = float(rng.lognormal(0.0, 0.5))
            last = fork
            for step in range(depth):
                name = f"stage{stage}.branch{branch}.{step}"
                cells.append(Cell((last,), MATMUL, f"stage{stage}.branch{branch}", name, name, scale))
                last = len(cells) - 1
            ends.append(last)
        cells.append(Cell(tuple(ends), CONCAT, f"stage{stage}", f"stage{stage}.join"))
    return cells


def series_parallel(rng: np.random.Generator, *, ops: int = 60, series: float = 0.6) -> list[Cell]:
    """A random two-terminal series-parallel graph of `ops` ops.

    Grown from one edge: each new op goes into a random edge, in series with probability `series` (0 to 1), else beside
    it. Half of the ops (at random) have a weight.
    """
    edges = [(0, 1)]
    for new in range(2, max(ops, 2)):
        place = int(rng.integers(len(edges)))
        source, sink = edges[place]
        if rng.random() < series:
            edges[place] = (source, new)
        else:
            edges.append((source, new))
        edges.append((new, sink))
    order = topological_order(max(ops, 2), edges)
    place_of = {op: place for place, op in enumerate(order)}
    reads: list[set[int]] = [set() for _ in order]
    for source, sink in edges:
        reads[place_of[sink]].add(place_of[source])
    cells = []
    for place, read in enumerate(reads):
        is_matmul = place == 0 or bool(rng.random() < 0.5)
        name = f"op{place}"
        target = MATMUL if is_matmul else ADD if len(read) > 1 else RELU
        cells.append(
            Cell(tuple(sorted(read)), target, f"block{place * 10 // len(order)}", name, name if is_matmul else "")
        )
    return cells


def recurrent(rng: np.random.Generator, *, layers: int = 2, steps: int = 10, head: bool = True) -> list[Cell]:
    """A grid of `layers` x `steps` recurrent cells, each a product and a gate, with one weight a layer.

    Cell (l, t) reads (l - 1, t) and (l, t - 1). With `head`, each step of the last layer has an output layer of four
    times the work, its weight shared over the steps (a softmax over the vocabulary).
    """
    cells: list[Cell] = []
    state: dict[tuple[int, int], int] = {}
    for step in range(steps):
        for layer in range(layers):
            reads = [state[at] for at in ((layer - 1, step), (layer, step - 1)) if at in state]
            module = f"layer{layer}"
            cells.append(Cell(tuple(sorted(reads)), MATMUL, module, f"{module}.mm", f"{module}.weight"))
            cells.append(Cell((len(cells) - 1,), "aten.sigmoid.default", module, f"{module}.gate"))
            state[layer, step] = len(cells) - 1
        if head:
            cells.append(Cell((len(cells) - 1,), MATMUL, "head", "head.mm", "head.weight", 4.0))
            cells.append(Cell((len(cells) - 1,), SOFTMAX, "head", "head.softmax"))
    return cells


def mixture_of_experts(
    rng: np.random.Generator, *, layers: int = 4, experts: int = 8, imbalance: float = 0.5
) -> list[Cell]:
    """`layers` blocks: attention, a router, `experts` two-layer experts side by side, and their sum.

    The work of an expert is lognormal with sigma `imbalance`: routers load them unevenly.
    """
    cells = [Cell((), MATMUL, "embed", "embed", "embed")]
    for layer in range(layers):
        base = f"layer{layer}"
        last = len(cells) - 1
        cells.append(Cell((last,), MATMUL, f"{base}.attention", f"{base}.qkv", f"{base}.qkv"))
        cells.append(Cell((last + 1,), ATTENTION, f"{base}.attention", f"{base}.attention"))
        cells.append(Cell((last, last + 2), ADD, base, f"{base}.residual"))
        stream = len(cells) - 1
        cells.append(Cell((stream,), MATMUL, f"{base}.router", f"{base}.router", f"{base}.router", 0.05))
        cells.append(Cell((len(cells) - 1,), SOFTMAX, f"{base}.router", f"{base}.gates"))
        gates, ends = len(cells) - 1, []
        for expert in range(experts):
            name = f"{base}.expert{expert}"
            scale = float(rng.lognormal(0.0, imbalance))
            cells.append(Cell((stream, gates), MATMUL, name, f"{name}.up", f"{name}.up", scale))
            cells.append(Cell((len(cells) - 1,), RELU, name, f"{name}.act", scale=scale))
            cells.append(Cell((len(cells) - 1,), MATMUL, name, f"{name}.down", f"{name}.down", scale))
            ends.append(len(cells) - 1)
        cells.append(Cell((stream, *ends), ADD, base, f"{base}.combine"))
    return cells


def encoder_decoder(rng: np.random.Generator, *, encoder: int = 6, decoder: int = 6, heads: int = 4) -> list[Cell]:
    """A stack of `encoder` blocks, and one of `decoder` blocks that all read the encoder's last output.

    A block is `heads` attention heads side by side, each with a weight, their sum, and a two-layer perceptron; a
    decoder block has heads over the encoder as well.
    """
    cells = [Cell((), MATMUL, "encoder.embed", "encoder.embed", "encoder.embed")]

    def attend(module: str, stream: int, memory: int) -> int:
        ends = []
        for head in range(heads):
            name = f"{module}.head{head}"
            cells.append(Cell((stream,), MATMUL, module, f"{name}.q", f"{name}.q", 1 / heads))
            reads = tuple(sorted({len(cells) - 1, memory}))
            cells.append(Cell(reads, ATTENTION, module, f"{name}.attention", scale=1 / heads))
            ends.append(len(cells) - 1)
        cells.append(Cell((stream, *ends), ADD, module, f"{module}.sum"))
        return len(cells) - 1

    def perceptron(module: str, stream: int) -> int:
        cells.append(Cell((stream,), MATMUL, module, f"{module}.up", f"{module}.up", 2.0))
        cells.append(Cell((len(cells) - 1,), RELU, module, f"{module}.act", scale=2.0))
        cells.append(Cell((len(cells) - 1,), MATMUL, module, f"{module}.down", f"{module}.down", 2.0))
        cells.append(Cell((stream, len(cells) - 1), ADD, module, f"{module}.residual"))
        return len(cells) - 1

    stream = 0
    for block in range(encoder):
        stream = attend(f"encoder.{block}.attention", stream, stream)
        stream = perceptron(f"encoder.{block}.mlp", stream)
    memory = stream
    cells.append(Cell((), MATMUL, "decoder.embed", "decoder.embed", "decoder.embed"))
    stream = len(cells) - 1
    for block in range(decoder):
        stream = attend(f"decoder.{block}.attention", stream, stream)
        stream = attend(f"decoder.{block}.cross", stream, memory)
        stream = perceptron(f"decoder.{block}.mlp", stream)
    return cells


FAMILIES: dict[str, Callable[..., list[Cell]]] = {
    "layered": layered,
    "fork_join": fork_join,
    "series_parallel": series_parallel,
    "recurrent": recurrent,
    "mixture_of_experts": mixture_of_experts,
    "encoder_decoder": encoder_decoder,
}


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
