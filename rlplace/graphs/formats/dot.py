"""DOT for Graphviz: ops as boxes, grouped by module, coloured by phase."""

from __future__ import annotations

import os
from collections import defaultdict

from rlplace.errors import InvalidValue
from rlplace.files import write_text_atomic
from rlplace.graphs.opgraph import PHASES, OpGraph

COLOURS = dict(zip(PHASES, ("#cfe3f7", "#fbd9b5", "#d3ecc8"), strict=True))
"""Fill of a phase's ops."""
SOURCE_COLOUR = "#e6e6e6"
MAX_OPS = 500
"""Graphviz lays out a few hundred boxes; more are neither quick nor readable."""


def save_dot(graph: OpGraph, path: str | os.PathLike[str], *, max_ops: int = MAX_OPS, depth: int = 3) -> None:
    """Writes `to_dot(graph)`, whole or not at all.

    Raises:
        FileProblem: the file cannot be written.
        InvalidValue: `max_ops` or `depth` is less than 1.
    """
    write_text_atomic(path, to_dot(graph, max_ops=max_ops, depth=depth))


def to_dot(graph: OpGraph, *, max_ops: int = MAX_OPS, depth: int = 3) -> str:
    """The graph as DOT text.

    Args:
        graph: N ops.
        max_ops: only the first that many ops are shown, and a box that counts the rest.
        depth: modules are told apart down to this many parts of their path.

    Raises:
        InvalidValue: `max_ops` or `depth` is less than 1.
    """
    for field, value in (("max_ops", max_ops), ("depth", depth)):
        if value < 1:
            raise InvalidValue(field, value, "at least 1", where="DOT")
    num_shown = min(max_ops, graph.num_ops)
    clusters: dict[str, list[int]] = defaultdict(list)
    for op in range(num_shown):
        clusters[".".join(graph.modules[op].split(".")[:depth])].append(op)
    lines = [
        "digraph rlplace {",
        'node [shape=box style="filled,rounded" fontname=Helvetica fontsize=10];',
        "rankdir=TB;",
    ]
    for number, (module, ops) in enumerate(clusters.items()):
        if module:
            lines.append(f"subgraph cluster_{number} {{ label={_quoted(module)}; color=gray;")
        lines += [_box(graph, op) for op in ops]
        if module:
            lines.append("}")
    lines += _arrows(graph, num_shown)
    if num_shown < graph.num_ops:
        lines.append(f'rest [label="... and {graph.num_ops - num_shown} more ops" shape=plaintext style=""];')
    return "\n".join([*lines, "}", ""])


def _box(graph: OpGraph, op: int) -> str:
    colour = SOURCE_COLOUR if graph.is_source[op] else COLOURS[PHASES[graph.phases[op]]]
    slice_line = f"\nmicro-batch {graph.micro_batch[op]}" if graph.micro_batch[op] >= 0 else ""
    label = _quoted(f"{graph.names[op]}\n{graph.targets[op]}{slice_line}")
    return f'n{op} [label={label} fillcolor="{colour}"];'


def _arrows(graph: OpGraph, num_shown: int) -> list[str]:
    num_edges = int(graph.input_offsets[num_shown])
    total: dict[tuple[int, int], int] = defaultdict(int)
    producers, sizes = graph.tensor_op[graph.input_tensors[:num_edges]], graph.tensor_bytes
    for tensor, producer, reader in zip(
        graph.input_tensors[:num_edges].tolist(), producers.tolist(), graph.edge_op[:num_edges].tolist(), strict=True
    ):
        total[producer, reader] += int(sizes[tensor])
    return [f'n{i} -> n{j} [tooltip="{num_bytes} bytes"];' for (i, j), num_bytes in total.items()]


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{"".join(c for c in escaped if c.isprintable())}"'
