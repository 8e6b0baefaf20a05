"""The page about splits is run, so that it stays true."""

from __future__ import annotations

import re
from pathlib import Path

from rlplace.graphs.program import SPLITTABLE

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "splits.md").read_text(encoding="utf-8")


def test_its_python_runs() -> None:
    for code in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(compile(code, "splits.md", "exec"), {})


def test_its_table_has_every_class() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.MULTILINE)) == set(SPLITTABLE)
