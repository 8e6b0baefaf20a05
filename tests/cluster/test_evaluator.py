"""`ClusterEvaluator` on two nodes of this machine: the second one measures too, until it is lost."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_hosts import core_host
from ray_nodes import ray_nodes
from torch import nn

from rlplace.cluster import Cluster
from rlplace.cluster.cluster_evaluator import (
    HERE,
    ClusterEvaluator,
    Job,
    Machine,
    MeasuringNode,
    NodePool,
    Staleness,
    pack,
)
from rlplace.graphs import capture
from rlplace.graphs.grouping.groups import Grouping
from rlplace.measure import Problem, RaceProtocol, Simulator
from rlplace.measure.costs.costs import Costs
from rlplace.measure.measurement import Measurement, MeasurementKey
from rlplace.measure.problem import Plan

FEW = RaceProtocol(warmup=0, min_rounds=3, max_rounds=3, hopeless=float("inf"))
ENDLESS = RaceProtocol(warmup=0, min_rounds=10**9, max_rounds=10**9, hopeless=float("inf"))
KILLED_WITHIN_S = 12.0
"""Seconds for a node to be killed; its race would go on until they are over."""
IN_STEP = Staleness(bound=0)
Started = list[tuple[str, list[str]]]


class Notes:
    """A log that answers what it is told to, and keeps what it is given."""

    def __init__(self) -> None:
        self.known: dict[str, Measurement] = {}
        self.kept: list[tuple[Plan, Measurement, str, bool]] = []

    def recall(self, key: MeasurementKey, reference: str, plan: Plan, problem: Problem) -> Measurement | None:
        return self.known.get(key.plan)

    def keep(self, plan: Plan, outcome: Measurement, reference: str, *, is_whole: bool) -> None:
        self.kept.append((plan, outcome, reference, is_whole))

    def keep_trace(self, *_: Any) -> None:
        raise AssertionError("nothing is traced")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    with ray_nodes() as started:
        yield started


@pytest.fixture(scope="module")
def cluster(nodes: Any) -> Iterator[Cluster]:
    with Cluster.connect(nodes.address) as connected:
        yield connected


@pytest.fixture(scope="module")
def problem() -> Problem:
    graph = capture(nn.Linear(8, 4), torch.randn(3, 8), lambda y: y.sum(), "sgd")
    ops = np.arange(graph.num_ops)
    return Problem(graph, core_host(2), Costs(np.ones((graph.num_ops, 2)), "estimated"), Grouping(ops * 0))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Which worker began with which plans."""
    found: Started = []
    start = NodePool.start

    def noted(pool: NodePool, worker: str, job: Job) -> None:
        found.append((worker, [plan.fingerprint for plan in job.plans]))
        start(pool, worker, job)

    monkeypatch.setattr(NodePool, "start", noted)
    return found


def evaluator_of(cluster: Cluster, problem: Problem, **options: Any) -> ClusterEvaluator:
    reference = np.zeros(problem.graph.num_ops, dtype=np.int32)
    options = {"staleness": IN_STEP, **options}
    return ClusterEvaluator(cluster, problem, Simulator(problem, threads=1), reference, **options)


def two(evaluator: ClusterEvaluator) -> list[Plan]:
    """The plans of everything on one device."""
    num_ops = evaluator.problem.graph.num_ops
    return [evaluator.simulator.plan(np.full(num_ops, device, dtype=np.int32)) for device in range(2)]


def await_nodes(evaluator: ClusterEvaluator, started: Started) -> str:
    """The name of the other node, once it has measured something."""
    for _ in range(200):
        evaluator.measure_some(two(evaluator), FEW)
        for worker, _ in started:
            if worker != HERE:
                return worker
        evaluator._pool.wait(0.5)
    raise AssertionError("the other node never began")


def names(came: Sequence[tuple[Plan, Measurement]]) -> list[str]:
    return [plan.fingerprint for plan, _ in came]


def test_both_machines_measure_and_what_they_say_is_a_ratio_to_their_own_reference(
    cluster: Cluster, problem: Problem, started: Started
) -> None:
    said: list[str] = []
    log = Notes()
    evaluator = evaluator_of(cluster, problem, log=log, say=said.append)
    try:
        assert evaluator.num_workers == 2
        other = await_nodes(evaluator, started)
        assert said == [f"node {other} measures too"]
        started.clear()
        log.kept.clear()
        plans = two(evaluator)
        came = evaluator.measure_some(plans, dataclasses.replace(FEW, num_traced=1), is_all=True)
        assert names(came) == [plan.fingerprint for plan in plans]
        for plan, outcome in came:
            assert outcome.timeline is not None
            assert outcome.timeline.op_device.tolist() == plan.devices.tolist()
        assert sorted(started) == sorted([(other, [plans[0].fingerprint]), (HERE, [plans[1].fingerprint])])
        assert len({outcome.reference_s for _, outcome in came}) == 1  # as if all had been measured beside one
        for plan, outcome in came:
            assert outcome.ok
            assert len(outcome.samples_s) == 3
            assert outcome.key is not None
            assert outcome.key.plan == plan.fingerprint
        ratios = {plan.fingerprint: outcome.ratio for plan, outcome in came}
        for plan, kept, reference, is_whole in log.kept:  # on a disturbed machine some are not believed, nor kept
            assert (reference, is_whole) == (evaluator._reference_name, True)
            assert kept.reference_s > 0  # as it was measured there
            assert kept.ratio == pytest.approx(ratios[plan.fingerprint])
    finally:
        evaluator.close()


def test_one_race_is_run_on_this_machine(cluster: Cluster, problem: Problem, started: Started) -> None:
    evaluator = evaluator_of(cluster, problem)
    try:
        assert all(outcome.ok for outcome in evaluator.measure_plans(two(evaluator), FEW))
        assert len(evaluator.trace(two(evaluator)[0], num_steps=1, warmup=0)) == 1
        assert started == []
    finally:
        evaluator.close()


def test_what_the_log_knows_is_not_measured_again(cluster: Cluster, problem: Problem, started: Started) -> None:
    log = Notes()
    evaluator = evaluator_of(cluster, problem, log=log)
    try:
        first, second = two(evaluator)
        log.known[first.fingerprint] = Measurement("ok", 6.0, (6.0,), reference_s=2.0)
        came = evaluator.measure_some([first, second], FEW, is_all=True)
        assert names(came) == [first.fingerprint, second.fingerprint]
        assert came[0][1].ratio == pytest.approx(3.0)
        assert came[0][1].reference_s == came[1][1].reference_s
        assert [plans for _, plans in started] == [[second.fingerprint]]
        assert evaluator.num_recalled == 1
        started.clear()
        assert names(evaluator.measure_some([first], FEW)) == [first.fingerprint]
        assert started == []
    finally:
        evaluator.close()


def test_a_node_of_another_kind_is_refused_by_name_with_what_differs(
    cluster: Cluster, problem: Problem, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Machine.here()
    facts = tuple((name, "another one" if name == "processor" else fact) for name, fact in here.facts)
    other = dataclasses.replace(here, versions="rlplace 9, torch 9, python 9", facts=facts)
    monkeypatch.setattr(Machine, "here", classmethod(lambda _: other))
    said: list[str] = []
    evaluator = evaluator_of(cluster, problem, say=said.append)
    try:
        while not said:
            evaluator._pool.wait(1.0)
        assert evaluator.num_workers == 1
        (line,) = said
        assert "does not measure" in line
        assert f"{here.versions}, here rlplace 9" in line
        assert f"processor {dict(here.facts)['processor']}, here another one" in line
        assert all(outcome.ok for _, outcome in evaluator.measure_some(two(evaluator), FEW))
        assert {worker for worker, _ in started} == {HERE}
    finally:
        evaluator.close()


@pytest.mark.parametrize("is_same", [True, False])
def test_a_machine_of_the_same_name_takes_its_own_lock(
    problem: Problem, is_same: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    driver = Machine.here() if is_same else dataclasses.replace(Machine.here(), start="another")
    data, index = pack(problem, np.zeros(problem.graph.num_ops, np.int32), seed=0, is_isolated=False, driver=driver)
    node = MeasuringNode()
    try:
        assert node.prepare(data, index, []) == ""
        assert len(list(tmp_path.rglob("measuring-*.lock"))) == (not is_same)
    finally:
        node._held.close()
        if node._evaluator is not None:
            node._evaluator.close()


def test_a_node_runs_the_traced_steps_that_it_is_asked_for(
    problem: Problem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    num_ops, planner = problem.graph.num_ops, Simulator(problem, threads=1)
    data, index = pack(problem, np.zeros(num_ops, np.int32), seed=0, is_isolated=False, driver=Machine.here())
    plans = [planner.plan(np.full(num_ops, device, dtype=np.int32)) for device in range(2)]
    node = MeasuringNode()
    try:
        assert node.prepare(data, index, []) == ""
        for num_traced in (0, 1):
            outcomes = node.measure(plans, dataclasses.replace(FEW, num_traced=num_traced), 60.0)
            assert [outcome.timeline is not None for outcome in outcomes] == [num_traced == 1] * 2
            assert [len(outcome.samples_s) for outcome in outcomes] == [3, 3]
    finally:
        if node._evaluator is not None:
            node._evaluator.close()


@pytest.mark.slow
def test_a_node_that_is_killed_amid_a_batch_costs_no_plan(
    nodes: Any, cluster: Cluster, problem: Problem, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    evaluator = evaluator_of(cluster, problem, say=said.append)
    try:
        other = await_nodes(evaluator, started)
        started.clear()
        start = NodePool.start

        def kill(pool: NodePool, worker: str, job: Job) -> None:
            start(pool, worker, job)
            if worker == other and nodes.worker_nodes:
                nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)

        monkeypatch.setattr(NodePool, "start", kill)
        came = evaluator.measure_some(
            two(evaluator), ENDLESS, deadline_s=time.monotonic() + KILLED_WITHIN_S, is_all=True
        )
        assert names(came) == [plan.fingerprint for plan in two(evaluator)]
        assert all(outcome.ok for _, outcome in came)
        assert [worker for worker, _ in started] == [other, HERE, HERE]
        while evaluator.num_workers > 1:  # it is asked whether it was only restarted
            evaluator._pool.wait(1.0)
        assert [line for line in said if "lost" in line] == [
            f"node {other} was lost while it measured; its plans are given to others"
        ]
        assert all(outcome.ok for _, outcome in evaluator.measure_some(two(evaluator), FEW))
    finally:
        evaluator.close()
        nodes.add_node(num_cpus=1)
