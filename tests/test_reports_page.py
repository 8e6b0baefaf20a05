"""The page about reports: its code runs, and its table is that of the report."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from run_files import write_run

from rlplace.report.html.page import SECTIONS
from rlplace.report.html.step_sections import MOST_BARS
from rlplace.session.folder import RUN_FILES

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "reports.md").read_text(encoding="utf-8")


def test_the_pages_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "mine")
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "reports.md", "exec"), names)
    assert names["page"] == Path("runs/mine/report.html")
    assert names["page"].exists()


def test_every_part_is_in_the_table_and_is_from_files_that_runs_have() -> None:
    rows = re.findall(r"^\| ([A-Za-z ]+) \| .* \| (.*) \|$", PAGE, flags=re.MULTILINE)
    assert [name for name, _ in rows] == ["part", "head", *(title for title, _, _ in SECTIONS)]
    assert set(re.findall(r"`([a-z_]+\.json)`", " ".join(source for _, source in rows))) <= set(RUN_FILES)


def test_the_pages_figures_are_the_programs() -> None:
    assert f"more than {MOST_BARS:,} ops" in PAGE
