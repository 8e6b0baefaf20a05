"""The benchmark of hidden truths: budgets, scores, failures, JSON, and what its command refuses.

Rows under a hidden truth, on graphs small enough to know every placement.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_agent import AgentConfig, fake_agent
from search_problems import chain_problem, fork_problem

from rlplace.compare.comparison import Comparison
from rlplace.errors import InvalidValue, MissingExtra, RunnerError, UnknownName, UserError
from rlplace.measure.costs.costs import Costs
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.truth import Truth, true_problem
from rlplace.search.task import Budget

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
from hidden_truth import ROWS, Answer, Meter, Trial, TrueConfig, compare_true, main  # noqa: E402

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

    monkeypatch.setattr("hidden_truth.ROWS", {"one": listening, "other": listening})
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
        (KeyError("d:9"), "error", "KeyError: 'd:9' (test_hidden_truth.py"),
    ],
)
def test_a_row_that_fails_is_one_row(
    error: Exception, status: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(trial: Trial) -> Answer:
        trial.measure([np.zeros(6, dtype=np.int32)])
        raise error

    monkeypatch.setattr("hidden_truth.ROWS", {"bad": failing, "single": ROWS["single"]})
    bad, single = compare_true(fork_problem(0), TrueConfig(HARD, 2)).rows
    assert (bad.status, bad.measured, single.status) == (status, 1, "ok")
    assert words in bad.why


def test_no_answer_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hidden_truth.ROWS", {"none": lambda trial: Answer(None, 5)})
    (row,) = compare_true(fork_problem(0), TrueConfig(HARD, 2)).rows
    assert (row.status, row.evaluations, row.value_s) == ("oom", 5, np.inf)


def test_ctrl_c_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(trial: Trial) -> Answer:
        raise KeyboardInterrupt

    monkeypatch.setattr("hidden_truth.ROWS", {"single": ROWS["single"], "stopped": interrupted})
    told = compare_true(fork_problem(0), TrueConfig(HARD, 2)).to_dict()
    assert told["interrupted"] is True
    assert [row["method"] for row in told["rows"]] == ["single"]
    with pytest.raises(KeyboardInterrupt):
        compare_true(fork_problem(0), TrueConfig(HARD, 2, ("stopped",)))


def test_budgets_are_equal() -> None:
    config = TrueConfig(HARD, 16, ("portfolio", "single", "portfolio"), seconds=8.0)
    assert config.names == ("single", "portfolio")
    assert config.budget().seconds == 4.0
    assert config.budget().evaluations == 40_000
    assert config.budget().measurements == 16
    assert TrueConfig(HARD, 16, is_traced=True).names == tuple(ROWS)
    assert TrueConfig(HARD, 16).names == tuple(name for name in ROWS if name != "traced-costs")
    assert TrueConfig(HARD, 16, evaluations=5).budget().evaluations == 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"methods": ("learnt",)}, "did you mean 'learned'"),
        ({"measured": 0}, "measured"),
        ({"methods": ("traced-costs",)}, "Add --trace"),
        ({"methods": "learned"}, "methods is 'learned', expected a list"),
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
    command = [TINY, "--host", "4xV100-pcie", "--true", "misfit:2", "--measured", "4", "--json"]
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


def test_the_command_measures_with_timelines(capsys: pytest.CaptureFixture[str]) -> None:
    command = [TINY, "--host", "4xV100-pcie", "--true", "in-place:2", "--measured", "4", "--json", "--trace"]
    assert main([*command, "--methods", "traced-costs,learned", "--evaluations", "120"]) == 0
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert (told["truth"], told["traced"]) == ("in-place:2", True)
    assert [(row["method"], row["status"]) for row in told["rows"]] == [("traced-costs", "ok"), ("learned", "ok")]
    assert told["rows"][0]["measured"] == 4
    assert told["rows"][1]["measured"] in (3, 4)  # its last search may find nothing better
    assert "tracing takes" in told["rows"][1]["why"]
    assert "with timelines" in said.err


def test_the_picture_compares_step_times_of_the_true_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its reference, the best single device, has to be as slow as the truth says."""
    drawn: list[Path] = []

    def draw_rows(problem: Problem, comparison: Comparison, path: Path) -> None:
        for row in comparison.rows:
            assert row.plan is not None
            assert Simulator(problem, threads=1).retime(row.plan).step_time_s == row.value_s
        drawn.append(path)

    monkeypatch.setattr("rlplace.compare.run_compare.draw_rows", draw_rows)
    command = [TINY, "--host", "4xV100-pcie", "--true", "hard:1", "--measured", "4", "--evaluations", "60"]
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
        (["--true", "hard:1"], ["measured"]),
        (["--measured", "4"], ["true"]),
        (["--true", "hard:1", "--measured", "0", "--host", "4xV100-pcie"], ["measured"]),
        (["--true", "hard:1", "--measured", "4", "--host", "cores"], ["simulated", "preset"]),
        (["--true", "hard:1", "--measured", "4", "--objective", "throughput"], ["objective"]),
        (
            ["--true", "hard:1", "--measured", "4", "--host", "4xV100-pcie", "--methods", "anneal"],
            ["anneal", "learned"],
        ),
        (["--true", "hard:1", "--measured", "4", "--host", "4xV100-pcie", "--methods", ","], ["methods"]),
    ],
)
def test_mistakes_are_errors_of_the_command(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((UserError, SystemExit)) as told:
        main(["nmt", *arguments])
    said = f"{told.value} {capsys.readouterr().err}"
    for word in words:
        assert word in said


class Exact:
    """A measurer without noise."""

    def __init__(self, true: Problem) -> None:
        self.simulator = Simulator(true, threads=1)

    def measure_plans(self, plans: Sequence[Plan]) -> list[Measurement]:
        return [self.simulator.retime(plan) for plan in plans]


def trial(problem: Problem, true: Problem, measured: int, evaluations: int = 400) -> Trial:
    meter = Meter(Exact(true), measured)
    return Trial(problem, Simulator(problem, threads=1), meter, Budget(evaluations, math.inf, measured), seed=3)


def slower(problem: Problem, device: int, factor: float) -> Problem:
    """The problem as it is where one device is slower than known."""
    op_time_s = problem.costs.op_time_s.copy()
    op_time_s[:, device] *= factor
    return dataclasses.replace(problem, costs=Costs(op_time_s, "estimated"))


def true_s(true: Problem, plan: Plan | None) -> float:
    assert plan is not None
    return Simulator(true, threads=1).retime(plan).step_time_s


def test_portfolio_measures_as_many_as_it_may_and_names_the_best_of_them() -> None:
    problem = fork_problem(0)
    true = slower(problem, 0, 3.0)
    one = trial(problem, true, 8)
    answer = ROWS["portfolio"](one)
    assert len(one.meter.kept) == 8
    assert true_s(true, answer.plan) == min(outcome.step_time_s for _, outcome in one.meter.kept)
    assert 0 < answer.evaluations <= 400


def test_portfolio_finds_the_device_that_is_really_fast_among_alike_ones() -> None:
    """A chain belongs on one device; nominally three are alike, in truth two are slower."""
    problem = chain_problem(4, 3)
    true = slower(slower(problem, 0, 2.0), 1, 2.0)
    answer = ROWS["portfolio"](trial(problem, true, 12, 600))
    assert answer.plan is not None
    assert answer.plan.devices.tolist() == [2, 2, 2, 2]


def test_portfolio_on_the_truth_scores_by_measuring() -> None:
    problem = fork_problem(1)
    true = slower(problem, 1, 4.0)
    one = trial(problem, true, 30)
    answer = ROWS["portfolio-measured"](one)
    assert len(one.meter.kept) <= 30
    assert answer.evaluations == 0
    assert true_s(true, answer.plan) == min(outcome.step_time_s for _, outcome in one.meter.kept)


def test_calibrating_helps_where_the_figures_that_are_fitted_are_wrong() -> None:
    """Copies take 20 times as long as known: half of the measurements tell, the rest are of what then looks best."""
    problem = fork_problem(2)
    links = tuple(
        dataclasses.replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / 20) for link in problem.host.links
    )
    true = dataclasses.replace(problem, host=dataclasses.replace(problem.host, links=links))
    one = trial(problem, true, 16)
    answer = ROWS["calibrated"](one)
    assert len(one.meter.kept) == 16
    assert len({plan.fingerprint for plan, _ in one.meter.kept}) == 16
    every = (np.arange(64)[:, None] >> np.arange(6) & 1).astype(np.int32)
    assert true_s(true, answer.plan) <= 1.05 * Simulator(true, threads=1).step_times(every).min()
    assert 0 < answer.evaluations <= 400


@pytest.mark.parametrize("measured", [1, 2, 5])
def test_with_few_measurements_nothing_is_calibrated_and_all_are_used(measured: int) -> None:
    one = trial(fork_problem(2), fork_problem(2), measured)
    assert ROWS["calibrated"](one).plan is not None
    assert len(one.meter.kept) == measured


def test_single_measures_nothing() -> None:
    one = trial(slower(chain_problem(3, 2), 0, 2.0), chain_problem(3, 2), 4)
    answer = ROWS["single"](one)
    assert answer.plan is not None
    assert answer.plan.devices.tolist() == [1, 1, 1]
    assert one.meter.kept == []


@pytest.mark.parametrize(
    ("row", "config"),
    [
        ("learned", AgentConfig()),
        ("learned-no-prior", AgentConfig(is_prior=False)),
        ("learned-mean", AgentConfig(is_thompson=False)),
        ("learned-no-permutations", AgentConfig(is_permuted=False)),
    ],
)
def test_the_agent_gets_the_whole_budget_and_its_answer_counts(
    row: str, config: AgentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it names another plan than the best that it measured."""
    agent, calls = fake_agent([[0, 0, 0], [1, 1, 1]], [0, 1, 1])
    monkeypatch.setitem(sys.modules, "rlplace.training.agent", agent)
    one = trial(chain_problem(3, 2), chain_problem(3, 2), 4)
    answer = ROWS[row](one)
    assert answer.plan is not None
    assert (answer.plan.devices.tolist(), answer.evaluations) == ([0, 1, 1], 7)
    assert answer.why == "line 0; line 1; line 2"
    assert calls == [(config, one.budget, 3, [3.0, 3.0])]


def test_a_meter_gives_no_more_than_it_may_and_knows_the_best() -> None:
    problem = chain_problem(2, 2)
    meter, simulator = Meter(Exact(slower(problem, 0, 2.0)), 3), Simulator(problem, threads=1)
    assert meter.best is None
    plans = [simulator.plan(np.full(2, device, dtype=np.int32)) for device in (0, 1)]
    meter.measure_plans(plans)
    assert meter.best is plans[1]
    assert [(best.measurements, best.best_s) for best in meter.history] == [(1, 4.0), (2, 2.0)]
    with pytest.raises(RunnerError, match="4 measurements"):
        meter.measure_plans(plans)
    assert len(meter.kept) == 2
