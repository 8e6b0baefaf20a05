"""The families: which cells there are, and which reads which. A cell is one forward op; its costs are drawn later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rlplace.graphs.paths import topological_order

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
