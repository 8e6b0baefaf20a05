"""The benchmark of policies: its rows, what it skips when it goes on, its table and curves, by hand."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from search_problems import fork_problem

from rlplace.files import read_json
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.task import Budget, Task

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
PROBLEM = ("rnnlm", "2xK80")


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("policies")
    monkeypatch.setattr(module, "cache_of", lambda workload, host: fork_problem(len(workload)))
    return module


@pytest.fixture
def tables(policies: ModuleType) -> ModuleType:
    return importlib.import_module("policies_table")


def test_every_policy_that_there_is_runs_alone_with_search_and_as_a_guide(policies: ModuleType) -> None:
    rows = [one.row for one in policies.contenders()]
    assert len(rows) == len(set(rows))
    assert {"portfolio", "random weights", "portfolio, guided by placer"} <= set(rows)
    assert {f"placer+ppo, {mode}" for mode in policies.MODES} <= set(rows)


@pytest.mark.slow
def test_it_goes_on_where_it_was_stopped_and_renders(policies: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    names = ("portfolio", "random weights", "placer+ppo, with annealing")
    by_row = {one.row: one for one in policies.contenders() if one.row in names}
    questions = [policies.Question(PROBLEM, row, 40, seed) for seed in (0, 1) for row in by_row]
    policies.append(path, {"run": policies.record()})
    policies.run(questions[:2], by_row, path)
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"problem": "rnnlm/2xK80", "row"')  # killed while it wrote
    policies.run(questions, by_row, path)
    lines = [line for line in policies.read_lines(path) if "row" in line]
    assert [(line["row"], line["seed"]) for line in lines] == [(q.row, q.seed) for q in questions]
    assert all(line["evaluations"] <= 40 and line["history"][-1][1] == line["step_time_s"] for line in lines)
    policies.render(path, "core-dev")
    assert len(read_json(path.with_suffix(".json"))["rows"]) == len(questions)
    assert path.with_suffix(".png").stat().st_size > 1000
    page = path.with_suffix(".md").read_text(encoding="utf-8")
    assert all(f"| {name} | 40 | 2 |" in page for name in names)


def row(name: str, problem: str, seed: int, step_time_s: float | None, history: list[list[float]]) -> dict[str, Any]:
    return {
        "problem": problem,
        "row": name,
        "budget": 100,
        "seed": seed,
        "step_time_s": step_time_s,
        "evaluations": 100,
        "seconds": 1.0,
        "cpu_s": 2.0,
        "history": history,
    }


ROWS = [
    row("portfolio", "a/h", 0, 2.0, [[1, 4.0], [50, 2.0]]),
    row("portfolio", "b/h", 0, 1.0, [[1, 1.0]]),
    row("p+q, alone", "a/h", 0, 4.0, [[1, 4.0]]),
    row("p+q, alone", "a/h", 1, 8.0, [[10, 8.0]]),
    row("p+q, alone", "b/h", 0, 1.5, [[1, 1.5]]),
    row("p+q, alone", "b/h", 1, 1.5, [[1, 1.5]]),
]


def test_the_table_by_hand(tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "known", dict)
    best = tables.best_known_s(ROWS)
    assert best == {"a/h": 2.0, "b/h": 1.0}
    first, second = tables.summary(ROWS, best)
    assert first[:3] == ("portfolio", "100", "1")
    assert first[3].startswith("1.000")
    # medians 6 and 1.5 over 2 and 1: 3 and 1.5
    assert second[3].startswith(f"{math.sqrt(3 * 1.5):.3f}")
    assert second[4].startswith(f"{math.sqrt(3 * 1.5):.3f}")
    assert second[2:3] + second[5:] == ("2", "100.0%", "2.0", "2 of 2")
    failed = [*ROWS, row("p+q, alone", "b/h", 2, None, [])]
    assert tables.summary(failed, best)[1][-1] == "2 of 2"  # the median of three seeds has still found something
    failed += [row("p+q, alone", "b/h", seed, None, []) for seed in (3, 4)]
    assert tables.summary(failed, best)[1][-1] == "1 of 2"


def test_curves_are_medians_over_seeds_and_means_over_problems(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "known", dict)
    drawn = tables.curves(ROWS, 100)
    evaluations, ratios = drawn["portfolio"]
    assert evaluations[0] == 1
    assert evaluations[-1] == 100
    assert ratios[0] == pytest.approx(math.sqrt(2))
    assert ratios[evaluations >= 50] == pytest.approx(1.0)
    evaluations, ratios = drawn["p+q, alone"]
    assert np.isinf(ratios[evaluations < 10]).all()  # one of two seeds has nothing yet
    assert ratios[-1] == pytest.approx(math.exp((np.log([2, 4]).mean() + math.log(1.5)) / 2))


def test_random_weights_spend_the_budget_on_distinct_placements_and_repeat(policies: ModuleType) -> None:
    random_weights = importlib.import_module("random_weights")

    def run() -> tuple[float, int]:
        problem = fork_problem(3)
        task = Task(problem, Simulator(problem, threads=1), Budget(20), seed=4)
        random_weights.solve(task)
        return task.best_s, task.evaluations

    assert run() == run()
    assert 2 <= run()[1] <= 20
