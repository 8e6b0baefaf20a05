"""The page about traced steps is run from top to bottom, so that it stays true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

PAGE = Path(__file__).resolve().parent.parent / "docs" / "traced-steps.md"


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    return str(found)


def words(line: str) -> str:
    """The line without its figures, which depend on rounding."""
    return re.sub(r"[\d.]+", "#", line)


def test_the_pages_python_runs_and_timelines_tell_more_than_step_times() -> None:
    names: dict[str, Any] = {}
    exec(compile(block("python"), PAGE.name, "exec"), names)
    said = re.search(r"the error is ([\d.]+) % .* it is ([\d.]+) % ", PAGE.read_text(encoding="utf-8"))
    assert said is not None
    np.testing.assert_allclose(
        [100 * names["by_totals"], 100 * names["by_timelines"]], [*map(float, said.groups())], atol=0.2
    )
    assert names["by_timelines"] < 0.3 * names["by_totals"]
    shown = block("text").splitlines()
    assert {words(line) for line in names["lines"]} == {words(line) for line in shown}
    assert shown[-1].startswith("learned in place, from 4 traced steps; tracing takes ")
    seconds, posterior = names["seconds"], names["posterior"]
    assert np.isfinite(seconds).all()
    assert posterior.scales.tracing.num_steps == 4
