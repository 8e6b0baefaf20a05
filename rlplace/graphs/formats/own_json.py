"""rlplace's own graph files: every array of an `OpGraph` under its name, repeated texts and shapes in tables.

`docs/graph-files.md` is the schema.

Fields of a JSON object, read with care: a mistake is named by its field, and no value is taken for another.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlplace.decode import described, shortened
from rlplace.errors import FileProblem, InvalidValue, UnknownName
from rlplace.files import read_json, write_text_atomic
from rlplace.graphs.opgraph import OpGraph

if TYPE_CHECKING:
    pass

FORMAT = "rlplace-graph"
SCHEMA = 1

Item = TypeVar("Item", bound=Hashable)

_TEXTS = ("targets", "modules", "signatures", "tensor_dtypes")
_NUMBERS = ("flops", "bytes_moved")
_INDICES = (
    "phases", "colocation", "tensor_op", "tensor_output", "input_offsets", "input_tensors", "mutation_op",
    "mutation_tensor", "output_tensors",
)  # fmt: skip
_BYTES = ("parameter_bytes", "gradient_bytes", "state_bytes", "workspace_bytes", "tensor_bytes")
_LARGEST_INDEX = 2**31 - 1
_HEAD = ("format", "schema", "strings", "shapes", "names", "tensor_shapes")
_MICRO_BATCH = "micro_batch"
"""A field that is there only where the batch is cut."""


def save_json(graph: OpGraph, path: str | os.PathLike[str]) -> None:
    """Writes `graph` as JSON, whole or not at all; its program is not kept.

    Raises:
        FileProblem: the file cannot be written.
    """
    strings, columns = _table(text for name in _TEXTS for text in getattr(graph, name))
    shapes, shape_column = _table(graph.tensor_shapes)
    data: dict[str, Any] = {
        "format": FORMAT,
        "schema": SCHEMA,
        "fingerprint": graph.fingerprint,
        "strings": strings,
        "shapes": shapes,
        "names": graph.names,
    }
    for name in _TEXTS:
        length = len(getattr(graph, name))
        data[name], columns = columns[:length], columns[length:]
    for name in (*_NUMBERS, *_INDICES, *_BYTES):
        data[name] = getattr(graph, name).tolist()
    data["tensor_shapes"] = shape_column
    if np.any(graph.micro_batch >= 0):
        data[_MICRO_BATCH] = graph.micro_batch.tolist()
    lines = ",\n".join(f"{json.dumps(key)}:{_compact(value)}" for key, value in data.items())
    write_text_atomic(path, f"{{\n{lines}\n}}\n")


def load_json(path: str | os.PathLike[str]) -> OpGraph:
    """The graph that `save_json` wrote.

    Raises:
        FileProblem: the file is missing, no JSON, or not what its fingerprint says.
        InvalidValue: a field is missing or wrong.
        UnknownName: a field that nobody knows.
    """
    return graph_from_json(read_json(path), where=str(path))


def graph_from_json(data: object, *, where: str) -> OpGraph:
    """The graph in a parsed file; `where` names the file. Raises as `load_json` does."""
    if isinstance(data, dict) and data.get("schema", SCHEMA) != SCHEMA:
        raise InvalidValue(
            "schema", described(data["schema"]), f"{SCHEMA}, the one that this version of rlplace reads", where=where
        )
    known = (*_HEAD, *_TEXTS, *_NUMBERS, *_INDICES, *_BYTES)
    fields = Fields(data, where=where, known=known, optional=("fingerprint", _MICRO_BATCH))
    fields.integer("schema", low=SCHEMA, high=SCHEMA)
    if fields.text("format") != FORMAT:
        raise InvalidValue("format", described(fields.text("format")), repr(FORMAT), where=where)
    strings = fields.texts("strings")
    columns: dict[str, Any] = {name: _looked_up(fields, name, strings, "strings") for name in _TEXTS}
    columns |= {name: fields.numbers(name) for name in _NUMBERS}
    columns |= {name: fields.integers(name) for name in _BYTES}
    columns |= {
        name: fields.integers(name, low=-1 if name == "colocation" else 0, high=_LARGEST_INDEX) for name in _INDICES
    }
    columns["phases"] = fields.integers("phases", high=2)
    if _MICRO_BATCH in fields.data:
        columns[_MICRO_BATCH] = fields.integers(_MICRO_BATCH, low=-1, high=_LARGEST_INDEX)
    shapes = fields.integer_tuples("shapes")
    columns["tensor_shapes"] = _looked_up(fields, "tensor_shapes", shapes, "shapes")
    try:
        graph = OpGraph(names=tuple(fields.texts("names")), **columns)
    except InvalidValue as error:
        raise InvalidValue(error.field, error.actual, error.expected, where=where) from error
    if "fingerprint" in fields.data and fields.text("fingerprint") != graph.fingerprint:
        raise FileProblem(
            where,
            f"its fingerprint is {described(fields.text('fingerprint'))!r}, but its content's is "
            f"{graph.fingerprint!r}: the file was damaged or edited. Remove the field `fingerprint` if you edited it.",
        )
    return graph


def _table(items: Iterable[Item]) -> tuple[list[Item], list[int]]:
    """Distinct items in order of appearance, and each item's place among them."""
    places: dict[Item, int] = {}
    column = [places.setdefault(item, len(places)) for item in items]
    return list(places), column


def _looked_up(fields: Fields, name: str, table: Sequence[Item], table_name: str) -> tuple[Item, ...]:
    indices = fields.integers(name, high=_LARGEST_INDEX)
    if len(indices) and int(indices.max()) >= len(table):
        raise InvalidValue(
            name, int(indices.max()), f"indices of `{table_name}`, which has {len(table)} entries", where=fields.where
        )
    return tuple(map(table.__getitem__, indices.tolist()))


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


LARGEST_COUNT = 2**53
"""Bytes and sizes beyond this are no sizes: sums of them would leave what float64 holds exactly."""


class Fields:
    """One JSON object; every method raises `InvalidValue` with the field's full name where a value is not as expected.

    Where `decode.decode_record` makes a small record of a file that is ours alone, this reads whole columns as arrays,
    and files of others, field by field.
    """

    def __init__(
        self,
        data: object,
        *,
        where: str,
        known: Iterable[str] = (),
        optional: Iterable[str] | None = None,
        at: str = "",
    ) -> None:
        """Reads the object `data`.

        Args:
            data: what JSON gave.
            where: the file, for messages.
            known: names of the fields that must be there.
            optional: names of those that may be; None where any other may.
            at: path of the object in the file, e.g. `nodes[3]`.

        Raises:
            InvalidValue: `data` is no object, or a field is missing.
            UnknownName: a field that nobody knows.
        """
        if not isinstance(data, dict):
            raise InvalidValue(at or "file", described(data), "a JSON object", where=where)
        self.data: dict[str, Any] = data
        self.where = where
        self.at = at
        required = tuple(known)
        if optional is not None:
            names = {*required, *optional}
            for name in data:
                if name not in names:
                    raise UnknownName(f"field in {where}", shortened(name), names)
        for name in required:
            self._get(name)

    def full_name(self, name: str) -> str:
        """The field with its path in the file, e.g. `nodes[3].size`."""
        return f"{self.at}.{name}" if self.at else name

    def text(self, name: str, default: str | None = None) -> str:
        """The field as text; the default, if there is one, where it is missing."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "text")
        return value

    def integer(self, name: str, *, low: int = 0, high: int = LARGEST_COUNT) -> int:
        """The field as an integer in `low..high`; 3.0 is one."""
        value = self._get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise self._wrong(name, value, f"an integer in {low}..{high}")
        return value

    def number(self, name: str, largest: float) -> float:
        """The field as a number in 0..largest."""
        value = self._get(name)
        if type(value) not in (int, float) or not 0 <= value <= largest:
            raise self._wrong(name, value, f"a number in 0..{largest:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        """The field as a truth value, which others write as 0 or 1."""
        value = self._get(name)
        if not isinstance(value, int | float) or value not in (0, 1):
            raise self._wrong(name, value, "true, false, 0 or 1")
        return bool(value)

    def objects(self, name: str) -> list[Fields]:
        """The field as a list of objects, whatever fields they have."""
        rows = self._list(name, {dict}, "objects")
        path = self.full_name(name)
        return [Fields(row, where=self.where, at=f"{path}[{i}]") for i, row in enumerate(rows)]

    def texts(self, name: str) -> list[str]:
        """The field as a list of texts."""
        return self._list(name, {str}, "texts")

    def integers(self, name: str, *, low: int = 0, high: int = LARGEST_COUNT) -> NDArray[np.int64]:
        """The field as int64, every entry in `low..high`."""
        values = self._list(name, {int}, "integers")
        if values and not (low <= min(values) and max(values) <= high):
            bad = next(value for value in values if not low <= value <= high)
            raise self._wrong(name, bad, f"integers in {low}..{high}")
        return np.array(values, dtype=np.int64)

    def numbers(self, name: str) -> NDArray[np.float64]:
        """The field as float64, every entry finite and not negative."""
        values = self._list(name, {int, float}, "numbers")
        bad = next((value for value in values if not 0 <= value < 1e300), None)
        if bad is not None:
            raise self._wrong(name, bad, "finite numbers >= 0")
        return np.array(values, dtype=np.float64)

    def integer_tuples(self, name: str) -> list[tuple[int, ...]]:
        """The field as a list of tuples of sizes."""
        rows = self._list(name, {list}, "lists of sizes")
        for row in rows:
            if any(type(size) is not int or not 0 <= size <= LARGEST_COUNT for size in row):
                raise self._wrong(name, row, f"lists of integers in 0..{LARGEST_COUNT}")
        return [tuple(row) for row in rows]

    def _get(self, name: str, default: object = None) -> Any:
        if name not in self.data and default is None:
            raise InvalidValue(self.full_name(name), "missing", "a field of that name", where=self.where)
        return self.data.get(name, default)

    def _list(self, name: str, types: set[type], what: str) -> list[Any]:
        values = self._get(name)
        if not isinstance(values, list):
            raise self._wrong(name, values, f"a list of {what}")
        if not set(map(type, values)) <= types:
            bad = next(value for value in values if type(value) not in types)
            raise self._wrong(name, bad, f"a list of {what}")
        return values

    def _wrong(self, name: str, value: object, expected: str) -> InvalidValue:
        return InvalidValue(self.full_name(name), described(value), expected, where=self.where)
