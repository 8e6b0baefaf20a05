"""The page about grouping is run from top to bottom, so that it stays true."""

from __future__ import annotations

import re
from pathlib import Path

from rlplace.graphs.grouping.groups import GroupingRule

PAGE = Path(__file__).resolve().parent.parent / "docs" / "grouping.md"


def test_the_pages_python_runs() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(code) == 3
    names: dict[str, object] = {}
    for block in code:
        exec(compile(block, PAGE.name, "exec"), names)


def test_the_pages_rules_exist() -> None:
    words = re.findall(r"^\| `([^`]+)`", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(words) == 9
    for word in words:
        GroupingRule.parse(word.replace("PATTERN,...", "a,b").replace("DEPTH", "2"))
