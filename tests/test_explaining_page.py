"""The page on advice and explanations: its code runs, and its rules are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlplace.advice import verdict
from rlplace.measure.explain import explain_step as advice

PAGE = Path(__file__).resolve().parents[1] / "docs" / "explaining.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_its_code_runs() -> None:
    names: dict[str, Any] = {}
    code = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(code) == 2
    for block in code:
        exec(compile(block.replace("seconds=5", "seconds=1"), "explaining.md", "exec"), names)
    assert names["verdict"].figures.kind == "simulated"
    explanation = names["explanation"]
    assert explanation.path.seconds == pytest.approx(explanation.step_time_s)


def test_every_rule_is_there_in_its_order() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| ([^|]*) \|", TEXT, flags=re.MULTILINE)
    verdicts = [(name, words) for name, words in rows if name in verdict.WORDS and words in verdict.WORDS.values()]
    assert [name for name, _ in verdicts] == [
        "more-memory",
        "cut-batch",
        "cut-batch",
        "eager",
        "one-device",
        "cut-batch",
        "place",
    ]
    assert dict(verdicts) == verdict.WORDS
    rules = [row for row in rows if row not in verdicts]
    assert [name for name, _ in rules] == [*advice.RULES, "keep"]


def test_its_figures_are_those_of_the_code() -> None:
    when = dict(re.findall(r"^\| `([a-z-]+)` \| ([^|]*) \| [^|]* \|$", TEXT, flags=re.MULTILINE))
    for rule, figure in (
        ("one-device", f"{advice.AS_GOOD}"),
        ("use-eager", f"{advice.AS_GOOD}"),
        ("memory", f"{100 * advice.NEARLY_FULL:.0f} %"),
        ("near-bound", f"{advice.NEAR_BOUND}"),
        ("data-parallel", f"{advice.FASTER}"),
        ("transfers", f"{100 * advice.MUCH:.0f} %"),
        ("waits", f"{100 * advice.MUCH:.0f} %"),
        ("chain", f"{100 * advice.IDLE:.0f} %"),
    ):
        assert figure in when[rule], rule
    first = dict(re.findall(r"^\| `(eager|one-device)` \| [^|]* \| ([^|]*) \|$", TEXT, flags=re.MULTILINE)[:2])
    assert all(f"at most {verdict.WORTH} times" in first[name] for name in ("eager", "one-device"))
    assert f"at most {verdict.PROMISING} times" in TEXT
