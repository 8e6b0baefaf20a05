"""A measured run that is killed: what was profiled, measured and learned is not profiled, measured or learned again."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
import torch
from torch import nn

from rlplace.graphs.capturing.capture import capture
from rlplace.measure import Host, Problem
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.problem import Plan
from rlplace.session.folder import RunFolder
from rlplace.session.session import Session
from rlplace.session.session_records import MethodResult
from rlplace.training import SearchConfig, TrainConfig, phases, train
from rlplace.training.agent import agent as agents
from rlplace.training.config import AgentConfig
from rlplace.training.outputs import Table, keep_table
from rlplace.training.searches.racing_host import ROUND

CONFIG = TrainConfig(
    budget_s=12.0,
    store="off",
    isolated=False,
    search=SearchConfig(num_calibrated=6, table_rounds=2),
    agent=AgentConfig(batch=2, evaluations=50, later_evaluations=50),
)


class Killed(BaseException):
    """Stands for `kill -9`: nobody catches it."""


@pytest.fixture
def problem() -> Problem:
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())))
    graph = capture(model, torch.randn(32, 64), lambda y: (y**2).mean(), "sgd")
    return Problem.profile(graph, Host.detect("cores:2x1"), num_groups=8)


def measured(folder: Path) -> list[tuple[str, str, str]]:
    """Plan, protocol and reference of everything that was run, in order."""
    with sqlite3.connect(folder / "session.db") as database:
        return list(database.execute("SELECT plan, protocol, reference FROM measurements ORDER BY id"))


def go_on(problem: Problem, folder: Path, config: TrainConfig = CONFIG) -> None:
    run = RunFolder.reopen(folder)
    try:
        train(problem, config, run=run, resume=True)
    finally:
        run.close()


@pytest.mark.slow
@pytest.mark.parametrize("num_races", [0, 1, 5])
def test_what_was_measured_is_known_and_not_measured_again(
    num_races: int, problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder.create(tmp_path / "run")
    keep, kept = Session.keep_result, list[tuple[str, MethodResult]]()

    def killed(self: Session, method: str, state: MethodResult) -> None:
        keep(self, method, state)
        kept.append((method, state))
        if len(kept) > num_races:
            raise Killed

    monkeypatch.setattr(Session, "keep_result", killed)
    with pytest.raises(Killed):
        train(problem, CONFIG, run=run)
    run.close()
    monkeypatch.setattr(Session, "keep_result", keep)

    before = measured(run.root)
    ran: list[tuple[str, object]] = []
    told: list[int] = []
    measure, learn = Evaluator._run, agents.Agent.learn

    def noted(self: Evaluator, plans: list[Plan], protocol: object, *rest: object) -> object:
        ran.extend((plan.fingerprint, protocol) for plan in plans)
        return measure(self, plans, protocol, *rest)  # type: ignore[arg-type]

    def learned(self: agents.Agent, plans: list[Plan], outcomes: object) -> None:
        told.append(len(plans))
        learn(self, plans, outcomes)  # type: ignore[arg-type]

    monkeypatch.setattr(Evaluator, "_run", noted)
    monkeypatch.setattr(agents.Agent, "learn", learned)
    go_on(problem, run.root)

    in_races = {plan for plan, protocol, reference in before if protocol == repr(ROUND) and reference}
    reference_alone = 1
    again = [plan for plan, protocol in ran if repr(protocol) == repr(ROUND) and plan in in_races]
    assert len(again) <= reference_alone, "what was measured in the search's races answers"
    assert not [plan for plan, protocol in ran if "max_rounds=5" in repr(protocol) and repr(protocol) != repr(ROUND)], (
        "calibrated"
    )
    method, state = kept[-1]
    if method == "learned" and not state.is_searched:
        assert told[0] == 6, "the agent learns what was measured to calibrate ..."
        raced = [plan.fingerprint for race in state.races for plan in race.plans]
        believed = [plan for plan in raced if plan in {plan for plan, _, _ in before}]  # others are in no store
        assert len(believed) <= told[1] <= len(raced), "... then what was raced"
    result = json.loads((run.root / "result.json").read_text())
    assert result["best"]["step_time_s"] > 0
    searches = json.loads((run.root / "search.json").read_text())["methods"]
    assert searches["learned"]["seconds"] <= 2 * CONFIG.budget_s


@pytest.mark.slow
def test_a_method_that_had_ended_and_the_table_stay_as_they_were(
    problem: Problem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder.create(tmp_path / "run")

    def killed(session: Session, table: Table) -> None:
        keep_table(session, table)
        raise Killed

    monkeypatch.setattr(phases, "keep_table", killed)
    with pytest.raises(Killed):
        train(problem, CONFIG, run=run)
    run.close()
    monkeypatch.setattr(phases, "keep_table", keep_table)
    before = measured(run.root)
    go_on(problem, run.root)
    assert measured(run.root) == before
    result = json.loads((run.root / "result.json").read_text())
    assert result["best"]["step_time_s"] > 0
    more = TrainConfig(**{**vars(CONFIG), "budget_s": 18.0})
    go_on(problem, run.root, more)
    assert len(measured(run.root)) > len(before)
    assert measured(run.root)[: len(before)] == before
