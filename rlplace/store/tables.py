"""Measurements as tables for other tools: CSV, JSON, Parquet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, cast

from rlplace.errors import FileProblem, InvalidValue, MissingExtra, UnknownName
from rlplace.files import jsonable, write_bytes_atomic
from rlplace.store.records import StoredMeasurement

Format = Literal["csv", "json", "parquet"]
_ENDINGS: dict[str, Format] = {".csv": "csv", ".json": "json", ".parquet": "parquet"}


def as_csv(rows: Sequence[StoredMeasurement]) -> bytes:
    """A line for each measurement below one of names; samples and peaks as JSON lists, what is not known is empty."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        facts = row.to_dict()
        writer.writerow(facts | {name: json.dumps(facts[name]) for name in ("samples_s", "peak_bytes")})
    return text.getvalue().encode("utf-8")


def as_json(rows: Sequence[StoredMeasurement]) -> bytes:
    """An object with `schema` and `measurements`."""
    told = {"schema": 1, "measurements": [row.to_dict() for row in rows]}
    return (json.dumps(jsonable(told), allow_nan=False) + "\n").encode("utf-8")


def as_parquet(rows: Sequence[StoredMeasurement]) -> bytes:
    """A Parquet file with the same columns; samples and peaks are lists.

    Raises:
        MissingExtra: pyarrow is not installed.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtra("pyarrow", "parquet") from error
    kinds = {
        **dict.fromkeys(COLUMNS, pyarrow.string()),
        **dict.fromkeys(NUMBERS, pyarrow.float64()),
        "samples_s": pyarrow.list_(pyarrow.float64()),
        "peak_bytes": pyarrow.list_(pyarrow.int64()),
        "is_whole": pyarrow.bool_(),
    }
    schema = pyarrow.schema([(name, kinds[name]) for name in COLUMNS])
    table = pyarrow.Table.from_pylist([row.to_dict() for row in rows], schema=schema)
    sink = io.BytesIO()
    parquet.write_table(table, sink)
    return sink.getvalue()


NUMBERS = ("taken_s", "step_time_s", "reference_s", "idle_share", "load", "clock_hz", "ratio", "noise")
COLUMNS = (*StoredMeasurement.__dataclass_fields__, "ratio", "noise")
FORMATS: Mapping[Format, Callable[[Sequence[StoredMeasurement]], bytes]] = {
    "csv": as_csv,
    "json": as_json,
    "parquet": as_parquet,
}


def format_of(word: str | None, out: Path | None) -> Format:
    """The format that is asked for, or that a file's name says; CSV where neither says anything.

    Raises:
        UnknownName: no such format.
        InvalidValue: Parquet without a file.
    """
    if word is None:
        word = "csv" if out is None else _ENDINGS.get(out.suffix.lower(), "csv")
    if word not in FORMATS:
        raise UnknownName("format", word, FORMATS)
    if word == "parquet" and out is None:
        raise InvalidValue("out", None, "a file for Parquet", where="measurements", hint="Give --out FILE.")
    return cast("Format", word)


def write_table(rows: Sequence[StoredMeasurement], path: Path, kind: Format) -> None:
    """Writes measurements in a format, whole or not at all.

    Raises:
        FileProblem: the file cannot be written, or is a folder.
        MissingExtra: as `as_parquet`.
    """
    if path.is_dir():
        raise FileProblem(path, "this is a folder, expected a file for the table: name another.")
    write_bytes_atomic(path, FORMATS[kind](rows))
