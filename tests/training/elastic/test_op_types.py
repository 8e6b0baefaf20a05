"""What measured op times say of op types elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from elastic_hosts import simulated_host
from small_models import CASES

from rlplace.graphs import capture
from rlplace.measure.costs.costs import estimate_costs
from rlplace.training.elastic.carried import op_type_factors

CASE = CASES["transformer_layer"]()
GRAPH = capture(CASE.model, CASE.inputs, CASE.loss_fn, "adam")
ESTIMATED_S = estimate_costs(GRAPH, simulated_host("slow")).op_time_s[:, 0]
TARGETS = np.asarray(GRAPH.targets)
RUNS = ~GRAPH.is_source


def common() -> str:
    """An op type that takes some of the time, but not most of it."""
    names = np.unique(TARGETS[RUNS]).tolist()
    shares = {name: ESTIMATED_S[name == TARGETS].sum() / ESTIMATED_S.sum() for name in names}
    return str(min(names, key=lambda name: abs(shares[name] - 0.05)))


def test_what_a_roofline_explains_is_no_ops_own() -> None:
    assert op_type_factors(GRAPH, [ESTIMATED_S]) == pytest.approx(np.ones(GRAPH.num_ops), rel=0.05)
    assert op_type_factors(GRAPH, [ESTIMATED_S * 40]) == pytest.approx(np.ones(GRAPH.num_ops), rel=0.05)


def test_half_of_what_one_kind_says_of_an_op_type_is_believed_and_two_thirds_of_what_two_say() -> None:
    is_odd = common() == TARGETS
    measured = np.where(is_odd, 3.0, 1.0) * ESTIMATED_S
    once, twice = op_type_factors(GRAPH, [measured]), op_type_factors(GRAPH, [measured, measured * 5])
    assert np.median(once[is_odd]) / np.median(once[~is_odd & RUNS]) == pytest.approx(3 ** (1 / 2), rel=0.05)
    assert np.median(twice[is_odd]) / np.median(twice[~is_odd & RUNS]) == pytest.approx(3 ** (2 / 3), rel=0.05)


def test_nothing_measured_says_nothing() -> None:
    assert (op_type_factors(GRAPH, [np.zeros(GRAPH.num_ops)]) == 1.0).all()
    assert (op_type_factors(GRAPH, []) == 1.0).all()
