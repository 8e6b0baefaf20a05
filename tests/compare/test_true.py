"""Comparing under a hidden truth: budgets, scores, failures, JSON, and what the command refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_agent import fake_agent
from search_problems import fork_problem

from rlplace.cli.main import main
from rlplace.compare.row import Comparison
from rlplace.compare.true import TrueConfig, compare_true
from rlplace.compare.true_rows import ROWS, Answer, Trial
from rlplace.errors import InvalidValue, MissingExtra, RunnerError, UnknownName
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.truth import Truth, true_problem

TINY = "nmt@small,layers=1,units=8,steps=2,vocab=20,batch=4"
HARD = Truth("hard", 3)


def test_a_row_is_scored_by_the_truth_of_the_plan_that_it_names() -> None:
    problem = fork_problem(0)
    comparison = compare_true(problem, TrueConfig(HARD, 6, ("single", "portfolio"), evaluations=200), workload="fork")
    true = Simulator(true_problem(problem, HARD), threads=1)
    single, portfolio = comparison.rows
    for row in comparison.rows:
        assert row.plan is not None
        assert row.value_s == true.retime(row.plan).step_time_s
        assert row.simulated_s == Simulator(problem).retime(row.plan).step_time_s != row.value_s
        assert row.value_s >= comparison.lower_bound_s
        assert (row.status, row.seed) == ("ok", 3)
    assert (single.measured, portfolio.measured) == (0, 6)
    assert portfolio.evaluations <= 200
    assert comparison.truth == "hard:3"


def test_each_row_has_measurements_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise of the k-th is the same for every row, whoever ran before."""
    heard: list[list[float]] = []

    def listening(trial: Trial) -> Answer:
        plan = trial.simulator.plan(np.zeros(6, dtype=np.int32))
        outcomes: list[Measurement] = trial.meter.measure_plans([plan, plan])
        heard.append([outcome.step_time_s for outcome in outcomes])
        return Answer(plan, 0)

    monkeypatch.setattr("rlplace.compare.true.ROWS", {"one": listening, "other": listening})
    one, other = compare_true(fork_problem(0), TrueConfig(HARD, 2)).rows
    assert heard[0] == heard[1]
    assert heard[0][0] != heard[0][1]
    assert (one.measured, other.measured) == (2, 2)
    noise = [np.random.Generator(np.random.PCG64([3, k])).lognormal(0.0, 0.01) for k in range(2)]
    assert heard[0] == [one.value_s * factor for factor in noise]


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (RunnerError("no luck"), "error", "no luck"),
        (MissingExtra("ortools", "exact"), "skipped", "rlplace[exact]"),
        (MemoryError(), "error", "out of memory"),
        (KeyError("d:9"), "error", "KeyError: 'd:9' (test_true.py"),
    ],
)
def test_a_row_that_fails_is_one_row(
    error: Exception, status: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(trial: Trial) -> Answer:
        trial.measure([np.zeros(6, dtype=np.int32)])
        raise error

    monkeypatch.setattr("rlplace.compare.true.ROWS", {"bad": failing, "single": ROWS["single"]})
    bad, single = compare_true(fork_problem(0), TrueConfig(HARD, 2)).rows
    assert (bad.status, bad.measured, single.status) == (status, 1, "ok")
    assert words in bad.why


def test_no_answer_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlplace.compare.true.ROWS", {"none": lambda trial: Answer(None, 5)})
    (row,) = compare_true(fork_problem(0), TrueConfig(HARD, 2)).rows
    assert (row.status, row.evaluations, row.value_s) == ("oom", 5, np.inf)


def test_ctrl_c_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(trial: Trial) -> Answer:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlplace.compare.true.ROWS", {"single": ROWS["single"], "stopped": interrupted})
    told = compare_true(fork_problem(0), TrueConfig(HARD, 2)).to_dict()
    assert told["interrupted"] is True
    assert [row["method"] for row in told["rows"]] == ["single"]
    with pytest.raises(KeyboardInterrupt):
        compare_true(fork_problem(0), TrueConfig(HARD, 2, ("stopped",)))


def test_budgets_are_equal() -> None:
    config = TrueConfig(HARD, 16, ("portfolio", "single", "portfolio"), seconds=8.0)
    assert config.names == ("single", "portfolio")
    assert config.budget.seconds == 4.0
    assert config.budget.evaluations == 40_000
    assert config.budget.measurements == 16
    assert TrueConfig(HARD, 16).names == tuple(ROWS)
    assert TrueConfig(HARD, 16, evaluations=5).budget.evaluations == 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"methods": ("learnt",)}, "did you mean 'learned'"),
        ({"measured": 0}, "measured"),
        ({"methods": "learned"}, "a tuple of names"),
        ({"evaluations": 0}, "evaluations"),
        ({"seconds": 0.0}, "seconds"),
        ({"seconds": np.inf}, "finite"),
    ],
)
def test_mistakes_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises((UnknownName, InvalidValue), match=words):
        TrueConfig(**({"truth": HARD, "measured": 4} | options))


def test_the_command_prints_the_schema_of_compare_and_the_truth(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    command = ["compare", TINY, "--host", "4xV100-pcie", "--true", "misfit:2", "--measured", "4", "--json"]
    options = ["--methods", "single,portfolio", "--evaluations", "60"]
    assert main([*command, *options, "--save", str(tmp_path)]) == 0
    said = capsys.readouterr()
    told: dict[str, Any] = json.loads(said.out)
    assert (told["schema"], told["truth"], told["measured"], told["objective"]) == (1, "misfit:2", False, "latency")
    assert told["budget"] == {"evaluations": 60, "seconds": None, "measured": 4}
    assert [(row["method"], row["measured"], row["seed"]) for row in told["rows"]] == [
        ("single", 0, 2),
        ("portfolio", 4, 2),
    ]
    assert all(row["step_time_s"] >= told["lower_bound_s"] for row in told["rows"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["portfolio-2.placement.json", "single-2.placement.json"]
    assert "truth: misfit:2" in said.err
    assert main([*command, *options, "--quiet"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert [row["step_time_s"] for row in again["rows"]] == [row["step_time_s"] for row in told["rows"]]


def test_the_picture_compares_step_times_of_the_true_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its reference, the best single device, has to be as slow as the truth says."""
    drawn: list[Path] = []

    def draw_rows(problem: Problem, comparison: Comparison, path: Path) -> None:
        for row in comparison.rows:
            assert row.plan is not None
            assert Simulator(problem, threads=1).retime(row.plan).step_time_s == row.value_s
        drawn.append(path)

    monkeypatch.setattr("rlplace.compare.true_session.draw_rows", draw_rows)
    command = ["compare", TINY, "--host", "4xV100-pcie", "--true", "hard:1", "--measured", "4", "--evaluations", "60"]
    assert main([*command, "--methods", "single,portfolio", "--plot", str(tmp_path / "best.png"), "--quiet"]) == 0
    assert drawn == [tmp_path / "best.png"]


def test_an_agent_whose_plan_is_of_another_graph_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, _ = fake_agent([], [0] * 5)
    monkeypatch.setitem(sys.modules, "rlplace.training.agent", agent)
    with pytest.raises(InvalidValue, match="6 devices"):
        compare_true(fork_problem(0), TrueConfig(HARD, 2, ("learned",)))


def test_an_agent_that_measures_too_much_has_no_score(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, _ = fake_agent([[0] * 6] * 3, [0] * 6)
    monkeypatch.setitem(sys.modules, "rlplace.training.agent", agent)
    (row,) = compare_true(fork_problem(0), TrueConfig(HARD, 2, ("learned",))).rows
    assert (row.status, row.measured, row.value_s) == ("error", 0, np.inf)
    assert "2 are allowed" in row.why


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--true", "hrad:1", "--measured", "4", "--host", "4xV100-pcie"], ["hrad", "hard"]),
        (["--true", "hard", "--measured", "4", "--host", "4xV100-pcie"], ["hard:0"]),
        (["--true", "hard:1", "--host", "4xV100-pcie"], ["measured", "--measured 16"]),
        (["--measured", "4", "--host", "4xV100-pcie"], ["true", "--true hard:0"]),
        (["--true", "hard:1", "--measured", "0", "--host", "4xV100-pcie"], ["measured"]),
        (["--true", "hard:1", "--measured", "4", "--host", "cores"], ["simulated", "preset"]),
        (["--true", "hard:1", "--measured", "4"], ["simulated", "preset"]),
        (["--true", "hard:1", "--measured", "4", "--host", "cores", "--gangs"], ["simulated"]),
        (["--true", "hard:1", "--measured", "4", "--host", "4xV100-pcie", "--objective", "throughput"], ["latency"]),
        (["--true", "hard:1", "--measured", "4", "--host", "4xV100-pcie", "--seeds", "2"], ["seeds"]),
        (
            ["--true", "hard:1", "--measured", "4", "--host", "4xV100-pcie", "--methods", "anneal"],
            ["anneal", "learned"],
        ),
        (["--true", "hard:1", "--measured", "4", "--host", "4xV100-pcie", "--methods", ","], ["methods"]),
    ],
)
def test_mistakes_exit_with_2(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "nmt", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    for word in words:
        assert word in said.err


@pytest.mark.parametrize("option", [["--true", "hard:1"], ["--measured", "4"]])
def test_a_published_file_has_no_hidden_truth(
    option: list[str], tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "chain.json"
    path.write_text(json.dumps({"maxFPGAs": 2}), encoding="utf-8")
    assert main(["compare", str(path), *option]) == 2
    assert "none with such a file" in capsys.readouterr().err
