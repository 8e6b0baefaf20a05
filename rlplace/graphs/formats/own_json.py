"""rlplace's own graph files: every array of an `OpGraph` under its name, repeated texts and shapes in tables.

`docs/graph-files.md` is the schema.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rlplace.errors import FileProblem, InvalidValue, UnknownName
from rlplace.files import write_text_atomic
from rlplace.graphs.opgraph import DTYPES, LARGEST_COUNT, PHASES, OpGraph
from rlplace.records import Count, described, read_record, record, shortened

SCHEMA = 1

Item = TypeVar("Item", bound=Hashable)
Size = Annotated[Count, Field(le=LARGEST_COUNT)]

_LARGEST_INDEX = 2**31 - 1
_TEXTS = ("targets", "modules", "signatures", "tensor_dtypes")
_MICRO_BATCH = "micro_batch"
"""A field that is there only where the batch is cut."""
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("flops", "bytes_moved"), (0, 1e300)),
    "phases": (0, len(PHASES) - 1),
    "colocation": (-1, _LARGEST_INDEX),
    **dict.fromkeys(("tensor_op", "tensor_output", "input_offsets", "input_tensors"), (0, _LARGEST_INDEX)),
    **dict.fromkeys(("mutation_op", "mutation_tensor", "output_tensors"), (0, _LARGEST_INDEX)),
    **dict.fromkeys(("parameter_bytes", "gradient_bytes", "state_bytes"), (0, LARGEST_COUNT)),
    **dict.fromkeys(("workspace_bytes", "tensor_bytes"), (0, LARGEST_COUNT)),
    _MICRO_BATCH: (-1, _LARGEST_INDEX),
}
"""Arrays of numbers, in the order of the file, and the range of their entries."""
_HEAD = ("format", "schema", "fingerprint", "strings", "shapes", "names")


@record(frozen=True, slots=True)
class _Head:
    """What a graph file holds besides arrays of numbers."""

    format: Literal["rlplace-graph"]
    schema: Literal[1]
    strings: tuple[str, ...]
    shapes: tuple[tuple[Size, ...], ...]
    names: tuple[str, ...]
    fingerprint: str | None = None


def save_json(graph: OpGraph, path: str | os.PathLike[str]) -> None:
    """Writes `graph` as JSON, whole or not at all; its program is not kept.

    Raises:
        FileProblem: the file cannot be written.
    """
    strings, columns = _table(text for name in _TEXTS for text in getattr(graph, name))
    shapes, shape_column = _table(graph.tensor_shapes)
    data: dict[str, Any] = dict(
        zip(_HEAD, ("rlplace-graph", SCHEMA, graph.fingerprint, strings, shapes, graph.names), strict=True)
    )
    for name in _TEXTS:
        length = len(getattr(graph, name))
        data[name], columns = columns[:length], columns[length:]
    is_cut = bool(np.any(graph.micro_batch >= 0))
    data |= {name: getattr(graph, name).tolist() for name in _RANGES if is_cut or name != _MICRO_BATCH}
    data["tensor_shapes"] = shape_column
    lines = (
        f"{json.dumps(key)}:{json.dumps(value, separators=(',', ':'), allow_nan=False)}" for key, value in data.items()
    )
    write_text_atomic(path, "{\n" + ",\n".join(lines) + "\n}\n")


def graph_from_json(data: object, *, where: str) -> OpGraph:
    """The graph in a parsed file that `save_json` wrote; `where` names the file.

    Raises:
        FileProblem: it is not what its fingerprint says.
        InvalidValue: a field is missing or wrong.
        UnknownName: a field that does not exist.
    """
    if not isinstance(data, dict):
        raise InvalidValue("file", described(data), "a JSON object", where=where)
    schema = data.get("schema", SCHEMA)
    if schema != SCHEMA or type(schema) is not int:
        raise InvalidValue(
            "schema", described(schema), f"{SCHEMA}, the one that this version of rlplace reads", where=where
        )
    names = {*_HEAD, *_TEXTS, *_RANGES, "tensor_shapes"}
    if unknown := next((name for name in data if name not in names), None):
        raise UnknownName(f"field in {where}", shortened(unknown), names)
    head = read_record(_Head, {name: data[name] for name in _HEAD if name in data}, where)
    columns: dict[str, Any] = {name: _looked_up(data, name, head.strings, where) for name in _TEXTS}
    columns |= {name: _numbers(data, name, where) for name in _RANGES if name in data or name != _MICRO_BATCH}
    columns["tensor_shapes"] = _looked_up(data, "tensor_shapes", head.shapes, where)
    try:
        graph = OpGraph(names=head.names, **columns)
    except InvalidValue as error:
        raise InvalidValue(error.field, error.actual, error.expected, where=where) from error
    if head.fingerprint not in (None, graph.fingerprint):
        raise FileProblem(
            where,
            f"its fingerprint is {described(head.fingerprint)!r}, but its content's is {graph.fingerprint!r}: the file "
            "was damaged or edited. Remove the field `fingerprint` if you edited it.",
        )
    return graph


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
