"""What nodes and edges of a `networkx.DiGraph` say: attributes under any of their common names, checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlplace.decode import described
from rlplace.errors import InvalidValue
from rlplace.graphs.formats.fields import LARGEST_COUNT
from rlplace.graphs.opgraph import PHASES

Item = TypeVar("Item")

ALIASES = {
    "name": ("name", "label"),
    "target": ("target", "op", "op_type", "optype", "type", "kind"),
    "module": ("module", "scope"),
    "flops": ("flops", "flop", "num_flops"),
    "output_bytes": ("output_bytes", "bytes", "size_bytes", "size", "memory", "mem"),
    "bytes": ("bytes", "size_bytes", "size", "volume"),
    "time_s": ("time_s",),
    "colocation": ("colocation", "color", "colour", "colorClass", "color_class"),
}
"""Attributes of graphs of others, by what they stand for; the first that is there counts."""


@dataclass(frozen=True)
class Attributes:
    """What nodes say: what is wrong with one is said with its name.

    Attributes:
        nodes: N of them.
        rows: (N,) what each says.
        where: for messages.
    """

    nodes: Sequence[Hashable]
    rows: Sequence[Mapping[str, Any]]
    where: str

    def column(self, read: Callable[[Mapping[str, Any]], Item]) -> list[Item]:
        """(N,) what `read` makes of each row.

        Raises:
            InvalidValue: `read` did; it names the node.
        """
        values: list[Item] = []
        try:
            for row in self.rows:
                values.append(read(row))
        except InvalidValue as error:
            where = place_of(self.where, self.nodes[len(values)])
            raise InvalidValue(error.field, error.actual, error.expected, where=where) from error
        return values

    def counts(self, field: str) -> NDArray[np.int64]:
        """(N,) int64: `read_count` of each row; raises as `column` does."""
        return np.array(self.column(lambda row: read_count(row, field)), dtype=np.int64)


def find_attribute(row: Mapping[str, Any], field: str) -> tuple[str, Any]:
    """The name under which a row gives `field`, and its value; None where it does not."""
    for key in ALIASES.get(field, (field,)):
        value = row.get(key)
        if value is not None:
            return key, value
    return field, None


def read_text(row: Mapping[str, Any], field: str, default: str) -> str:
    """`field` of a row as text.

    Raises:
        InvalidValue: it is neither text nor a number.
    """
    key, value = find_attribute(row, field)
    if value is None:
        return default
    if not isinstance(value, str | int | float):
        raise InvalidValue(key, described(value), "text")
    return str(value)


def read_number(row: Mapping[str, Any], field: str, default: float) -> float:
    """`field` of a row as a number.

    Raises:
        InvalidValue: it is none, or negative, or not finite.
    """
    key, value = find_attribute(row, field)
    if value is None:
        return default
    if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
        raise InvalidValue(key, described(value), "a number")
    number = value if isinstance(value, int) else float(value)  # a float32 overflows where it meets 1e300
    if not 0 <= number < 1e300:
        raise InvalidValue(key, described(value), "a finite number >= 0")
    return float(number)


def read_count(row: Mapping[str, Any], field: str, default: int = 0) -> int:
    """`field` of a row as a whole number, rounded up; raises as `read_number` does, and where it is too large."""
    value = read_number(row, field, float(default))
    if value > LARGEST_COUNT:
        raise InvalidValue(field, value, f"at most {LARGEST_COUNT}")
    return math.ceil(value)


def read_phase(row: Mapping[str, Any]) -> int:
    """The phase of a row, by name or number, as an index of `PHASES`.

    Raises:
        InvalidValue: there is no such phase.
    """
    value = row.get("phase", 0)
    if isinstance(value, str) and value in PHASES:
        return PHASES.index(value)
    if type(value) is int and 0 <= value < len(PHASES):
        return value
    raise InvalidValue("phase", described(value), f"one of {', '.join(PHASES)}")


def place_of(where: str, part: object) -> str:
    """A node or an edge of a graph, for messages."""
    return f"{where}, {described(str(part))}"
