"""The page about measuring in a process of its own: what it shows runs, and what it says of limits is so."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from rlplace.measure.isolate.isolated_runner import VARIABLE
from rlplace.measure.isolate.messages import TimeLimits

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "isolation.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_its_python_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    monkeypatch.delenv(VARIABLE)
    exec(compile(code, "isolation.md", "exec"), {})
    assert capsys.readouterr().out.startswith("ok ")


def test_its_figures_are_those_of_the_code() -> None:
    limits, words = TimeLimits(), " ".join(PAGE.split())
    assert f"A step may take {limits.longest_s:g} s." in words
    assert (
        f"{limits.num_best:g} times the best step and {limits.num_first:g} times the longest loading so far, "
        f"and always {limits.least_s:g} s" in words
    )
    assert f"`{VARIABLE}=1`" in words


def test_every_command_that_measures_has_the_option() -> None:
    from rlplace.cli.runs import train
    from rlplace.cli.workload import compare, fidelity, measure

    for command in (compare, fidelity, measure, train):
        assert "in_process" in inspect.signature(command).parameters
        assert f"`{command.__name__}`" in PAGE
