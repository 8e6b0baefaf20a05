"""`synthetic`: a graph of a family, with drawn costs, and for a training step its mirror of gradients and updates.

The families: which cells there are, and which reads which. A cell is one forward op; its costs are drawn later.

From cells to an `OpGraph`: costs drawn, gradients mirrored, weights updated in place.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlplace.errors import check_known, refuse_if
from rlplace.graphs.opgraph import BACKWARD, UPDATE, GraphBuilder, OpGraph, OpRow
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
        family: of `FAMILIES`; their docstrings describe `params`.
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
    check_known("synthetic family", family, FAMILIES)
    check_known("optimizer", optimizer, UPDATES)
    where = f"synthetic {family}"
    known = {name: p.default for name, p in inspect.signature(FAMILIES[family]).parameters.items() if name != "rng"}
    for name, value in params.items():
        check_known(f"parameter of {where}", name, known)
        _check(name, value, known[name], where)
    for name, value, low in (("flops", flops, 1.0), ("output_bytes", output_bytes, 1.0), ("spread", spread, 0.0)):
        refuse_if(
            not low <= value <= 1e15 or (name == "spread" and value > 3),
            name,
            value,
            "a number from 0 to 3" if name == "spread" else "1 to 1e15",
            where=where,
        )
    _check("rows", rows, 1, where)
    _check("seed", seed, 0, where)
    counts = [value for value in ({**known, **params}).values() if type(value) is int]
    refuse_if(
        math.prod(counts) > MAX_CELLS, "parameters", math.prod(counts), f"a product of at most {MAX_CELLS}", where=where
    )
    rng = np.random.default_rng(seed)
    cells = FAMILIES[family](rng, **params)
    costs = _draw_costs(cells, rng, flops=flops, output_bytes=output_bytes, spread=spread, rows=rows)
    step = Step(cells, costs, input_elements=max(1, round(output_bytes / _ELEMENT_BYTES)), rows=rows)
    if is_training:
        step.add_backward()
        step.add_updates(optimizer)
    return step.graph(step.results)


def _check(name: str, value: object, default: object, where: str) -> None:
    low = 0 if name == "seed" else 1
    if isinstance(default, bool):
        is_right, expected = isinstance(value, bool), "true or false"
    elif isinstance(default, int):
        is_right, expected = type(value) is int and value >= low, f"an integer >= {low}"
    else:
        is_right, expected = type(value) in (int, float) and 0 <= value <= 1, "a number from 0 to 1"  # type: ignore[operator]
    refuse_if(not is_right, name, value, expected, where=where)


MATMUL = "aten.mm.default"
ADD = "aten.add.Tensor"
RELU = "aten.relu.default"
SOFTMAX = "aten._softmax.default"
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


class Cells(list[Cell]):
    """The cells of a graph, in a topological order."""

    def add(
        self, reads: Iterable[int], target: str, module: str, kind: str, weight: str = "", scale: float = 1.0
    ) -> int:
        """Adds a cell, whose place comes back; see `Cell`."""
        self.append(Cell(tuple(reads), target, module, kind, weight, scale))
        return len(self) - 1


def layered(rng: np.random.Generator, *, layers: int = 10, width: int = 8, fan_in: int = 2) -> Cells:
    """`layers` layers of `width` ops; each op reads `fan_in` random ops of the layer before.

    The ops of the first layer and half of the others (at random) have a weight of their own.
    """
    cells = Cells()
    for layer in range(layers):
        chosen = np.sort(np.argsort(rng.random((width, width)), axis=1)[:, :fan_in], axis=1) + (layer - 1) * width
        has_weight = (rng.random(width) < 0.5) | (layer == 0)
        for place in range(width):
            reads, name = chosen[place].tolist() if layer else [], f"layer{layer}.{place}"
            _add_maybe_weighted(cells, reads, f"layer{layer}", name, has_weight=bool(has_weight[place]))
    return cells


def _add_maybe_weighted(cells: Cells, reads: Sequence[int], module: str, name: str, *, has_weight: bool) -> None:
    target = MATMUL if has_weight else ADD if len(reads) > 1 else RELU
    cells.add(reads, target, module, name, name if has_weight else "")


def fork_join(rng: np.random.Generator, *, stages: int = 5, width: int = 4, depth: int = 2) -> Cells:
    """`stages` blocks in a row, each of `width` branches of `depth` weighted ops, between a fork and a join.

    The blocks of Inception and ResNeXt. A branch's work is drawn at random.
    """
    cells = Cells()
    last = cells.add((), MATMUL, "stem", "stem", "stem")
    for stage in range(stages):
        fork, ends = last, []
        for branch in range(width):
            scale, last = float(rng.lognormal(0.0, 0.5)), fork
            for step in range(depth):
                name = f"stage{stage}.branch{branch}.{step}"
                last = cells.add((last,), MATMUL, f"stage{stage}.branch{branch}", name, name, scale)
            ends.append(last)
        last = cells.add(ends, "aten.cat.default", f"stage{stage}", f"stage{stage}.join")
    return cells


def series_parallel(rng: np.random.Generator, *, ops: int = 60, series: float = 0.6) -> Cells:
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
    cells = Cells()
    for place, read in enumerate(reads):
        has_weight = place == 0 or bool(rng.random() < 0.5)
        _add_maybe_weighted(
            cells, sorted(read), f"block{place * 10 // len(order)}", f"op{place}", has_weight=has_weight
        )
    return cells


def recurrent(rng: np.random.Generator, *, layers: int = 2, steps: int = 10, head: bool = True) -> Cells:
    """A grid of `layers` x `steps` recurrent cells, each a product and a gate, with one weight a layer.

    Cell (l, t) reads (l - 1, t) and (l, t - 1). With `head`, each step of the last layer has an output layer of four
    times the work, its weight shared over the steps (a softmax over the vocabulary).
    """
    cells = Cells()
    state: dict[tuple[int, int], int] = {}
    for step in range(steps):
        for layer in range(layers):
            reads = [state[at] for at in ((layer - 1, step), (layer, step - 1)) if at in state]
            module = f"layer{layer}"
            product = cells.add(sorted(reads), MATMUL, module, f"{module}.mm", f"{module}.weight")
            state[layer, step] = cells.add((product,), "aten.sigmoid.default", module, f"{module}.gate")
        if head:
            product = cells.add((len(cells) - 1,), MATMUL, "head", "head.mm", "head.weight", 4.0)
            cells.add((product,), SOFTMAX, "head", "head.softmax")
    return cells


def mixture_of_experts(rng: np.random.Generator, *, layers: int = 4, experts: int = 8, imbalance: float = 0.5) -> Cells:
    """`layers` blocks: attention, a router, `experts` two-layer experts side by side, and their sum.

    The work of an expert is lognormal with sigma `imbalance`: routers load them unevenly.
    """
    cells = Cells()
    last = cells.add((), MATMUL, "embed", "embed", "embed")
    for layer in range(layers):
        base = f"layer{layer}"
        qkv = cells.add((last,), MATMUL, f"{base}.attention", f"{base}.qkv", f"{base}.qkv")
        attended = cells.add((qkv,), ATTENTION, f"{base}.attention", f"{base}.attention")
        stream = cells.add((last, attended), ADD, base, f"{base}.residual")
        router = cells.add((stream,), MATMUL, f"{base}.router", f"{base}.router", f"{base}.router", 0.05)
        gates = cells.add((router,), SOFTMAX, f"{base}.router", f"{base}.gates")
        ends = []
        for expert in range(experts):
            name, scale = f"{base}.expert{expert}", float(rng.lognormal(0.0, imbalance))
            up = cells.add((stream, gates), MATMUL, name, f"{name}.up", f"{name}.up", scale)
            act = cells.add((up,), RELU, name, f"{name}.act", scale=scale)
            ends.append(cells.add((act,), MATMUL, name, f"{name}.down", f"{name}.down", scale))
        last = cells.add((stream, *ends), ADD, base, f"{base}.combine")
    return cells


def encoder_decoder(rng: np.random.Generator, *, encoder: int = 6, decoder: int = 6, heads: int = 4) -> Cells:
    """A stack of `encoder` blocks, and one of `decoder` blocks that all read the encoder's last output.

    A block is `heads` attention heads side by side, each with a weight, their sum, and a two-layer perceptron; a
    decoder block has heads over the encoder as well.
    """
    cells = Cells()

    def head(name: str, module: str, stream: int, memory: int) -> int:
        query = cells.add((stream,), MATMUL, module, f"{name}.q", f"{name}.q", 1 / heads)
        return cells.add(sorted({query, memory}), ATTENTION, module, f"{name}.attention", scale=1 / heads)

    def attend(module: str, stream: int, memory: int) -> int:
        ends = [head(f"{module}.head{number}", module, stream, memory) for number in range(heads)]
        return cells.add((stream, *ends), ADD, module, f"{module}.sum")

    def perceptron(module: str, stream: int) -> int:
        up = cells.add((stream,), MATMUL, module, f"{module}.up", f"{module}.up", 2.0)
        act = cells.add((up,), RELU, module, f"{module}.act", scale=2.0)
        down = cells.add((act,), MATMUL, module, f"{module}.down", f"{module}.down", 2.0)
        return cells.add((stream, down), ADD, module, f"{module}.residual")

    stream = cells.add((), MATMUL, "encoder.embed", "encoder.embed", "encoder.embed")
    for block in range(encoder):
        stream = perceptron(f"encoder.{block}.mlp", attend(f"encoder.{block}.attention", stream, stream))
    memory = stream
    stream = cells.add((), MATMUL, "decoder.embed", "decoder.embed", "decoder.embed")
    for block in range(decoder):
        stream = attend(f"decoder.{block}.cross", attend(f"decoder.{block}.attention", stream, stream), memory)
        stream = perceptron(f"decoder.{block}.mlp", stream)
    return cells


FAMILIES: dict[str, Callable[..., Cells]] = {
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


def _draw_costs(
    cells: Sequence[Cell], rng: np.random.Generator, *, flops: float, output_bytes: float, spread: float, rows: int
) -> list[tuple[float, int]]:
    """FLOPs and output elements of each cell, drawn once a kind; a weight's elements are `flops / (2 * rows)`."""
    drawn: dict[str, tuple[float, int]] = {}
    for cell in sorted(cells, key=lambda cell: not cell.weight):  # as in the graph, weights come first
        if cell.kind not in drawn:
            work, size = (math.exp(spread * draw) for draw in rng.standard_normal(2).tolist())
            elements = max(1, round(output_bytes / _ELEMENT_BYTES * size * cell.scale))
            weight = max(1, round(flops * work * cell.scale / (2 * rows)))
            drawn[cell.kind] = (2.0 * rows * weight if cell.weight else float(elements), elements)
    return [drawn[cell.kind] for cell in cells]


class Step(GraphBuilder):
    """One step in the making: ops and tensors in order.

    Args:
        cells: in a topological order.
        costs: FLOPs and output elements of each.
        input_elements: of the graph's input.
        rows: that each weight multiplies.
    """

    def __init__(
        self, cells: Sequence[Cell], costs: Sequence[tuple[float, int]], *, input_elements: int, rows: int
    ) -> None:
        super().__init__()
        self.cells, self.costs = cells, costs
        self.weights: dict[str, int] = {}  # tensor of each weight
        self.weight_gradients: dict[str, list[int]] = defaultdict(list)
        (self.input,) = self._add(OpRow("input", "input"), [input_elements])
        for cell, (flops, _) in zip(cells, costs, strict=True):
            if cell.weight and cell.weight not in self.weights:
                size = round(flops / (2 * rows))
                row = OpRow(cell.weight, "parameter", cell.module, parameter_bytes=size * _ELEMENT_BYTES)
                (self.weights[cell.weight],) = self._add(row, [size])
        self.outputs: list[int] = []
        for place, (cell, (flops, elements)) in enumerate(zip(cells, costs, strict=True)):
            reads = [self.outputs[i] for i in cell.reads] or [self.input]
            reads += [self.weights[cell.weight]] if cell.weight else []
            row = OpRow(f"{cell.kind}.{place}.forward", cell.target, cell.module, reads=reads, flops=flops)
            self.outputs += self._add(row, [elements])
        read = {place for cell in cells for place in cell.reads}
        self.results = [tensor for place, tensor in enumerate(self.outputs) if place not in read]

    def add_backward(self) -> None:
        """Adds the loss and, from the last cell to the first, gradients of inputs and of weights."""
        flops, sinks = float(sum(self._elements(self.results))), self.results
        self.results = self._add(OpRow("loss", "aten.mean.default", reads=sinks, flops=flops), [1])
        seed = OpRow("loss.backward", "aten.expand.default", "", BACKWARD, reads=self.results, flops=flops)
        gradients: dict[int, list[int]] = defaultdict(list)  # by forward tensor
        for tensor, gradient in zip(sinks, self._add(seed, self._elements(sinks)), strict=True):
            gradients[tensor].append(gradient)
        for place in range(len(self.cells) - 1, -1, -1):
            cell, output = self.cells[place], self.outputs[place]
            flops, name = self.costs[place][0], f"{cell.kind}.{place}.backward"
            upstream = self._sum(gradients.pop(output), name, cell.module)
            inputs, weight = [self.outputs[i] for i in cell.reads], self.weights.get(cell.weight)
            if inputs:
                target = _backward_of(cell.target) if weight is None else cell.target
                reads = [upstream, output if weight is None else weight]
                row = OpRow(name, target, cell.module, BACKWARD, reads=reads, flops=flops)
                for tensor, gradient in zip(inputs, self._add(row, self._elements(inputs)), strict=True):
                    gradients[tensor].append(gradient)
            if weight is not None:
                reads = [upstream, *(inputs or [self.input])]
                row = OpRow(f"{name}.weight", MATMUL, cell.module, BACKWARD, reads=reads, flops=flops)
                self.weight_gradients[cell.weight] += self._add(row, self._elements([weight]))

    def add_updates(self, optimizer: str) -> None:
        """Adds up each weight's gradients and updates it where it lives."""
        flops, kept = UPDATES[optimizer]
        for weight, tensor in self.weights.items():
            parameter, size = self.ops[self.tensors[tensor].op], self.tensors[tensor].bytes
            gradient = self._sum(self.weight_gradients[weight], f"{weight}.gradient", parameter.module)
            parameter.gradient_bytes = size
            row = OpRow(
                f"update_{weight}",
                f"update.{optimizer}",
                parameter.module,
                UPDATE,
                reads=[tensor, gradient],
                flops=flops * (size // _ELEMENT_BYTES),
                bytes_moved=float((3 + 2 * kept) * size),
                state_bytes=kept * size,
            )
            self._add(row, [])
            self.mutations.append((len(self.ops) - 1, tensor))
            self.together.append((self.tensors[tensor].op, self.tensors[gradient].op, len(self.ops) - 1))

    def _add(self, row: OpRow, elements: Sequence[int]) -> list[int]:
        """The tensors of a new op with outputs of so many elements; it moves its inputs and outputs once."""
        made = self.add_outputs(
            self.add(row), (_ELEMENT_BYTES * each for each in elements), item_bytes=_ELEMENT_BYTES, dtype="float32"
        )
        if row.target not in ("input", "parameter") and not row.bytes_moved:
            row.bytes_moved = float(self.bytes_of([*row.reads, *made]))
        row.signature = f"{row.target}({row.flops:.0f} FLOPs, {row.bytes_moved:.0f} bytes)"
        return made

    def _sum(self, gradients: Sequence[int], name: str, module: str) -> int:
        """One tensor from several of one size, two at a time as autograd adds them."""
        total, *others = gradients
        for number, gradient in enumerate(others):
            (size,) = self._elements([gradient])
            row = OpRow(f"{name}.sum{number}", ADD, module, BACKWARD, reads=[total, gradient], flops=float(size))
            (total,) = self._add(row, [size])
        return total

    def _elements(self, tensors: Sequence[int]) -> list[int]:
        return [self.tensors[tensor].bytes // _ELEMENT_BYTES for tensor in tensors]


def _backward_of(target: str) -> str:
    namespace, name, overload = target.split(".")
    return target if target == ADD else f"{namespace}.{name}_backward.{overload}"
