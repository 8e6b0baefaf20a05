"""Records: what is checked when one is made, and when one is read from a file.

Which seeds there are: those that NumPy and PyTorch take.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch
from pydantic import Field
from stable_baselines3.common.utils import set_random_seed

from rlplace.errors import FileProblem, InvalidValue, UnknownName, UserError
from rlplace.records import (
    LARGEST_SEED,
    FirstSchema,
    Number,
    Seed,
    Whole,
    check_seed,
    described,
    read_record,
    record,
    to_plain,
)


@record(frozen=True, slots=True)
class Part:
    name: str
    weight: Annotated[Number, Field(gt=0)] = 1.0

    def __post_init__(self) -> None:
        if ":" in self.name:
            raise InvalidValue("name", self.name, "a name without a colon")


@record(frozen=True, slots=True)
class Everything:
    seed: Seed = 0
    size_bytes: Whole = 1
    mode: Literal["fast", "exact"] = "fast"
    parts: tuple[Part, ...] = ()
    by_name: dict[str, Part] = field(default_factory=dict)
    path: Path | None = None
    schema: FirstSchema = 1


def test_a_record_is_a_frozen_dataclass_that_is_copied() -> None:
    made = Everything(3, parts=(Part("a"),))
    assert dataclasses.replace(made, seed=4).seed == 4
    assert copy.deepcopy(made) == made
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.seed = 5  # type: ignore[misc]


def test_numbers_of_other_kinds_are_taken() -> None:
    made = Everything(np.int64(3), 16e9)  # type: ignore[arg-type]
    assert (made.seed, type(made.seed), made.size_bytes) == (3, int, 16_000_000_000)
    assert Part("a", np.float32(2)).weight == 2.0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"seed": 1.5}, "seed is 1.5, expected a whole number"),
        ({"seed": True}, "seed is True"),
        ({"seed": "1"}, "seed is '1'"),
        ({"seed": -1}, "seed is -1, expected at least 0"),
        ({"mode": "exat"}, "did you mean 'exact'"),
        ({"parts": [1]}, "expected a list"),
        ({"nope": 1}, "nope"),
        *(({"schema": schema}, "schema is ") for schema in (2, "1", True, None, 1.0)),
    ],
)
def test_what_is_wrong_is_one_line(values: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as caught:
        Everything(**values)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_reading_gives_back_what_was_written() -> None:
    made = Everything(1, 2, "exact", (Part("a"), Part("b", 2.5)), {"c": Part("c")}, Path("x"))
    assert read_record(Everything, to_plain(made), "f.json") == made


@pytest.mark.parametrize(
    ("data", "kind", "told"),
    [
        ({"seed": 2**70}, InvalidValue, "63 bits"),
        ({"parts": [{"name": "a"}, {"name": 3}]}, InvalidValue, "f.json: parts[1].name is 3, expected text"),
        ({"parts": [{"name": "a:b"}]}, InvalidValue, "f.json: parts[0].name is 'a:b', expected a name without"),
        ({"parts": [{}]}, InvalidValue, "f.json: parts[0].name is missing"),
        ({"parts": [{"name": "a", "wieght": 1}]}, UnknownName, "did you mean 'weight'"),
        ({"by_name": {"x": {"name": "x", "weight": 0}}}, InvalidValue, "by_name.x.weight is 0, expected more than 0"),
        ({"by_name": {"x": {"name": "x", "weight": float("inf")}}}, InvalidValue, "by_name.x.weight"),
        *(({"schema": schema}, InvalidValue, "f.json: schema is ") for schema in (2, "1", True, None, 1.0)),
        ([], InvalidValue, "f.json"),
        ("{", InvalidValue, "f.json"),
    ],
)
def test_reading_names_file_field_and_value(data: object, kind: type[UserError], told: str) -> None:
    with pytest.raises(kind) as caught:
        read_record(Everything, data, "f.json")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


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


@pytest.mark.parametrize("seed", [0, 1, LARGEST_SEED])
def test_a_seed_in_range_is_taken_by_everybody(seed: int) -> None:
    assert check_seed(seed) == seed
    torch.Generator().manual_seed(seed)
    np.random.default_rng(seed)
    with torch.random.fork_rng():
        set_random_seed(seed)


@pytest.mark.parametrize("seed", [-1, LARGEST_SEED + 1, 2**70])
def test_any_other_is_refused(seed: int) -> None:
    with pytest.raises(InvalidValue, match=f"train: seed is {seed}, expected a whole number from 0"):
        check_seed(seed, "train")


def test_a_text_of_more_values_than_a_parser_can_hold_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(FileProblem, match=r"large.json: JSON with too many values, expected at most 4,000,000"):
        read_record(list[list[int]], f"[{'[],' * 2_000_000}[]]", "large.json")
