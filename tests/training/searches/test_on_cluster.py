"""`train --cluster` on two nodes of this machine, simulated and measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_hosts import core_host
from fake_measurer import chain_problem
from ray_nodes import ray_nodes
from torch import nn

from rlplace.cli.main import main
from rlplace.cluster import Cluster
from rlplace.cluster.cluster_evaluator import HERE, Job, NodePool
from rlplace.graphs import capture
from rlplace.measure.costs.costs import Costs
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.training import TrainConfig, train
from rlplace.training.config import SearchConfig
from rlplace.training.outputs import SavedFiles
from rlplace.training.searches.search_all import make_evaluator, num_machines

WORKLOAD = "nmt@layers=1,units=16,batch=4,steps=3,vocab=50"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    with ray_nodes() as started:
        yield started


@pytest.fixture(scope="module")
def cluster(nodes: Any) -> Iterator[Cluster]:
    with Cluster.connect(nodes.address) as connected:
        yield connected


@pytest.mark.slow
def test_the_methods_of_a_simulated_host_are_tasks_and_the_run_is_as_any(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = ["train", WORKLOAD, "--host", "4xV100-pcie", "--budget", "1s", "--run", str(run)]
    assert main([*words, "--policy", "gnn", "--cluster", cluster.address, "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["schema"] == 1
    assert "searching on the cluster: policy, portfolio" in told.err
    assert json.loads((run / "config.json").read_text())["train"]["cluster"] == cluster.address
    assert {path.name for path in run.glob("policy.*")} == {"policy.safetensors", "policy.json"}
    rows = {row["method"]: row for row in json.loads((run / "result.json").read_text())["rows"]}
    for method in ("policy", "portfolio"):
        assert rows[method]["status"] == "ok"
        assert rows[method]["placements"] > 0
        assert rows[method]["history"][-1][3] == pytest.approx(rows[method]["step_time_s"], rel=1e-12)
    assert main(["simulate", WORKLOAD, "--host", "4xV100-pcie", "--placement", str(run / "placement.json")]) == 0


@pytest.mark.slow
def test_under_a_budget_of_evaluations_it_finds_what_this_machine_finds(cluster: Cluster, tmp_path: Path) -> None:
    found = []
    for word in ("off", cluster.address):
        run = tmp_path / word[:3]
        words = ["train", WORKLOAD, "--host", "4xV100-pcie", "--evaluations", "200", "--method", "anneal", "--quiet"]
        assert main([*words, "--cluster", word, "--run", str(run)]) == 0
        searched = json.loads((run / "search.json").read_text())["methods"]
        histories = {name: [[*best[:2], best[3]] for best in one["history"]] for name, one in searched.items()}
        found.append(((run / "placement.json").read_bytes(), histories))
    assert found[0] == found[1]


@pytest.mark.slow
def test_searches_on_real_hosts_measure_on_every_node(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = capture(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), torch.randn(3, 8), lambda y: y.sum(), "sgd")
    costs = Costs(np.full((graph.num_ops, 2), 0.01), "estimated")
    problem = Problem.grouped(graph, core_host(2), costs, 8)
    workers: list[str] = []
    start, known = NodePool.start, NodePool.__init__

    def noted(pool: NodePool, worker: str, job: Job) -> None:
        workers.append(worker)
        start(pool, worker, job)

    def ready(pool: NodePool, *arguments: Any, **options: Any) -> None:
        """Waits for the other node: a short search has ended before it is prepared."""
        known(pool, *arguments, **options)
        while len(pool.idle()) < pool.num_alive:
            pool.wait(1.0)

    monkeypatch.setattr(NodePool, "start", noted)
    monkeypatch.setattr(NodePool, "__init__", ready)
    search = SearchConfig(method="learned", num_calibrated=0, table_rounds=2)
    result = train(problem, TrainConfig(budget_s=4.0, cluster="auto", search=search))
    assert result.is_measured
    assert result.table.row("learned")["measured"] >= 4
    assert result.table.row("portfolio")["measured"] >= 1
    assert len({*workers}) == 2
    assert HERE in workers


def test_this_machine_is_one_that_measures() -> None:
    problem = chain_problem(3)
    evaluator = make_evaluator(
        None,
        problem,
        Simulator(problem),
        np.zeros(3, dtype=np.int32),
        seed=0,
        log=None,
        isolated=None,
        say=print,
    )
    assert type(evaluator) is Evaluator
    assert num_machines(evaluator) == 1


def test_what_was_learned_elsewhere_is_saved_under_the_name_that_is_asked_for(tmp_path: Path) -> None:
    SavedFiles({"policy.safetensors": b"weights", "policy.json": b"{}"}).save(tmp_path / "mine.safetensors")
    assert (tmp_path / "mine.safetensors").read_bytes() == b"weights"
    assert (tmp_path / "mine.json").read_bytes() == b"{}"


@pytest.mark.slow
@pytest.mark.parametrize("word", ["nowhere", "127.0.0.1:1"])
def test_a_mistake_is_one_line_and_leaves_no_folder(
    word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", WORKLOAD, "--host", "4xV100-pcie", "--run", str(tmp_path / "run"), "--cluster", word]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"cluster is {word!r}" in said
    assert not (tmp_path / "run").exists()
