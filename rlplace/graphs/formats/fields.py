"""Fields of a JSON object, read with care: a mistake is named by its field, and no value is taken for another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue, UnknownName

LARGEST_COUNT = 2**53
"""Bytes and sizes beyond this are no sizes: sums of them would leave what float64 holds exactly."""
_SHOWN_CHARACTERS = 60


class Fields:
    """One JSON object; every method raises `InvalidValue` with the field's name where a value is not as expected."""

    def __init__(self, data: object, *, where: str, known: Iterable[str], optional: Iterable[str] = ()) -> None:
        """Reads the object `data`.

        Args:
            data: what JSON gave.
            where: the file, for messages.
            known: names of the fields that must be there.
            optional: names of those that may be.

        Raises:
            InvalidValue: `data` is no object, or a field is missing.
            UnknownName: a field that nobody knows.
        """
        if not isinstance(data, dict):
            raise InvalidValue("file", shown(data), "a JSON object", where=where)
        required = tuple(known)
        names = {*required, *optional}
        for name in data:
            if name not in names:
                raise UnknownName(f"field in {where}", shortened(name), names)
        for name in required:
            if name not in data:
                raise InvalidValue(name, "missing", "a field of that name", where=where)
        self.data: dict[str, Any] = data
        self.where = where

    def text(self, name: str) -> str:
        """The field as text."""
        value = self.data[name]
        if not isinstance(value, str):
            raise InvalidValue(name, shown(value), "text", where=self.where)
        return value

    def integer(self, name: str, *, low: int = 0, high: int = LARGEST_COUNT) -> int:
        """The field as an integer in `low..high`."""
        value = self.data[name]
        if type(value) is not int or not low <= value <= high:
            raise InvalidValue(name, shown(value), f"an integer in {low}..{high}", where=self.where)
        return value

    def texts(self, name: str) -> list[str]:
        """The field as a list of texts."""
        return self._list(name, {str}, "texts")

    def integers(self, name: str, *, low: int = 0, high: int = LARGEST_COUNT) -> NDArray[np.int64]:
        """The field as int64, every entry in `low..high`."""
        values = self._list(name, {int}, "integers")
        if values and not (low <= min(values) and max(values) <= high):
            bad = next(value for value in values if not low <= value <= high)
            raise InvalidValue(name, shown(bad), f"integers in {low}..{high}", where=self.where)
        return np.array(values, dtype=np.int64)

    def numbers(self, name: str) -> NDArray[np.float64]:
        """The field as float64, every entry finite and not negative."""
        values = self._list(name, {int, float}, "numbers")
        bad = next((value for value in values if not 0 <= value < 1e300), None)
        if bad is not None:
            raise InvalidValue(name, shown(bad), "finite numbers >= 0", where=self.where)
        return np.array(values, dtype=np.float64)

    def integer_tuples(self, name: str) -> list[tuple[int, ...]]:
        """The field as a list of tuples of sizes."""
        rows = self._list(name, {list}, "lists of sizes")
        for row in rows:
            if any(type(size) is not int or not 0 <= size <= LARGEST_COUNT for size in row):
                raise InvalidValue(name, shown(row), f"lists of integers in 0..{LARGEST_COUNT}", where=self.where)
        return [tuple(row) for row in rows]

    def _list(self, name: str, types: set[type], what: str) -> list[Any]:
        values = self.data[name]
        if not isinstance(values, list):
            raise InvalidValue(name, shown(values), f"a list of {what}", where=self.where)
        if not set(map(type, values)) <= types:
            bad = next(value for value in values if type(value) not in types)
            raise InvalidValue(name, shown(bad), f"a list of {what}", where=self.where)
        return values


def shown(value: object) -> object:
    """The value as a message can hold it: numbers and short texts as they are, the rest by its type."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return value if abs(value) < 10**30 else f"an integer of {value.bit_length()} bits"
    return shortened(value) if isinstance(value, str) else f"a {type(value).__name__}"


def shortened(text: str) -> str:
    """The text, cut where it is long."""
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
