"""Training where placements end their process: the search settles on one that runs, traced or not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from core_hosts import core_host
from faulty_ops import faulty_graph

from rlplace.errors import RunnerError
from rlplace.files import read_json
from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.problem import Plan, Problem
from rlplace.report.chrome_trace import Trace
from rlplace.session.folder import RunFolder
from rlplace.training import TrainConfig, train
from rlplace.training.config import SearchConfig

SEARCH = SearchConfig(method="random", num_calibrated=0, table_rounds=2)


def problem() -> Problem:
    """The input, an op that aborts on `cpu:1`, where it is said to be fast, and a sum, which is slow there."""
    graph = faulty_graph(("abort",))
    op_time_s = np.array([[0.0, 0.0], [1.0, 0.1], [0.1, 3.0]])
    return Problem(graph, core_host(2), Costs(op_time_s, "estimated"), Grouping(np.arange(3)))


@pytest.mark.slow
def test_a_search_goes_on_after_placements_that_crash() -> None:
    said = problem()
    result = train(said, TrainConfig(budget_s=3.0, isolated=True, search=SEARCH))
    assert result.is_measured
    assert result.placement.plan.devices[1] == 0
    crashed = [row for row in result.table.rows if row["placement"] and result.table.plans[row["method"]].devices[1]]
    assert crashed, "heuristics believe the costs"
    for row in crashed:
        assert row["status"] == "error"
        assert "SIGABRT" in row["why"]
    ran = [row["method"] for row in result.table.rows if row["placement"] and row["status"] == "ok"]
    assert "single" in ran


@pytest.mark.slow
def test_a_step_that_cannot_be_traced_is_shown_as_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(evaluator: Evaluator, plan: Plan, **_: bool) -> None:
        raise RunnerError("the worker died")

    monkeypatch.setattr(Evaluator, "timeline", broken)
    run = RunFolder.create(tmp_path / "run")
    result = train(problem(), TrainConfig(budget_s=1.0, isolated=True, search=SEARCH), run=run, progress=True)
    assert result.is_measured
    assert read_json(run.path("result.json"))["best"]["method"] == result.table.best
    assert "could not be traced, so its timeline is simulated: the worker died" in capsys.readouterr().err
    assert Trace.of(json.loads(run.path("timeline.json").read_text()), "timeline.json").kind == "simulated"
    assert not run.has("explanation.json"), "it would take the shares of a simulated step for those of a measured one"
    run.close()
