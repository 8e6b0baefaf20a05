"""The page on exports: its code runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "exports.md"


def test_its_code_runs() -> None:
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL):
        exec(compile(code, PAGE.name, "exec"), names)
    assert names["entries"] == {"": 0}, "a small model is best off on the faster GPU"
    assert names["problem"].grouping.num_groups == 4, "the four modules of the text"
