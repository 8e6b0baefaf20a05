"""The explanation of a run: what else its table says it would cost, and its file in the folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from micrographs import op_graph
from random_problems import plain_host

from rlplace.errors import FileProblem
from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure.costs.costs import Costs
from rlplace.measure.explain.explanation import Alternative
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.session.folder import RunFolder
from rlplace.session.session import Session, read_explanation
from rlplace.session.session_records import Request
from rlplace.training.outputs import data_parallel, explain_run

ROWS = [
    {"method": "single", "placement": True, "status": "ok", "step_time_s": 4.0},
    {"method": "learned", "placement": True, "status": "ok", "step_time_s": 3.5, "spread_s": 0.25},
    {"method": "eager", "placement": False, "status": "skipped", "step_time_s": None, "why": "the host is simulated"},
]


def problem_of(num_devices: int = 2) -> Problem:
    graph, host = op_graph([[], [0], [0], [1, 2]]), plain_host(num_devices)
    return Problem(graph, host, Costs(np.ones((4, num_devices)), "estimated"), Grouping(np.arange(4)))


def test_the_table_says_what_else_it_would_cost(tmp_path: Path) -> None:
    problem = problem_of()
    simulator = Simulator(problem, threads=1)
    plan = simulator.plan(np.array([0, 0, 1, 0], dtype=np.int32))
    found = explain_run(problem, plan, simulator.timeline(plan), ROWS, "learned")
    assert (found.method, found.step_time_s) == ("learned", 3.5)
    assert (found.spread_s, found.disturbed) == (0.25, "")  # it is simulated
    assert found.explained_s == pytest.approx(3.02)
    one, split, eager = found.alternatives
    assert one == Alternative("one device", 4.0, "simulated")
    assert (split.name, split.kind, split.step_time_s) == ("data parallel", "estimated", 2.0)
    assert eager == Alternative("eager", None, "simulated", "the host is simulated")
    with Session.open(RunFolder.create(tmp_path / "run")) as session:
        session.keep(explanation=json.dumps(found.to_dict()))
    assert read_explanation(tmp_path / "run") == found


def test_what_a_split_saved_stands_beside_the_other_alternatives() -> None:
    problem = problem_of()
    simulator = Simulator(problem, threads=1)
    plan = simulator.plan(np.array([0, 0, 1, 0], dtype=np.int32))
    timeline = simulator.timeline(plan)
    _, _, whole, _ = explain_run(problem, plan, timeline, ROWS, "learned", 3.25).alternatives
    assert (whole.name, whole.step_time_s, whole.kind) == ("whole ops", 3.25, "simulated")
    # one device is simulated to take 4 s and measured to take 6: other simulated times are 1.5 times as long as well
    rows = [{"method": "single", "status": "ok", "step_time_s": 6.0}]
    timeline = replace(timeline, source="measured")
    _, _, whole, _ = explain_run(problem, plan, timeline, rows, "learned", 3.25).alternatives
    assert (whole.step_time_s, whole.kind) == (pytest.approx(4.875), "simulated")


def test_rows_that_failed_or_are_not_there_say_why() -> None:
    problem = problem_of()
    simulator = Simulator(problem, threads=1)
    plan = simulator.plan(np.zeros(4, dtype=np.int32))
    rows = [{"method": "single", "status": "oom", "step_time_s": None, "why": "d0 is full"}]
    one, _, eager = explain_run(problem, plan, simulator.timeline(plan), rows, "hand").alternatives
    assert (one.step_time_s, one.note) == (None, "d0 is full")
    assert (eager.step_time_s, eager.note) == (None, "not in the table")


def test_a_cut_batch_is_dealt_out_by_simulation() -> None:
    problem = problem_of()
    halves = replace(op_graph([[], [0], [], [2]]), micro_batch=np.array([0, 0, 1, 1]))
    simulated = Alternative("one device", 4.0, "simulated")
    found = data_parallel(replace(problem, graph=halves), simulated)
    assert (found.kind, found.step_time_s, found.note) == ("simulated", 2.0, "2 micro-batches dealt out")
    alone = data_parallel(problem_of(1), simulated)
    assert (alone.step_time_s, alone.note) == (None, "the batch is one sample, or no two devices hold the model each")


def test_a_run_without_an_explanation_says_what_to_do(tmp_path: Path) -> None:
    Session.open(RunFolder.create(tmp_path / "run")).close()
    with pytest.raises(FileProblem, match=r"no explanation: .* `rlplace train --resume .*run`"):
        read_explanation(tmp_path / "run")


@pytest.mark.parametrize(
    ("workload", "named"),
    [("nmt@small", "train --resume"), ("mine:work", "train mine:work --resume")],
)
def test_a_run_of_an_own_function_without_one_names_it_again(tmp_path: Path, workload: str, named: str) -> None:
    with Session.open(RunFolder.create(tmp_path / "run")) as session:
        session.keep(request=Request(workload, "2xK80", "0" * 16, "small"))
    with pytest.raises(FileProblem, match=f"`rlplace {named} .*run`"):
        read_explanation(tmp_path / "run")


def test_a_split_is_scaled_to_what_one_device_measured() -> None:
    problem = problem_of()  # everything on one device takes 4 s by simulation
    slow = Alternative("one device", 10.0, "measured")
    assert data_parallel(problem, slow).step_time_s == pytest.approx(2.0 * 10.0 / 4.0)
    assert data_parallel(problem, Alternative("one device", None, "measured", "oom")).step_time_s == 2.0
