"""The page about the environments is run from top to bottom, so that it stays true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlplace.env import FEATURE_NOTES

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "environment.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_pages_python_runs() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(code) == 6
    names: dict[str, Any] = {}
    for block in code:
        exec(compile(block, "environment.md", "exec"), names)
    assert names["info"]["status"] == "ok"
    assert names["features"].group_cost.shape == names["problem"].group_allowed.shape
    assert names["same"].action_space == names["env"].action_space
    assert names["shown"]["adjacency"].shape == (2, names["problem"].grouping.num_groups ** 2)
    assert 0 < names["step_time_s"] < np.inf
    _, return_, *_ = names["env"].step(names["steps"]._batch.placed[0].astype(np.int64))
    assert names["total"] == pytest.approx(return_)
    assert names["batch"].placed.min() == 0


def test_the_features_are_listed_as_the_code_has_them() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.split("| feature | |")[1], flags=re.MULTILINE)
    assert rows[: len(FEATURE_NOTES)] == list(FEATURE_NOTES.items())
