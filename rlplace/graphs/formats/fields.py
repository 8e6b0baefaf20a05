"""Fields of a JSON object, read with care: a mistake is named by its field, and no value is taken for another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.decode import described, shortened
from rlplace.errors import InvalidValue, UnknownName

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
