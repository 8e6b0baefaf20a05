"""`train` on problems small enough to know the answer, simulated and real."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from micrographs import fork_join
from torch import nn

from rlplace.errors import InvalidValue, RunnerError, UnknownName
from rlplace.files import read_json
from rlplace.graphs import Grouping, capture
from rlplace.graphs.grouping.constraints import Constraints
from rlplace.measure import Costs, Device, Host, Link, Problem, Route, Simulator, load_placement
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.explain.explanation import load_explanation
from rlplace.measure.host_model import load_learned_host
from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Plan
from rlplace.measure.timing.race import RaceProtocol
from rlplace.policy import make_policy
from rlplace.report.console import make_progress
from rlplace.search.methods import METHODS, Method, find, register_method
from rlplace.search.task import Budget, Task
from rlplace.session.folder import RunFolder
from rlplace.session.session import Session
from rlplace.training import SearchConfig, TrainConfig, train
from rlplace.training.outputs import title_of
from rlplace.training.tracking import make_tracker


def simulated_problem() -> Problem:
    graph = fork_join(3, 2, 1000)
    host = Host(
        "two",
        tuple(Device(f"d{k}", "k", "simulated", 1 << 30) for k in range(2)),
        (Link("a", 1e6), Link("b", 1e6)),
        (Route("d0", "d1", ("a",)), Route("d1", "d0", ("b",))),
    )
    costs = np.full((graph.num_ops, 2), 0.01)
    return Problem(graph, host, Costs(costs, "estimated"), Grouping(np.arange(graph.num_ops)))


@pytest.mark.slow
def test_on_a_simulated_host_it_finds_the_optimum_and_measures_nothing(tmp_path: Path) -> None:
    problem = simulated_problem()
    every = np.array(list(itertools.product(range(2), repeat=problem.graph.num_ops)), dtype=np.int32)
    optimum_s = Simulator(problem).step_times(every).min()
    run = RunFolder.create(tmp_path / "run")
    result = train(problem, budget_s=4.0, seed=0, run=run)
    assert not result.is_measured
    assert result.step_time_s == pytest.approx(optimum_s, rel=1e-12)
    assert [row["method"] for row in result.table.rows] == [
        *("single", "blocks", "round-robin", "expert", "eft", "heft"),
        *("policy", "portfolio", "eager"),
    ]
    assert result.table.row("policy")["step_time_s"] == result.table.row("portfolio")["step_time_s"]
    assert result.table.row("eager")["status"] == "skipped"
    result.placement.require(problem.graph, problem.host)
    (policy := make_policy(problem)).load(run.path("policy.safetensors"))
    placed = problem.grouping.expand(policy.mode())
    assert Simulator(problem).step_times(placed)[0] == pytest.approx(optimum_s, rel=1e-12)
    explanation = load_explanation(run.path("explanation.json"))
    assert (explanation.kind, explanation.step_time_s, explanation.method) == (
        "simulated",
        result.step_time_s,
        result.table.best,
    )
    assert explanation.path.seconds == explanation.explained_s == result.step_time_s
    run.close()


def test_any_method_can_be_trained_and_portfolio_stands_beside_it() -> None:
    result = train(simulated_problem(), budget_s=0.5, search=SearchConfig(method="genetic"))
    assert repr(result).startswith(f"TrainResult(best {result.table.best!r}, ")
    assert repr(result).endswith(" a step, simulated)")
    assert [row["method"] for row in result.table.rows][-3:] == ["genetic", "portfolio", "eager"]
    result = train(simulated_problem(), budget_s=0.5, search=SearchConfig(method="portfolio"))
    assert [row["method"] for row in result.table.rows][-2:] == ["portfolio", "eager"]


def test_how_long_it_takes_is_told_before_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFolder.create(tmp_path / "run")
    result = train(simulated_problem(), budget_s=0.6, search=SearchConfig(method="genetic"), run=run, progress=True)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == (
        "about 0:04 from here, `budget` of the search 0:01: heuristics 0:03, search 0:01; "
        "genetic and portfolio search side by side"
    )
    assert said[-2].startswith("took ")
    assert said[-2].endswith("(expected: about 0:04)")
    assert said[-1] == result.summary
    kept = read_json(run.path("result.json"))["durations"]
    assert kept == {"expected": result.expected.to_dict(), "taken": result.durations.to_dict()}
    assert result.expected.search_s == 0.6
    assert result.durations.search_s > 0.0
    assert result.durations.total_s == pytest.approx(sum(list(kept["taken"].values())[:-1]))
    run.close()


@pytest.mark.parametrize("progress", [None, False])
def test_off_a_terminal_the_last_line_alone_is_told(progress: bool | None, capsys: pytest.CaptureFixture[str]) -> None:
    # with a limit for all of it that leaves the search its least share, or it would last until the test is stopped
    search = SearchConfig(method="portfolio")
    result = train(simulated_problem(), budget_s=3600.0, total_s=2.0, search=search, progress=progress)
    assert result.expected.search_s == pytest.approx(0.2)
    assert "one device" in result.summary
    assert capsys.readouterr() == ("", "" if progress is False else f"{result.summary}\n")


def test_the_title_of_a_timeline_is_the_length_of_its_axis() -> None:
    problem = simulated_problem()
    simulator = Simulator(problem)
    timeline = simulator.timeline(simulator.plan(np.zeros(problem.graph.num_ops, dtype=np.int32)))
    shown = f"{timeline.step_s * 1e3:.1f} ms"
    assert title_of("heft", timeline, timeline.step_s) == f"heft: one simulated step, {shown}"
    assert title_of("heft", timeline, 1e-3) == f"heft: one simulated step, {shown} (median of many: 1.0 ms)"


def test_methods_that_raise_are_rows_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(task: Task, **options: object) -> None:
        raise ZeroDivisionError("no device is left")

    monkeypatch.setattr("rlplace.search.schedule.list_schedulers.solve_heft", failing)
    monkeypatch.setattr("rlplace.search.improve.portfolio.solve_portfolio", failing)
    result = train(simulated_problem(), budget_s=0.5, search=SearchConfig(method="genetic"))
    for name in ("heft", "portfolio"):
        row = result.table.row(name)
        assert (row["status"], row["step_time_s"]) == ("error", None)
        assert row["why"].startswith("ZeroDivisionError: no device is left (")
        assert "in failing" in row["traceback"]
    assert result.table.row("genetic")["status"] == "ok"
    assert result.table.best in ("genetic", "blocks", "round-robin", "expert", "eft")


def test_when_nothing_runs_to_its_end_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Measurement("timeout", float("inf"), why="it did not end within 120 s")
    monkeypatch.setattr(
        Evaluator, "measure_plans", lambda self, plans, protocol, others, **_: [late] * (len(plans) + len(others))
    )
    with pytest.raises(RunnerError, match="single: timeout: it did not end within 120 s; blocks: timeout"):
        train(simulated_problem(), budget_s=0.05, seed=0)


def test_mistakes_are_refused_before_anything_is_searched() -> None:
    with pytest.raises(InvalidValue, match="bugdet_s"):
        train(simulated_problem(), bugdet_s=3)
    with pytest.raises(UnknownName, match="portfolio"):
        train(simulated_problem(), search=SearchConfig(method="portfoli"))


@pytest.mark.slow
def test_on_this_machine_the_best_of_the_table_is_handed_back_and_tracked(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)), torch.randn(16, 32)
    graph = capture(model, x, lambda y: (y**2).mean(), "adam")
    problem = Problem.profile(graph, Host.detect("cores"), num_groups=8)
    tracker = make_tracker("offline", tmp_path, {"test": True})
    search = SearchConfig(num_calibrated=0, table_rounds=5)
    config = TrainConfig(budget_s=4.0, search=search)
    result = train(problem, config, tracker=tracker)
    tracker.finish()
    assert result.is_measured
    assert result.table.best in result.table.plans
    assert np.array_equal(result.placement.devices, result.table.plans[result.table.best].devices)
    assert result.timeline.source == "measured"
    learned, portfolio = result.table.row("learned"), result.table.row("portfolio")
    assert 0 < portfolio["measured"] <= learned["measured"]
    assert list((tmp_path / "wandb").glob("offline-run-*"))


@pytest.mark.slow
def test_on_this_machine_what_was_learned_about_it_is_kept_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, x = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)), torch.randn(16, 32)
    problem = Problem.profile(capture(model, x, lambda y: (y**2).mean(), "adam"), Host.detect("cores"), num_groups=8)
    run = RunFolder.create(tmp_path / "run")
    search = SearchConfig(num_calibrated=6, table_rounds=3)
    result = train(problem, budget_s=2.0, search=search, run=run, progress=make_progress())
    learned = load_learned_host(run.path("host_model.json"))
    assert learned.cost_source == "profiled"
    assert {factor.kind for factor in learned.factors} >= {"op type", "device", "overhead", "dispatch"}
    assert result.table.row("learned")["measured"] > 0
    said = capsys.readouterr().err
    assert "calibrated on 6 placements" in said
    assert "about the host:" in said or "as profiled, as far as" in said
    explanation = load_explanation(run.path("explanation.json"))
    assert (explanation.kind, explanation.step_time_s) == ("measured", result.step_time_s)
    path = explanation.path
    assert path.op_s + path.transfer_s + path.wait_s == pytest.approx(explanation.explained_s)
    one_device, _, eager = explanation.alternatives
    assert one_device.step_time_s == result.table.row("single")["step_time_s"]
    assert (eager.step_time_s, eager.kind) == (result.table.row("eager")["step_time_s"], "measured")
    run.close()


@pytest.mark.slow
@pytest.mark.parametrize("is_traced", [True, False])
def test_on_this_machine_calibration_and_races_of_learned_have_timelines_unless_it_is_not_traced(
    is_traced: bool, tmp_path: Path
) -> None:
    model, x = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)), torch.randn(16, 32)
    graph = capture(model, x, lambda y: (y**2).mean(), "adam")
    problem = Problem.profile(graph, Host.detect("cores:2"), num_groups=8)
    run = RunFolder.create(tmp_path / "run")
    search = SearchConfig(num_calibrated=None if is_traced else 6, table_rounds=2)
    result = train(problem, budget_s=4.0, search=search, run=run, is_traced=is_traced, isolated=False, store="off")
    run.close()
    with Session.read(run.root) as session:
        session.load_results(problem)
        known = session.calibration(problem)
        races = {name: session.of(name, 0.0) for name in ("learned", "portfolio")}
    assert len(known.plans) == (4 if is_traced else 6)
    assert [outcome.timeline is not None for outcome in known.outcomes] == [is_traced] * len(known.plans)
    traced = {
        name: [outcome.timeline for race in found.races for outcome in race.outcomes if not race.is_final]
        for name, found in races.items()
        if found is not None
    }
    has_raced = bool(traced["learned"])  # a busy machine may leave it no time for a race, or nothing worth one
    assert any(timeline is not None for timeline in traced["learned"]) == (is_traced and has_raced)
    seen = {plan.fingerprint for race in races["learned"].races for plan in race.plans}
    seen |= {plan.fingerprint for plan in known.plans}
    for race in races["portfolio"].races:  # of its own plans it traces none; one that was traced before comes with that
        for plan, outcome in zip(race.plans, race.outcomes, strict=True):
            assert outcome.timeline is None or race.is_final or (is_traced and plan.fingerprint in seen)
    assert not has_raced or ("traced steps took" in result.table.row("learned").get("why", "")) == is_traced
    for plan, outcome in zip(known.plans, known.outcomes, strict=True):
        if outcome.timeline is not None:
            runs = ~graph.is_source
            assert (outcome.timeline.op_end_s[runs] > outcome.timeline.op_start_s[runs]).mean() > 0.5
            assert outcome.timeline.transfer_tensor.tolist() == plan.transfer_tensor.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("pins", [["op1=d1"], ["op1=d1", "op2=d0"]])
def test_nothing_is_ever_proposed_where_it_may_not_be(pins: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = simulated_problem()
    constraints = Constraints.parse(pins=pins, together=["op3,op5"])
    problem = Problem.grouped(plain.graph, plain.host, plain.costs, 9, "none", constraints=constraints)
    tried: list[np.ndarray] = []
    step_times = Simulator.step_times
    monkeypatch.setattr(
        Simulator,
        "step_times",
        lambda self, placements, *rest: (tried.append(placements), step_times(self, placements, *rest))[1],
    )
    result = train(problem, budget_s=0.5, seed=0)
    devices = np.concatenate([np.atleast_2d(placements) for placements in tried])
    assert (devices[:, 1] == 1).all()
    assert np.array_equal(devices[:, 3], devices[:, 5])
    row = result.table.row("single")
    if len(pins) == 2:  # no device may hold both
        assert (devices[:, 2] == 0).all()
        assert (row["status"], row["placements"]) == ("skipped", 0)
    else:
        assert row["status"] == "ok"
    assert result.placement.plan.devices[1] == 1


class SlowingMachine:
    """An `Evaluator` of a machine that takes three times as long from its second race on, where `good` takes 0.4 of the
    reference's time and all else 0.6; it is stopped, as by Ctrl-C, when it has run `most` races."""

    is_measured, num_recalled, num_repeated = True, 0, 0

    def __init__(self, problem: Problem, simulator: Simulator, good: list[int], most: int) -> None:
        self.problem, self.simulator, self._good, self._left, self._drift = problem, simulator, good, most, 1.0

    def measure_plans(self, plans: Sequence[Plan], protocol: RaceProtocol, **options: object) -> list[Measurement]:
        if not self._left:
            raise KeyboardInterrupt
        self._left, drift, self._drift = self._left - 1, self._drift, 3.0
        times = [drift * (0.4 if plan.devices.tolist() == self._good else 0.6) for plan in plans]
        return [Measurement("ok", step_s, (step_s,), reference_s=drift) for step_s in times]

    def close(self) -> None:
        pass


@pytest.mark.slow
def test_ctrl_c_keeps_the_better_ratio_while_the_machine_slows_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, run = simulated_problem(), RunFolder.create(tmp_path / "run")
    best = find(problem, "portfolio", Simulator(problem), Budget(1000)).devices
    assert best is not None
    worse = np.roll(best, 1)

    def score_worse(task: Task) -> None:
        task.score(worse)

    def stopped_after(races: int, *, resume: bool) -> str:
        monkeypatch.setattr(
            "rlplace.training.phases.make_evaluator",
            lambda cluster, problem, simulator, *_, **__: SlowingMachine(problem, simulator, best.tolist(), races),
        )
        with pytest.raises(KeyboardInterrupt):
            train(problem, budget_s=0.5, search=SearchConfig(method="worse"), run=run, resume=resume)
        return load_placement(run.path("placement.json")).method

    register_method(Method("worse", score_worse, "search", "a test"))
    try:
        assert stopped_after(1, resume=False) == "worse"
        assert stopped_after(2, resume=False) == "portfolio"  # 1.2 s beside a reference of 3 s, not 0.6 s beside 1 s
        assert stopped_after(0, resume=True) == "portfolio"
    finally:
        METHODS.unregister("worse")
