"""The page of the benchmark of splits, from rows by hand."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def core_split(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("core_split")


def row(problem: str, method: str, step_s: float, seed: int = 0, **more: Any) -> dict[str, Any]:
    return {"problem": problem, "method": method, "seed": seed, "step_time_s": step_s, "count": 1, "split": ""} | more


def test_the_summary_compares_medians_with_no_split_and_the_best_opponent(core_split: ModuleType) -> None:
    rows = [
        *(row("bert/2xK80", "auto", step_s, seed) for seed, step_s in enumerate((1.0, 2.0, 9.0))),
        row("bert/2xK80", "unsplit", 4.0),
        row("bert/2xK80", "hybrid-3d", 8.0),
        row("bert/2xK80", "pipeline", 1.0),
        row("bert/2xK80", "ring", 0.1),
        row("llama-8/4xV100-pcie", "auto", 1.0, choice_s=9.0),
        row("llama-8/4xV100-pcie", "unsplit", 8.0, choice_s=3.0),
        row("llama-8/4xV100-pcie", "pipeline", 2.0),
        row("dlrm/2xK80", "auto", 5.0),
    ]
    facts = {"date": "d", "hardware": "h", "versions": {}, "command": "c", "note": "Half of it."}
    lines = core_split.markdown(rows, facts).splitlines()
    assert "Half of it." in lines
    assert "- `unsplit`: 0.250, largest 0.500 (bert/2xK80), 2 problems; by size: –." in lines
    assert "- `unsplit`, problems of `core-micro`: 0.500, largest 0.500 (bert/2xK80), 1 problem." in lines
    assert "- the best opponent: 1.000, largest 2.000 (bert/2xK80), 2 problems; by size: –." in lines
    assert "- the best opponent, problems of `core-micro`: 2.000, largest 2.000 (bert/2xK80), 1 problem." in lines
    assert any("median 3.00, largest 3.00, above 2 on 1 of 1" in line for line in lines)


def test_the_summary_names_problems_where_an_opponent_is_faster_with_both_costs(core_split: ModuleType) -> None:
    """On the other problem each is faster with one of them."""
    rows = [
        row("bert/2xK80", "auto", 2.0, by_size_s=3.0),
        row("bert/2xK80", "pipeline", 1.6, by_size_s=2.9),
        row("dlrm/2xK80", "auto", 2.0, by_size_s=3.0),
        row("dlrm/2xK80", "pipeline", 1.6, by_size_s=3.1),
        row("dlrm/2xK80", "hybrid", 2.1, by_size_s=2.9),
    ]
    facts = {"date": "d", "hardware": "h", "versions": {}, "command": "c"}
    lines = core_split.markdown(rows, facts).splitlines()
    assert "- problems where an opponent is faster with both costs: bert/2xK80 (1.250)." in lines


def test_the_page_says_which_seeds_each_method_has(core_split: ModuleType) -> None:
    told = core_split.coverage(
        [
            *(row("bert/2xK80", method, 1.0, seed) for seed in (0, 1) for method in ("auto", "unsplit")),
            *(row("dlrm/2xK80", method, 1.0) for method in ("auto", "unsplit", "pipeline")),
        ]
    )
    both = "seeds 0, 1 on 1 problem and seed 0 on 1 problem"
    assert told == f"`auto`, `unsplit`: {both}; `pipeline`: seed 0 on 1 problem"
