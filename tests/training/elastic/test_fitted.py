"""What a run's measured steps say of its host, where the run did not come to say it."""

from __future__ import annotations

import dataclasses
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from host_models import learnable_problem, paired_host, step_times, varied_plans
from stored import REFERENCE, SESSION, VERSIONS

from rlplace.errors import FileProblem
from rlplace.measure.costs.costs import Costs
from rlplace.measure.host_model import LearnedHost
from rlplace.measure.measurement import Measurement, MeasurementKey
from rlplace.measure.problem import Problem
from rlplace.session.calibrate import LEAST
from rlplace.store import MeasurementStore
from rlplace.store.rows import StoredMeasurement
from rlplace.training.elastic.placed_again import fitted_host

PROBLEM = learnable_problem(paired_host(3))


def slowed(problem: Problem, device: int, factor: float) -> Problem:
    op_time_s = problem.costs.op_time_s.copy()
    op_time_s[:, device] *= factor
    return dataclasses.replace(problem, costs=Costs(op_time_s, "estimated"))


def measure_into(folder: Path, count: int, *, graph: str = PROBLEM.graph.fingerprint) -> None:
    """Steps of plans on a host whose `d1` is slower than given; the machine drifts meanwhile."""
    plans = varied_plans(PROBLEM, np.random.default_rng(0), count)
    times_s = step_times(slowed(PROBLEM, 1, 1.3), plans)
    with MeasurementStore.open(folder / "measurements.db") as store:
        for place, (plan, step_s) in enumerate(zip(plans, times_s.tolist(), strict=True)):
            drift = 1.0 + 0.5 * (place % 2)
            key = MeasurementKey(graph, PROBLEM.host.fingerprint, plan.fingerprint, "race", VERSIONS)
            outcome = Measurement("ok", step_s * drift, (step_s * drift,), reference_s=drift, key=key)
            store.add(SESSION, plan, StoredMeasurement.of(plan, outcome, REFERENCE, is_whole=True))
        failed = Measurement("error", float("inf"), why="boom", key=dataclasses.replace(key, plan=plans[0].fingerprint))
        store.add(SESSION, plans[0], StoredMeasurement.of(plans[0], failed, REFERENCE, is_whole=True))


def fitted(folder: Path) -> LearnedHost | None:
    with MeasurementStore.open(folder / "measurements.db") as store:
        return fitted_host(store, PROBLEM)


def test_steps_that_were_measured_teach(tmp_path: Path) -> None:
    measure_into(tmp_path, 24)
    learned = fitted(tmp_path)
    assert learned is not None
    means = {factor.name: factor.log_mean for factor in learned.factors if factor.kind == "device"}
    assert means["d1"] - (means["d0"] + means["d2"]) / 2 == pytest.approx(np.log(1.3), abs=0.1)
    assert learned.host_fingerprint == PROBLEM.host.fingerprint


@pytest.mark.parametrize(("count", "graph"), [(LEAST - 1, PROBLEM.graph.fingerprint), (24, "ab" * 8)])
def test_few_steps_and_those_of_others_teach_nothing(tmp_path: Path, count: int, graph: str) -> None:
    measure_into(tmp_path, count, graph=graph)
    assert fitted(tmp_path) is None


def test_a_run_without_a_store_taught_nothing(tmp_path: Path) -> None:
    assert fitted(tmp_path) is None


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "measurements.db").execute("CREATE TABLE other (id INTEGER)").connection.close()
    with pytest.raises(FileProblem):
        fitted(tmp_path)
