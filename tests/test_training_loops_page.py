"""The page on training loops: its code runs, and what it says of options is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlplace.export.placed.model_state import OPTIONS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "training-loops.md"


@pytest.mark.slow
def test_its_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code, "training-loops.md", "exec"), names)
    assert names["step"].num_steps == 2
    assert names["output"].shape == (5, 3)
    assert names["step"].num_graphs == 2


def test_it_names_every_option() -> None:
    (named,) = re.findall(r"`step\.lr`, (.*?) can be set", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert {"lr", *re.findall(r"`(\w+)`", named)} == {option for options in OPTIONS.values() for option in options}
