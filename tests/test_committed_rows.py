"""A sample of the committed tables, row by row on today's code: the same step times, to the bit."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rlplace.compare import CompareConfig, compare
from rlplace.files import read_json

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
SEARCHED, LEARNED = "rnnlm/2xK80", "dlrm/RTX4090+RTX3060"
"""A problem on which searches end far apart, and one whose steps are quick to learn."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[dict[str, ModuleType]]:
    """The scripts that have run the tables."""
    sys.path.insert(0, str(BENCHMARKS))
    yield {name: importlib.import_module(name) for name in ("policies", "core_true", "suites")}
    sys.path.remove(str(BENCHMARKS))


def committed(name: str, **facts: Any) -> list[dict[str, Any]]:
    """The rows of `results/NAME.json` with these facts."""
    rows = read_json(BENCHMARKS / "results" / f"{name}.json")["rows"]
    found = [row for row in rows if all(row.get(key) == value for key, value in facts.items())]
    assert found, f"{name}.json has no row with {facts}"
    return found


@pytest.mark.parametrize(
    ("row", "budget"),
    [
        ("portfolio", 128),
        ("portfolio", 500),
        ("random weights", 128),
        ("placer+ppo, alone", 500),
        ("gnn+ppo, from nothing", 500),
    ],
)
def test_a_row_of_the_page_of_policies(row: str, budget: int, benchmarks: dict[str, ModuleType]) -> None:
    """Step time and all that was the best so far on the way there."""
    policies = benchmarks["policies"]
    contender = next(one for one in policies.contenders() if one.row == row)
    question = policies.Question(tuple(SEARCHED.split("/")), row, budget, 0)
    (known,) = committed("policies", **question.facts)
    found = policies.answer(question, contender)
    assert {key: found[key] for key in ("step_time_s", "history")} == {
        key: known[key] for key in ("step_time_s", "history")
    }


@pytest.mark.parametrize("method", ["heft", "metis", "anneal", "portfolio"])
def test_a_row_of_the_suite_core(method: str, benchmarks: dict[str, ModuleType]) -> None:
    problem = benchmarks["suites"].problem_of(*SEARCHED.split("/"))
    known = next(row for row in committed("core", problem=SEARCHED, method=method, seed=0) if row["budget"] <= 500)
    (row,) = compare(problem, CompareConfig((method,), evaluations=500)).rows
    assert row.value_s == known["step_time_s"]


def test_a_row_of_the_agent_beside_a_hidden_truth(benchmarks: dict[str, ModuleType]) -> None:
    """What `train` runs, with traced steps: one that measures few plans."""
    core_true = benchmarks["core_true"]
    rows = committed("core-true-traced", problem=LEARNED, method="learned", traced=True)
    known = min(rows, key=lambda row: (row["measured"], row["truth"]))
    case = core_true.Case(*LEARNED.split("/"), core_true.Truth.parse(known["truth"]))
    question = core_true.Question(case, "learned", known["measured"], known["allowed"], is_traced=True)
    found = core_true.answer(question, benchmarks["suites"].problem_of(*LEARNED.split("/")))
    names = ("status", "step_time_s", "evaluations", "num_measured", "why")
    assert {name: found[name] for name in names} == {name: known[name] for name in names}
