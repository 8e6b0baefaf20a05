"""The page about the environment is run from top to bottom, so that it stays true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

PAGE = Path(__file__).resolve().parent.parent / "docs" / "environment.md"


def test_the_pages_python_runs() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(code) == 2
    names: dict[str, Any] = {}
    for block in code:
        exec(compile(block, PAGE.name, "exec"), names)
    assert names["info"]["status"] == "ok"
    assert names["features"].group_cost.shape == names["problem"].group_allowed.shape
    assert names["same"].action_space == names["env"].action_space
    assert 0 < names["step_time_s"] < np.inf
