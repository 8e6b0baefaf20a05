"""`rlplace measurements`: what is in a store, for people and for programs."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import sys
from pathlib import Path

import pytest
from stored import SESSION, plan_of, row_of

from rlplace.cli.main import main
from rlplace.store import MeasurementStore


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own store: two steps of `nmt`, the older one of a day ago, and a failed one of a stranger's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "rlplace" / "measurements.db"
    path.parent.mkdir()
    plans = [plan_of(0, k) for k in range(3)]
    with MeasurementStore.open(path) as store:
        other = dataclasses.replace(SESSION, workload="\x1b[31mevil\n")
        store.add(SESSION, plans[0], row_of(plans[0]))
        store.add(SESSION, plans[1], row_of(plans[1], age_s=86400.0))
        failed = row_of(plans[2], 1.0, age_s=9.0, status="error", step_time_s=float("inf"), why="\x1b]0;title\x07no")
        store.add(other, plans[2], failed)
    return path


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    out: dict[str, object] = json.loads(capsys.readouterr().out)
    assert out.pop("schema") == 1
    return out


def test_people_see_a_table_and_nothing_that_a_terminal_acts_on(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["measurements"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "\x1b]" not in said.out
    assert "[31mevil" in said.out
    assert "nmt@small" in said.out
    assert "0.500" in said.out
    assert f"{path}: 3 measurements" in said.out.replace("\n", " ")
    assert main(["measurements", "list", "--limit", "1", "--status", "ok"]) == 0
    assert "2 measurements, the latest 1" in capsys.readouterr().out


def test_json_lists_the_last_added_first(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measurements", "list", "--json", "--limit", "2"]) == 0
    out = told(capsys)
    assert (out["store"], out["count"]) == (str(path), 3)
    rows = out["measurements"]
    assert isinstance(rows, list)
    assert [(row["workload"], row["status"], row["ratio"]) for row in rows] == [
        ("\x1b[31mevil\n", "error", None),
        ("nmt@small", "ok", 0.5),
    ]
    assert main(["measurements", "list", "--json", "--workload", "nmt*", "--older-than", "12h"]) == 0
    assert told(capsys)["count"] == 1
    assert main(["measurements", "--json", "--host", "cuda*"]) == 0
    assert told(capsys)["measurements"] == []


def test_exports_go_to_stdout_or_a_file(path: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["measurements", "export", "--status", "ok"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsysbinary.readouterr().out.decode())))
    assert [row["status"] for row in rows] == ["ok", "ok"]
    out = tmp_path / "rows.json"
    assert main(["measurements", "export", "--out", str(out), "--json"]) == 0
    facts = json.loads(capsysbinary.readouterr().out)
    assert facts == {"schema": 1, "store": str(path), "out": str(out), "format": "json", "count": 3}
    assert len(json.loads(out.read_text())["measurements"]) == 3


def test_pruning_forgets_what_is_meant(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, pruned, matched, left in (
        (["--older-than", "12h", "--dry-run"], 0, 1, 3),
        (["--older-than", "12h"], 1, 1, 2),
        (["--workload", "nothing"], 0, 0, 2),
        (["--all"], 2, 2, 0),
    ):
        assert main(["measurements", "prune", "--json", *words]) == 0
        out = told(capsys)
        assert (out["pruned"], out["matched"]) == (pruned, matched)
        with MeasurementStore.read(path) as store:
            assert store.count() == left


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["prune"], "expected an option that says which"),
        (["prune", "--all", "--status", "ok"], "all is True, expected no other option"),
        (["list", "--status", "okay"], "did you mean 'ok'"),
        (["list", "--newer-than", "soon"], "newer-than is 'soon', expected a duration"),
        (["list", "--limit", "0"], "limit is 0"),
        (
            ["list", "--out", "rows.csv"],
            "out is 'rows.csv', expected no such option of `list`. `--out` is an option of",
        ),
        (["list", "--all"], "all is True, expected no such option of `list`. `--all` is an option of `prune`"),
        (["prune", "--all", "--limit", "1"], "limit is 1, expected no such option of `prune`"),
        (["export", "--dry-run"], "dry-run is True, expected no such option of `export`"),
        (["list", "--store", "off"], "store is 'off', expected auto, a file or a run folder"),
        (["list", "--store", "none.db"], "no such store"),
        (["prune", "--store", "none.db", "--all"], "no such store"),
        (["export", "--format", "xlsx"], "unknown format 'xlsx'"),
        (["export", "--format", "parquet"], "Give --out FILE"),
        (["export", "--json"], "Give --out FILE, or --format json"),
    ],
)
def test_mistakes_exit_with_2_and_one_line(
    words: list[str], told: str, path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    assert main(["measurements", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert told in said.err
    assert said.err.count("\n") == 1
    assert not (path.parent / "none.db").exists()


def test_parquet_without_its_extra_says_what_to_install(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["measurements", "export", "--out", str(tmp_path / "rows.parquet")]) == 2
    assert "pip install 'rlplace[parquet]'" in capsys.readouterr().err
    assert not (tmp_path / "rows.parquet").exists()
