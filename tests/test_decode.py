"""What messages say of values: short, however much they hold."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import pytest

from rlplace.decode import decode_record
from rlplace.errors import InvalidValue, UnknownName
from rlplace.records import described


@dataclass(frozen=True)
class Inner:
    size: int


@dataclass(frozen=True)
class Outer:
    name: str
    parts: tuple[Inner, ...]
    pairs: tuple[tuple[int, ...], ...] = ()
    more: Inner | None = None


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1.5, "1.5"),
        (True, "True"),
        ("a", "'a'"),
        ("a" * 100, repr("a" * 77 + "...")),
        (None, "empty"),
        ({"a": 1}, "a mapping of 1 fields"),
        ([1, 2], "a list of 2 values"),
        (2**63, "a number of more than 63 bits"),
        (datetime.date(2026, 1, 1), "a date"),
    ],
)
def test_values_are_described_in_a_few_words(value: object, shown: str) -> None:
    assert repr(described(value)) == shown


def test_records_are_read_with_their_parts() -> None:
    data = {"name": "a", "parts": [{"size": 2.0}], "pairs": [[1, 2]]}
    assert decode_record(Outer, data, "file") == Outer("a", (Inner(2),), ((1, 2),))
    assert decode_record(Outer, data | {"more": {"size": 3}}, "file").more == Inner(3)
    assert decode_record(Outer, data | {"more": None}, "file").more is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": [{}]}, r"file: parts\[0\]\.size is missing, expected a number"),
        ({"parts": [{"size": True}]}, r"parts\[0\]\.size is True"),
        ({"pairs": [[1, "2"]]}, r"pairs\[0\]\[1\] is '2'"),
        ({"more": {"size": "3"}}, r"more\.size is '3'"),
        ({"name": 3}, "name is 3, expected text"),
    ],
)
def test_a_wrong_field_is_named_with_its_path(change: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        decode_record(Outer, {"name": "a", "parts": []} | change, "file")


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(UnknownName, match="did you mean 'parts'"):
        decode_record(Outer, {"name": "a", "part": []}, "file")
