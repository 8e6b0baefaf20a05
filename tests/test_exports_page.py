"""The page on exports: its code runs, and every format is on it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rlplace.export import FORMATS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "exports.md"


def test_its_code_runs() -> None:
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL):
        exec(compile(code, PAGE.name, "exec"), names)
    assert names["entries"] == {"": 0}, "a small model is best off on the faster GPU"
    assert names["problem"].grouping.num_groups == 4, "the four modules of the text"


def test_it_has_every_format() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name, entry in FORMATS.items() if f"| `{entry.file}` |" not in text] == []
