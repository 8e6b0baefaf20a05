"""`load_graph` and `save_graph`: the format of a graph file by its ending, and where that says nothing, its content.

rlplace's own graph files: every array of an `OpGraph` under its name, repeated texts and shapes in tables.
`docs/graph-files.md` is the schema.

DOT for Graphviz: ops as boxes, grouped by module, coloured by phase.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import FileProblem, InvalidValue, UnknownName, check_known, refuse_if
from rlplace.files import MOST_GRAPH_VALUES, os_errors, read_json, write_text_atomic
from rlplace.graphs.formats.graphml import load_graphml, read_graphml, save_graphml
from rlplace.graphs.formats.networkx_graph import (
    Size,
    from_networkx,
    given_times_s,
    is_node_link,
    located,
    read_node_link,
    zero_cost,
)
from rlplace.graphs.formats.onnx_file import load_onnx
from rlplace.graphs.formats.published import load_dnn_partitioning, load_pipedream, pipedream_times_s
from rlplace.graphs.opgraph import DTYPES, LARGEST_COUNT, PHASES, OpGraph
from rlplace.records import described, read_record, record, shortened
from rlplace.say import clean

Format = Literal["json", "graphml", "onnx", "pipedream", "dot"]

ENDINGS: dict[str, Format] = {
    ".json": "json",
    ".graphml": "graphml",
    ".xml": "graphml",
    ".onnx": "onnx",
    ".dot": "dot",
    ".gv": "dot",
}


def load_graph(
    path: str | os.PathLike[str], *, dims: Mapping[str, int] | None = None, micro_batches: int = 1
) -> OpGraph:
    """The graph in a file: own JSON, dnn-partitioning JSON, node-link JSON of networkx, GraphML, ONNX or a profile.

    Warns of what the file leaves open (`OpGraph.notes`): ops of unknown cost, a graph without costs, unread attributes.

    Args:
        path: its ending determines the format (`ENDINGS`); for another ending, the first bytes determine it.
        dims: sizes of an ONNX model's dynamic dimensions (see `load_onnx`).
        micro_batches: for a layer profile, the number of micro-batches, each of the profiled size (see
            `load_pipedream`).

    Raises:
        FileProblem: the file is missing or malformed, or its format can only be written.
        InvalidValue: a field is missing or wrong.
        UnknownName: a field or a format that does not exist.
        MissingExtra: an ONNX file, and `onnx` is not installed.
    """
    path, kind = _known_kind(path, micro_batches)
    if dims and kind != "onnx":
        raise InvalidValue("dims", dict(dims), "none: only an ONNX model has dynamic dimensions", where=str(path))
    if kind == "dot":
        raise FileProblem(
            path, "DOT is for looking at: it does not hold a whole graph. Load a .json, .graphml or .onnx."
        )
    readers: dict[Format, Callable[[], OpGraph]] = {
        "json": lambda: _load_json(path),
        "onnx": lambda: load_onnx(path, dims=dims),
        "pipedream": lambda: load_pipedream(path, micro_batches),
        "graphml": lambda: load_graphml(path),
    }
    graph = readers[kind]()
    for note in graph.notes:
        warnings.warn(clean(f"{path}: {note}"), RuntimeWarning, stacklevel=2)
    return graph


def load_times_s(path: str | os.PathLike[str], *, micro_batches: int = 1) -> NDArray[np.float64] | None:
    """(N,) float64 seconds that a layer profile, or the nodes of a GraphML or node-link file give, as of `load_graph`.

    None where no node gives any, and for other formats, which hold no times.

    Args:
        path: as of `load_graph`.
        micro_batches: as of `load_graph`.

    Raises:
        FileProblem, InvalidValue, UnknownName: as `load_graph`; or a time is negative or no number.
    """
    path, kind = _known_kind(path, micro_batches)
    if kind == "pipedream":
        return pipedream_times_s(path, micro_batches)
    if kind == "graphml":
        return given_times_s(read_graphml(path), where=str(path))
    data = read_json(path, most_values=MOST_GRAPH_VALUES) if kind == "json" else None
    return given_times_s(read_node_link(data, where=str(path)), where=str(path)) if is_node_link(data) else None


def save_graph(graph: OpGraph, path: str | os.PathLike[str]) -> None:
    """Writes `graph` in the format that the path's ending names: `.json`, `.graphml` or `.dot`.

    JSON and GraphML contain everything except the program. DOT is for pictures, and has only the first ops of a large
    graph.

    Raises:
        UnknownName: no format has that ending, or it can only be read.
        FileProblem: the file cannot be written.
        InvalidValue: a name that the format cannot represent.
    """
    {"json": save_json, "graphml": save_graphml, "dot": save_dot}[format_to_write(path)](graph, path)


def format_to_write(path: str | os.PathLike[str]) -> Format:
    """The format in which `save_graph` would write to `path`.

    Raises:
        UnknownName: no format has that ending, or it can only be read.
    """
    kinds = {ending: kind for ending, kind in ENDINGS.items() if kind != "onnx"}
    ending = Path(path).suffix.lower()
    check_known("ending of a graph file to write", ending, kinds)
    return kinds[ending]


def is_dnn_partitioning(data: object) -> bool:
    """Whether parsed JSON is a dnn-partitioning workload: it says of how many devices, which no other form does."""
    return isinstance(data, dict) and bool({"maxFPGAs", "maxCPUs", "maxSizePerFPGA"} & set(data))


def _known_kind(path: str | os.PathLike[str], micro_batches: int) -> tuple[Path, Format]:
    path = Path(path)
    kind = ENDINGS.get(path.suffix.lower()) or _sniff(path)
    refuse_if(
        micro_batches != 1 and kind != "pipedream",
        "micro_batches",
        micro_batches,
        "1",
        where=str(path),
        hint="Of graph files only a layer profile can be cut; name the model that this graph was captured from.",
    )
    return path, kind


def _load_json(path: Path) -> OpGraph:
    data = read_json(path, most_values=MOST_GRAPH_VALUES)
    if is_dnn_partitioning(data):
        return load_dnn_partitioning(path).graph
    if is_node_link(data):
        return from_networkx(read_node_link(data, where=str(path)), where=str(path))
    if isinstance(data, dict) and {"cpus", "fpgas"} & set(data):
        raise FileProblem(path, "a split of a dnn-partitioning workload, expected a graph: load the workload itself.")
    if not isinstance(data, dict) or data.get("format", "rlplace-graph") != "rlplace-graph" or _FIELDS.isdisjoint(data):
        raise FileProblem(
            path,
            "no rlplace graph: its JSON is none of the forms that are known: rlplace's own (`format` is "
            '"rlplace-graph"), node-link of networkx (`nodes` with `id`, `edges`, and `directed`) and dnn-partitioning '
            "(`nodes`, `edges` and `maxFPGAs`). Other formats are GraphML (.graphml), ONNX (.onnx) and profiles of "
            "PipeDream (.txt): convert it to one of these.",
        )
    return graph_from_json(data, where=str(path))


def _sniff(path: Path) -> Format:
    if not path.is_file():
        raise FileProblem(path, "no such file.")
    with os_errors(path, "read"), path.open("rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    kinds: dict[bytes, Format] = {b"{": "json", b"<": "graphml", b"\x08": "onnx"}  # ONNX begins with field 1
    if start[:1] in kinds or b" -- " in start:
        return kinds.get(start[:1], "pipedream")
    raise UnknownName("ending of a graph file", path.suffix or path.name, ENDINGS)


SCHEMA = 1

Item = TypeVar("Item", bound=Hashable)

_LARGEST_INDEX = 2**31 - 1
_TEXTS = ("targets", "modules", "signatures", "tensor_dtypes")
_PARTS = ("micro_batch", "shard")
"""Fields that are there only where the batch is cut, and where ops are split."""
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("flops", "bytes_moved"), (0, 1e300)),
    "phases": (0, len(PHASES) - 1),
    "colocation": (-1, _LARGEST_INDEX),
    **dict.fromkeys(("tensor_op", "tensor_output", "input_offsets", "input_tensors"), (0, _LARGEST_INDEX)),
    **dict.fromkeys(("mutation_op", "mutation_tensor", "output_tensors"), (0, _LARGEST_INDEX)),
    **dict.fromkeys(("parameter_bytes", "gradient_bytes", "state_bytes"), (0, LARGEST_COUNT)),
    **dict.fromkeys(("workspace_bytes", "tensor_bytes"), (0, LARGEST_COUNT)),
    **dict.fromkeys(_PARTS, (-1, _LARGEST_INDEX)),
}
"""Arrays of numbers, in the order of the file, and the range of their entries."""
_HEAD = ("format", "schema", "fingerprint", "strings", "shapes", "names", "notes")
_FIELDS = frozenset({"format", *_TEXTS, *_RANGES, "tensor_shapes"})
"""Some of these are in each of our files, and in none of others."""


@record(frozen=True, slots=True)
class _Head:
    """The content of a graph file, without the arrays of numbers."""

    format: Literal["rlplace-graph"]
    schema: Literal[1]
    strings: tuple[str, ...]
    shapes: tuple[tuple[Size, ...], ...]
    names: tuple[str, ...]
    fingerprint: str | None = None
    notes: tuple[str, ...] = ()


def save_json(graph: OpGraph, path: str | os.PathLike[str]) -> None:
    """Writes `graph` as JSON, whole or not at all; its program is not kept.

    Raises:
        FileProblem: the file cannot be written.
    """
    strings, _ = _table(text for name in _TEXTS for text in getattr(graph, name))
    place = {text: number for number, text in enumerate(strings)}
    shapes, shape_column = _table(graph.tensor_shapes)
    data: dict[str, Any] = dict(
        zip(_HEAD, ("rlplace-graph", SCHEMA, graph.fingerprint, strings, shapes, graph.names), strict=False)
    )
    data |= {name: [place[text] for text in getattr(graph, name)] for name in _TEXTS}
    data |= {"notes": graph.notes} if graph.notes else {}
    left_out = {name for name in _PARTS if not np.any(getattr(graph, name) >= 0)}
    data |= {name: getattr(graph, name).tolist() for name in _RANGES if name not in left_out}
    data["tensor_shapes"] = shape_column
    lines = (
        f"{json.dumps(key)}:{json.dumps(value, separators=(',', ':'), allow_nan=False)}" for key, value in data.items()
    )
    write_text_atomic(path, "{\n" + ",\n".join(lines) + "\n}\n")


def graph_from_json(data: object, *, where: str) -> OpGraph:
    """The graph in a parsed file that `save_json` wrote; `where` names the file.

    Raises:
        FileProblem: the graph does not match its fingerprint.
        InvalidValue: a field is missing or wrong.
        UnknownName: a field that does not exist.
    """
    if not isinstance(data, dict):
        raise InvalidValue("file", described(data), "a JSON object", where=where)
    schema = data.get("schema", SCHEMA)
    refuse_if(
        schema != SCHEMA or type(schema) is not int,
        "schema",
        described(schema),
        f"{SCHEMA}, the one that this version of rlplace reads",
        where=where,
    )
    names = {*_HEAD, *_TEXTS, *_RANGES, "tensor_shapes"}
    if unknown := next((name for name in data if name not in names), None):
        raise UnknownName(f"field in {where}", shortened(unknown), names)
    head = read_record(_Head, {name: data[name] for name in _HEAD if name in data}, where)
    columns: dict[str, Any] = {name: _looked_up(data, name, head.strings, where) for name in _TEXTS}
    columns |= {name: _numbers(data, name, where) for name in _RANGES if name in data or name not in _PARTS}
    columns["tensor_shapes"] = _looked_up(data, "tensor_shapes", head.shapes, where)
    with located(where):
        graph = OpGraph(names=head.names, **columns)
    if head.fingerprint not in (None, graph.fingerprint):
        raise FileProblem(
            where,
            f"its fingerprint is {described(head.fingerprint)!r}, but its content's is {graph.fingerprint!r}: the file "
            "was damaged or edited. Remove the field `fingerprint` if you edited it.",
        )
    return replace(graph, notes=head.notes or zero_cost(graph, graph.flops + graph.bytes_moved))


def _table(items: Iterable[Item]) -> tuple[list[Item], list[int]]:
    """Distinct items in order of appearance, and each item's place among them."""
    places: dict[Item, int] = {}
    column = [places.setdefault(item, len(places)) for item in items]
    return list(places), column


def _looked_up(data: Mapping[str, Any], name: str, table: Sequence[Item], where: str) -> tuple[Item, ...]:
    """The entries of a table whose indices a field holds."""
    return tuple(map(table.__getitem__, _numbers(data, name, where, high=len(table) - 1).tolist()))


def _numbers(data: Mapping[str, Any], name: str, where: str, high: float | None = None) -> NDArray[Any]:
    """A field that holds a list of numbers, as its array."""
    low, highest = _RANGES.get(name, (0, high))
    dtype = DTYPES.get(name, np.int64)
    types, words = ({int, float}, "numbers") if dtype is np.float64 else ({int}, "integers")
    values = data.get(name)
    if not isinstance(values, list):
        raise InvalidValue(name, described(values) if name in data else "missing", f"a list of {words}", where=where)
    # the whole list at once: a file may hold millions of entries
    if not set(map(type, values)) <= types or (values and not low <= min(values) <= max(values) <= highest):
        raise InvalidValue(
            name,
            described(next(value for value in values if type(value) not in types or not low <= value <= highest)),
            f"{words} in {low:g}..{highest:g}",
            where=where,
        )
    return np.array(values, dtype=dtype)


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
        refuse_if(value < 1, field, value, "at least 1", where="DOT")
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
        boxes = [_box(graph, op) for op in ops]
        head = f"subgraph cluster_{number} {{ label={_quoted(module)}; color=gray;"
        lines += [head, *boxes, "}"] if module else boxes
    lines += _arrows(graph, num_shown)
    if num_shown < graph.num_ops:
        lines.append(f'rest [label="... and {graph.num_ops - num_shown} more ops" shape=plaintext style=""];')
    return "\n".join([*lines, "}", ""])


def _box(graph: OpGraph, op: int) -> str:
    colour = SOURCE_COLOUR if graph.is_source[op] else COLOURS[PHASES[graph.phases[op]]]
    slice_line = f"\nmicro-batch {graph.micro_batch[op]}" if graph.micro_batch[op] >= 0 else ""
    slice_line += f"\nshard {graph.shard[op]}" if graph.shard[op] >= 0 else ""
    label = _quoted(f"{graph.names[op]}\n{graph.targets[op]}{slice_line}")
    return f'n{op} [label={label} fillcolor="{colour}"];'


def _arrows(graph: OpGraph, num_shown: int) -> list[str]:
    tensors = graph.input_tensors[: graph.input_offsets[num_shown]]
    total: dict[tuple[int, int], int] = defaultdict(int)
    columns = (graph.tensor_op[tensors], graph.edge_op[: len(tensors)], graph.tensor_bytes[tensors])
    for producer, reader, size in zip(*(column.tolist() for column in columns), strict=True):
        total[producer, reader] += size
    return [f'n{i} -> n{j} [tooltip="{num_bytes} bytes"];' for (i, j), num_bytes in total.items()]


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{"".join(c for c in escaped if c.isprintable())}"'
