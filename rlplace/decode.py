"""Plain data, as JSON and YAML hold it, to frozen records: strictly, with errors that name file, field and value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from rlplace.errors import InvalidValue, UnknownName
from rlplace.records import Described, described, shortened, words_of

T = TypeVar("T")

_LARGEST_WHOLE = 2**63 - 1


def decode_record(record: type[T], data: object, where: str, at: str = "") -> T:
    """A `record`, built from the mapping `data`.

    Field types may be `str`, `bool`, `int`, `float`, a `Literal` of strings, another record, `tuple[X, ...]`,
    `dict[str, X]` and `X | None`. Nothing is guessed: text is not read as a number, but a whole number will do where a
    float is expected, and `16e9` where a whole number is.

    Args:
        record: A dataclass.
        data: What a file holds; a finished `record` passes through.
        where: The file, named in every error.
        at: Path of `data` in the file, e.g. `devices[0]`.

    Raises:
        InvalidValue: A missing field, or a value of the wrong type or range.
        UnknownName: A field or choice that does not exist.
    """
    if isinstance(data, record):
        return data
    if not isinstance(data, Mapping):
        raise InvalidValue(at or words_of(record), described(data), "a mapping of fields", where=where)
    if not is_dataclass(record):
        raise TypeError(f"{record!r} is not a dataclass")
    known = {field.name: field for field in fields(record)}
    for key in data:
        if key not in known:
            raise UnknownName(f"field of {at or words_of(record)} in {where}", str(key), known)
    hints = get_type_hints(record)
    values: dict[str, object] = {}
    for name, field in known.items():
        path = f"{at}.{name}" if at else name
        if name in data:
            values[name] = _decode(hints[name], data[name], where, path)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise InvalidValue(path, Described("missing"), _expected(hints[name]), where=where)
    try:
        return cast(Callable[..., T], record)(**values)
    except InvalidValue as error:
        raise InvalidValue(
            f"{at}.{error.field}" if at else error.field, error.actual, error.expected, where=where
        ) from error


def decode_list(record: type[T], data: object, where: str, at: str) -> tuple[T, ...]:
    """A tuple of `record`s, built from the list `data`; see `decode_record`."""
    if not isinstance(data, list | tuple):
        raise InvalidValue(at, described(data), "a list", where=where)
    return tuple(decode_record(record, item, where, f"{at}[{index}]") for index, item in enumerate(data))


def check_ranges(record: object, where: str, ranges: Mapping[str, tuple[float, float]]) -> None:
    """That fields of a record are in their ranges; a field that is None is open.

    Raises:
        InvalidValue: one is not.
    """
    for name, (least, most) in ranges.items():
        value = getattr(record, name)
        if value is not None and not least <= value <= most:
            raise InvalidValue(name, value, f"at least {least:,} and at most {most:,}", where=where)


def _decode(hint: object, value: object, where: str, at: str) -> object:
    origin = get_origin(hint)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise InvalidValue(at, described(value), "a list", where=where)
        (item, _) = get_args(hint)
        return tuple(_decode(item, part, where, f"{at}[{index}]") for index, part in enumerate(value))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise InvalidValue(at, described(value), "a mapping", where=where)
        (_, item) = get_args(hint)
        return {
            _text(key, where, f"a key of {at}"): _decode(item, value[key], where, f"{at}.{shortened(key)}")
            for key in value
        }
    if origin is UnionType:
        (some,) = (each for each in get_args(hint) if each is not type(None))
        return None if value is None else _decode(some, value, where, at)
    if origin is Literal:
        choice = _text(value, where, at)
        if choice not in get_args(hint):
            raise UnknownName(f"{at} in {where}", choice, get_args(hint))
        return choice
    if isinstance(hint, type) and is_dataclass(hint):
        return decode_record(hint, value, where, at)
    readers: dict[object, Callable[[object, str, str], object]] = {
        str: _text,
        bool: _flag,
        int: _whole,
        float: _number,
    }
    return readers[hint](value, where, at)


def _text(value: object, where: str, at: str) -> str:
    if not isinstance(value, str):
        raise InvalidValue(at, described(value), "text", where=where)
    return value


def _flag(value: object, where: str, at: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidValue(at, described(value), "true or false", where=where)
    return value


def _whole(value: object, where: str, at: str) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _LARGEST_WHOLE:
        raise InvalidValue(at, described(value), "a whole number of at most 63 bits", where=where)
    return value


def _number(value: object, where: str, at: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300 or math.isnan(value):
        raise InvalidValue(at, described(value), "a finite number", where=where)
    return float(value)


def _expected(hint: object) -> str:
    if hint is str or get_origin(hint) is Literal:
        return "text"
    if get_origin(hint) is tuple:
        return "a list"
    return "a number" if hint in (int, float) else "a value"
