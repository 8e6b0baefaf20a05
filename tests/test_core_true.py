"""The benchmark of hidden truths: its cases, what it skips when it goes on, and its tables, by hand."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from search_problems import fork_problem

from rlplace.files import read_json
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.truth import KINDS, Truth, true_problem
from rlplace.training.config import AgentConfig

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def core_true(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("core_true")
    monkeypatch.setattr(module, "problem_of", lambda workload, host: fork_problem(len(workload)))
    return module


@pytest.fixture
def tables(core_true: ModuleType) -> ModuleType:
    return importlib.import_module("core_true_tables")


def questions(core_true: ModuleType, seeds: tuple[int, ...], *methods: str, counts: tuple[int, ...] = (2,)) -> Any:
    cases = [core_true.Case("rnnlm", "2xK80", Truth("hard", seed)) for seed in seeds]
    return core_true.Settings((methods,), {"hard": counts}, 40, 100).questions(cases)


def lines_of(core_true: ModuleType, path: Path) -> list[tuple[Any, ...]]:
    return [(line["problem"], line["truth"], line["measured"], line["method"]) for line in core_true.read_lines(path)]


def test_the_suite_is_every_problem_with_every_truth(core_true: ModuleType) -> None:
    cases = core_true.cases_of("core-dev", tuple(KINDS), core_true.seeds_of("100-104"))
    assert len(cases) == len({str(case) for case in cases}) == 10 * 4 * 5
    developed = core_true.cases_of("learn-dev", ("hard",), core_true.seeds_of("3,7"))
    assert [(case.host, str(case.truth)) for case in developed] == [("random-3", "hard:3"), ("random-7", "hard:7")]


def test_no_problem_to_develop_on_is_one_to_judge_on(core_true: ModuleType) -> None:
    suites = importlib.import_module("suites")
    assert len(suites.LEARN_DEV) == len({host for _, host in suites.LEARN_DEV}) == 100
    assert not {w.partition("@")[0] for w, _ in suites.LEARN_DEV} & set(suites.WORKLOADS)


def test_rows_run_by_importance_then_by_seed_and_long_ones_first(core_true: ModuleType) -> None:
    cases = core_true.cases_of("core-dev", ("hard", "misfit"), [1, 2])
    counts = core_true.counts_of("hard,misfit=16", "4,64")
    groups = core_true.groups_of("learned,portfolio;learned-untraced", is_traced=True)
    asked = core_true.Settings(groups, counts, None, 100, is_traced=True).questions(cases)
    assert len(asked) == 2 * 10 * (3 * (2 + 1) + 2)
    order = [(q.case.truth.seed, -q.measured, q.is_traced) for q in asked]
    assert [q.method for q in asked].index("reference") == 2 * 10 * 3
    assert [(q.method, q.is_traced) for q in asked[:2]] == [("learned", True), ("portfolio", True)]
    important, rest = order[:-60], order[-60:]
    assert important == sorted(important, key=lambda each: each[:2])
    assert rest == sorted(rest)
    assert not any(is_traced for *_, is_traced in rest)
    assert core_true.groups_of("all", is_traced=False)[0].count("traced-costs") == 0


def test_it_goes_on_where_it_was_stopped(core_true: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    core_true.run(questions(core_true, (1,), "single"), path)
    assert [line[-1] for line in lines_of(core_true, path)] == ["single", "reference"]
    with path.open("a") as file:
        file.write('{"problem": "rnnl')  # killed while it wrote
    every = questions(core_true, (1, 2), "single", "portfolio", counts=(2, 3))
    core_true.run(every, path)
    lines = lines_of(core_true, path)
    assert len(lines) == len(set(lines)) == 2 * (2 * 2 + 1)
    text = path.read_text()
    core_true.run(every, path)
    assert path.read_text() == text
    case = every[0].case
    other = core_true.Settings((("single",),), {"hard": (2,)}, None, 100)  # another budget: another question
    core_true.run(other.questions([case]), path)
    assert core_true.read_lines(path)[-1]["allowed"] == AgentConfig().whole_evaluations(2)


def test_a_row_that_another_process_is_at_is_left_to_it(core_true: ModuleType, tmp_path: Path) -> None:
    path, asked = tmp_path / "kept.jsonl", questions(core_true, (1, 2), "single")
    script = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import core_true; lock = open(sys.argv[1], 'ab')\n"
        f"with core_true.claimed(lock, {core_true.key(asked[0].facts)!r}) as is_mine:\n"
        f"    print(is_mine, flush=True); input()"
    )
    command = [sys.executable, "-c", script, str(path.with_suffix(".lock"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        core_true.run(asked, path)
        assert len(lines_of(core_true, path)) == len(asked) - 1
        other.kill()
    core_true.run(asked, path)  # a claim ends with its process
    assert set(map(core_true.key, core_true.read_lines(path))) == {core_true.key(each.facts) for each in asked}


def test_a_line_has_the_score_and_the_reference_its_placement(core_true: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    core_true.run(questions(core_true, (1,), "portfolio"), path)
    row, reference = core_true.read_lines(path)
    assert (row["status"], row["num_measured"]) == ("ok", 2)
    assert row["step_time_s"] >= reference["step_time_s"] > 0
    true = Simulator(true_problem(fork_problem(5), Truth("hard", 1)), threads=1)
    devices = importlib.import_module("best_known").decode(reference["devices"])
    assert true.step_times(devices)[0] == reference["step_time_s"]


def made_row(
    problem: str, method: str, step_time_s: float | None, truth: str = "hard:1", **facts: Any
) -> dict[str, Any]:
    status = "oom" if step_time_s is None else "ok"
    row = {"problem": problem, "truth": truth, "method": method, "measured": 16, "allowed": 9, "status": status}
    return row | {"step_time_s": step_time_s, "plan_s": 1.0} | facts


def test_ratios_are_to_the_least_that_anybody_has(tables: ModuleType) -> None:
    rows = [
        made_row("a/x", "portfolio", 3.0),
        made_row("a/x", "learned", 2.0, measured=64),
        made_row("a/x", "reference", 2.5, measured=0),
        made_row("a/x", "portfolio", 3.0, truth="hard:2"),
        made_row("a/x", "reference", 1.5, truth="hard:2", measured=0),
        made_row("b/x", "portfolio", None),
    ]
    told = tables.with_ratios(rows)
    assert [row["ratio"] for row in told] == [1.5, 1.0, 2.0, float("inf")]
    assert [row["of_search"] for row in told] == [1.2, 0.8, 2.0, float("inf")]


def test_rows_without_timelines_beside_others_are_named_so(tables: ModuleType) -> None:
    rows = [made_row("a/x", "learned", 2.0), made_row("a/x", "learned", 1.0, traced=True)]
    told = [(row["method"], row["ratio"]) for row in tables.with_ratios(rows)]
    assert told == [("learned-untraced", 2.0), ("learned", 1.0)]
    assert [row["method"] for row in tables.with_ratios(rows[:1])] == ["learned"]


def test_pairs_are_of_the_same_case_and_a_workload_counts_once(tables: ModuleType) -> None:
    mine = [made_row(f"{name}/x", "learned", None, ratio=ratio) for name, ratio in (("a", 2.0), ("b", 8.0), ("c", 1.0))]
    theirs = [made_row(f"{name}/x", "portfolio", None, ratio=1.0) for name in "ab"]
    again = [made_row("a/y", "learned", None, ratio=2.0)], [made_row("a/y", "portfolio", None, ratio=1.0)]
    told = tables.pair(mine + again[0], theirs + again[1])
    assert told.startswith("4.000 [")  # sqrt(2 * 8): that `a` has two problems makes no difference, `c` has no pair
    assert tables.pair(mine[2:], theirs) == "–"


def test_the_tables_say_what_was_run(core_true: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    core_true.append(path, {"run": {"date": "today", "hardware": "h", "versions": {"v": "1"}, "command": "command"}})
    rows = [
        *(made_row(f"{name}/x", "portfolio", 2.0) for name in ("rnnlm", "nmt")),
        *(made_row(f"{name}/x", "learned", 1.0, plan_s=3.0) for name in ("rnnlm", "nmt")),
        made_row("nmt/x", "learned", None, measured=64),
    ]
    for row in rows:
        core_true.append(path, row)
    core_true.append(path, rows[0] | {"step_time_s": 4.0})  # run again: the last word counts
    core_true.render("core-dev", path)
    told = path.with_suffix(".md").read_text()
    assert "| portfolio | 2.828 [2.000, 4.000] | – |" in told
    assert "| learned | 1.000 [1.000, 1.000] | – |" in told
    assert "| portfolio | 0.354" in told
    assert "| portfolio | 4.000 | 2.000 |" in told
    assert "| learned | 3.0, 3.0 | 1.0, 1.0 |" in told
    kept = read_json(path.with_suffix(".json"))
    assert (kept["schema"], kept["command"], len(kept["rows"])) == (1, "command", 5)
    path.unlink()
    core_true.render("core-dev", path)  # from the committed results
    assert path.with_suffix(".md").read_text() == told


def test_every_command_is_told_once_and_the_note_stays(core_true: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    facts = {"date": "today", "hardware": "h", "versions": {"v": "1"}}
    for command in ("run a --shard 1/2", "run a --shard 2/2 --name other", "run b"):
        core_true.append(path, {"run": facts | {"command": command}})
    core_true.append(path, made_row("nmt/x", "learned", 1.0))
    core_true.render("core-dev", path, "Seeds of May.")
    core_true.render("core-dev", path)
    told = path.with_suffix(".md").read_text()
    assert "\n\n    run a\n    run b\n\nSeeds of May.\n\n" in told
    path.unlink()
    core_true.render("core-dev", path, "")
    assert path.with_suffix(".md").read_text() == told.replace("\nSeeds of May.\n", "")


def test_what_is_not_finite_is_kept_as_nothing(core_true: ModuleType, tmp_path: Path) -> None:
    core_true.append(tmp_path / "kept.jsonl", {"step_time_s": float("inf")})
    assert json.loads((tmp_path / "kept.jsonl").read_text()) == {"step_time_s": None}
