"""Fields of the benchmark's JSON, read one by one: a wrong one is named in full (`nodes[3].size`)."""

from __future__ import annotations

from typing import Any

from rlplace.errors import InvalidValue

LARGEST_COUNT = 256
LARGEST_ID = 1 << 53


class FieldReader:
    """Reads fields of parsed JSON; a wrong one is an `InvalidValue` with the field's full name."""

    def __init__(self, where: str) -> None:
        self.where = where

    def mapping(self, value: object, field: str) -> dict[str, Any]:
        """`value` as an object."""
        if not isinstance(value, dict):
            raise InvalidValue(field, _brief(value), "an object", where=self.where)
        return value

    def sequence(self, record: dict[str, Any], key: str, prefix: str) -> list[Any]:
        """The field as a list."""
        value = self._get(record, key, prefix)
        if not isinstance(value, list):
            raise InvalidValue(prefix + key, _brief(value), "a list", where=self.where)
        return value

    def integer(self, record: dict[str, Any], key: str, prefix: str) -> int:
        """The field as a whole number."""
        value = self._get(record, key, prefix)
        if isinstance(value, float) and value.is_integer() and abs(value) <= LARGEST_ID:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > LARGEST_ID:
            raise InvalidValue(prefix + key, _brief(value), "a whole number", where=self.where)
        return value

    def count(self, record: dict[str, Any], key: str, prefix: str) -> int:
        """The field as a number of devices."""
        value = self.integer(record, key, prefix)
        if not 0 <= value <= LARGEST_COUNT:
            raise InvalidValue(prefix + key, value, f"0..{LARGEST_COUNT}", where=self.where)
        return value

    def number(self, record: dict[str, Any], key: str, prefix: str, largest: float) -> float:
        """The field as a number in 0..largest."""
        value = self._get(record, key, prefix)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= largest:
            raise InvalidValue(prefix + key, _brief(value), f"a number in 0..{largest:g}", where=self.where)
        return float(value)

    def flag(self, record: dict[str, Any], key: str, prefix: str) -> bool:
        """The field as a truth value."""
        value = self._get(record, key, prefix)
        if not isinstance(value, int | float) or value not in (0, 1):
            raise InvalidValue(prefix + key, _brief(value), "true, false, 0 or 1", where=self.where)
        return bool(value)

    def label(self, record: dict[str, Any], key: str, prefix: str) -> str:
        """The field as text, empty where it is missing."""
        value = record.get(key, "")
        if not isinstance(value, str):
            raise InvalidValue(prefix + key, _brief(value), "text", where=self.where)
        return value

    def _get(self, record: dict[str, Any], key: str, prefix: str) -> Any:
        if key not in record:
            raise InvalidValue(prefix + key, "missing", "a value", where=self.where)
        return record[key]


def _brief(value: object) -> object:
    """The value, or the start of its text where it is long."""
    if isinstance(value, int) and abs(value) > LARGEST_ID:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return value if len(text) <= 60 else text[:60] + "..."
