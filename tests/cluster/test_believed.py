"""`Believed`: what an `Evaluator` does not tell its log loses its key, and is kept by nobody."""

from __future__ import annotations

import numpy as np
from fake_measurer import chain_problem

from rlplace.cluster.cluster_evaluator import Believed
from rlplace.measure.measurement import Measurement, MeasurementKey
from rlplace.measure.problem import Plan

KEY = MeasurementKey("graph", "host", "plan", "protocol")


def plan(device: int) -> Plan:
    nothing = np.zeros(0, dtype=np.int32)
    return Plan(np.array([device], dtype=np.int32), nothing, nothing, np.zeros(1, dtype=np.int32))


def test_only_what_was_told_keeps_its_key_and_it_is_forgotten_after_a_race() -> None:
    believed, plans = Believed(), [plan(0), plan(1)]
    outcomes = [Measurement("ok", 1.0, key=KEY), Measurement("ok", 2.0, key=KEY)]
    assert believed.recall(KEY, "reference", plans[0], chain_problem(1)) is None
    believed.keep(plans[1], outcomes[1], "reference", is_whole=True)
    assert [outcome.key for outcome in believed.marked(plans, outcomes)] == [None, KEY]
    assert [outcome.key for outcome in believed.marked(plans, outcomes)] == [None, None]
