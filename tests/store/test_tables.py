"""Measurements for other tools."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import pytest
from stored import PLAN, row_of

from rlplace.errors import FileProblem, InvalidValue, MissingExtra, UnknownName
from rlplace.store.rows import COLUMNS, as_csv, as_json, as_parquet, format_of, write_table

ROWS = [row_of(), row_of(PLAN, 1.0, status="oom", step_time_s=float("inf"), samples_s=(), why='full, "really"\nfull')]


def test_csv_has_a_line_for_each_and_what_is_not_known_is_empty() -> None:
    first, second = csv.DictReader(io.StringIO(as_csv(ROWS).decode()))
    assert tuple(first) == COLUMNS
    assert (first["status"], float(first["step_time_s"]), float(first["ratio"])) == ("ok", 0.5, 0.5)
    assert json.loads(first["samples_s"]) == [0.45, 0.5, 0.55]
    assert (second["status"], second["step_time_s"], second["ratio"]) == ("oom", "", "")
    assert second["why"] == 'full, "really"\nfull'


def test_json_is_one_object() -> None:
    told = json.loads(as_json(ROWS))
    assert told["schema"] == 1
    assert [row["step_time_s"] for row in told["measurements"]] == [0.5, None]
    assert told["measurements"][0]["noise"] > 0


def test_parquet_has_the_same_columns(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    write_table(ROWS, tmp_path / "rows.parquet", "parquet")
    table = parquet.read_table(tmp_path / "rows.parquet")
    assert tuple(table.column_names) == COLUMNS
    assert table.to_pylist()[0]["samples_s"] == [0.45, 0.5, 0.55]
    assert table.to_pylist()[1]["step_time_s"] is None
    assert parquet.read_table(io.BytesIO(as_parquet([]))).num_rows == 0


def test_parquet_without_pyarrow_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"pip install 'rlplace\[parquet\]'"):
        as_parquet(ROWS)


def test_the_format_is_what_is_asked_for_or_what_the_file_is_called() -> None:
    assert format_of(None, None) == "csv"
    assert format_of(None, Path("a.JSON")) == "json"
    assert format_of(None, Path("a.parquet")) == "parquet"
    assert format_of("csv", Path("a.json")) == "csv"
    with pytest.raises(UnknownName, match="did you mean 'parquet'"):
        format_of("parket", None)
    with pytest.raises(InvalidValue, match="Give --out FILE"):
        format_of("parquet", None)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match="this is a folder"):
        write_table(ROWS, tmp_path, "csv")
