"""`Evaluator`: simulated or run, every measurement says what it is of."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from fake_measurer import chain_problem
from torch import nn

from rlplace.graphs import capture
from rlplace.measure import Host, Problem, RaceProtocol, Simulator
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.measurement import Measurement

ONCE = RaceProtocol(warmup=0, min_rounds=1, max_rounds=1)


def test_on_a_simulated_host_plans_are_retimed_under_a_key_of_their_own() -> None:
    problem = chain_problem(4)
    simulator = Simulator(problem)
    evaluator = Evaluator(problem, simulator)
    plans = [simulator.plan(np.array(devices, dtype=np.int32)) for devices in ([0, 0, 0, 0], [0, 1, 1, 0])]
    first, second = evaluator.measure_plans(plans, ONCE)
    assert not evaluator.is_measured
    assert first.step_time_s == pytest.approx(4.0)
    assert first.key is not None
    assert second.key is not None
    assert (first.key.graph, first.key.host) == (problem.graph.fingerprint, problem.host.fingerprint)
    assert first.key.protocol == "simulated"
    assert first.key.plan != second.key.plan
    assert evaluator.measure_plans(plans[:1], ONCE)[0].key == first.key
    assert evaluator.timeline(plans[0]).source == "simulated"
    evaluator.close()


def test_a_plans_fingerprint_is_of_its_order_too() -> None:
    problem = chain_problem(2)
    plan = Simulator(problem).plan(np.array([0, 1], dtype=np.int32))
    same = dataclasses.replace(plan)
    turned = dataclasses.replace(plan, sequence=plan.sequence[::-1].copy())
    assert plan.fingerprint == same.fingerprint
    assert plan.fingerprint != turned.fingerprint


def test_on_this_machine_plans_run_beside_the_reference_and_other_timers_have_no_key() -> None:
    graph = capture(nn.Linear(8, 4), torch.randn(3, 8), lambda y: y.sum(), "sgd")
    problem = Problem.profile(graph, Host.detect("cores"), num_groups=4)
    simulator = Simulator(problem)
    placement = np.zeros(graph.num_ops, dtype=np.int32)
    evaluator = Evaluator(problem, simulator, placement)
    try:
        plan = simulator.plan(placement)
        measured, other = evaluator.measure_plans([plan], ONCE, others=[lambda: 0.25])
        assert evaluator.is_measured
        assert measured.ok
        assert measured.reference_s > 0
        assert measured.key is not None
        assert measured.key.plan == plan.fingerprint
        assert "max_rounds=1" in measured.key.protocol
        assert (other.step_time_s, other.key) == (0.25, None)
        assert len(evaluator.trace(plan, num_steps=2, warmup=0)) == 2
    finally:
        evaluator.close()


@pytest.mark.parametrize(
    ("measurement", "ratio"),
    [
        (Measurement("ok", 3.0, reference_s=2.0), 1.5),
        (Measurement("ok", 3.0), 3.0),
        (Measurement("oom", float("inf"), reference_s=2.0), float("inf")),
        (Measurement("error", float("nan")), float("inf")),
    ],
)
def test_ratios_are_to_the_reference(measurement: Measurement, ratio: float) -> None:
    assert measurement.ratio == ratio
