"""`compare` on a cluster: the rows of a local run, to the bit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
from ray_nodes import ray_nodes
from search_problems import tight_problem

from rlplace.cli.main import main
from rlplace.cluster import Cluster
from rlplace.compare.comparison import Comparison, Row
from rlplace.compare.equal_budgets import CompareConfig, compare
from rlplace.measure.simulate.simulator import Simulator
from rlplace.search.methods import METHODS as REGISTRY
from rlplace.search.methods import Method, register_method
from rlplace.search.task import Task

TINY = "nmt@small,layers=1,units=8,steps=2,vocab=20,batch=4"
METHODS = ("single", "heft", "learned", "hybrid", "random", "anneal", "portfolio", "op-order")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_nodes() as nodes, Cluster.connect(nodes.address) as connected:
        assert connected.num_workers == 2
        yield connected


def facts(row: Row) -> dict[str, Any]:
    """All of a row but its timings."""
    told = dataclasses.asdict(dataclasses.replace(row, history=(), devices=None, plan=None, plan_s=0.0))
    told["history"] = [(best.evaluations, best.measurements, best.best_s) for best in row.history]
    told["devices"] = None if row.devices is None else row.devices.tolist()
    told["plan"] = None if row.plan is None else row.plan.fingerprint
    return told


def assert_same(one: Comparison, other: Comparison) -> None:
    assert [facts(row) for row in one.rows] == [facts(row) for row in other.rows]
    assert (one.lower_bound_s, one.lower_bound, one.budget) == (other.lower_bound_s, other.lower_bound, other.budget)


@pytest.mark.slow
def test_the_rows_are_those_of_a_local_run_to_the_bit(cluster: Cluster) -> None:
    problem, config = tight_problem(12, 3), CompareConfig(METHODS, evaluations=400, seeds=3)
    told: list[str] = []
    spread = compare(problem, config, cluster=cluster, on_row=lambda row: told.append(row.method))
    assert_same(compare(problem, config), spread)
    assert len(spread.rows) == 3 + 4 * 3 + 1
    assert sorted(told) == sorted(row.method for row in spread.rows)  # told as they come, in any order
    assert told[-1] == "op-order"


def test_what_comes_back_can_be_used_as_what_was_found_here(cluster: Cluster) -> None:
    problem = tight_problem(12, 3)
    (row,) = compare(problem, CompareConfig(("anneal",), evaluations=100), cluster=cluster).rows
    simulator = Simulator(problem)
    assert row.plan is not None
    assert row.devices is not None
    assert simulator.retime(row.plan).step_time_s == row.value_s
    assert simulator.step_times(row.devices)[0] == row.value_s


def test_a_method_of_this_process_is_sent_to_the_workers(cluster: Cluster) -> None:
    def first_draw(task: Task) -> None:
        task.score_groups(task.problem.draw_groups(task.generator, 1))

    register_method(Method("first-draw", first_draw, "search", "of a notebook"))
    try:
        problem, config = tight_problem(12, 3), CompareConfig(("first-draw",), evaluations=5)
        assert_same(compare(problem, config), compare(problem, config, cluster=cluster))
    finally:
        REGISTRY.unregister("first-draw")


@pytest.mark.slow
def test_the_command_says_what_a_local_one_says(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", TINY, "--host", "4xV100-pcie", "--methods", "heft,anneal,ddp", "--evaluations", "100", "--json"]
    assert main([*words, "--seeds", "2"]) == 0
    local = json.loads(capsys.readouterr().out)
    assert main([*words, "--seeds", "2", "--cluster", "auto"]) == 0
    spread = json.loads(capsys.readouterr().out)
    for told in (local, spread):
        for row in told["rows"]:
            row["plan_s"], row["history"] = 0.0, [[*best[:2], best[3]] for best in row["history"]]
    assert spread == local
