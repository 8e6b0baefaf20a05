"""Measurements to put into stores, and databases that are none."""

from __future__ import annotations

import dataclasses
import sqlite3
import time
from pathlib import Path
from typing import Any

import numpy as np

from rlplace.measure.measurement import Measurement, MeasurementKey
from rlplace.measure.problem import Plan
from rlplace.store.rows import MeasuringProcess, StoredMeasurement

GRAPH, HOST, MACHINE, VERSIONS, REFERENCE = "ab" * 8, "cd" * 8, "ef" * 8, "rlplace 0, torch 1, python 3", "12" * 8
SESSION = MeasuringProcess(1e9, "nmt@small", MACHINE, "cores", VERSIONS, idle_share=0.9)


def plan_of(*devices: int) -> Plan:
    """Ops without transfers, one after the other."""
    none = np.zeros(0, dtype=np.int32)
    return Plan(np.array(devices, dtype=np.int32), none, none, np.arange(len(devices), dtype=np.int32))


PLAN = plan_of(0, 1, 1)


def key_of(plan: Plan = PLAN, **changes: str) -> MeasurementKey:
    return dataclasses.replace(MeasurementKey(GRAPH, HOST, plan.fingerprint, "race", VERSIONS), **changes)


def outcome_of(plan: Plan = PLAN, step_s: float = 0.5, **changes: Any) -> Measurement:
    """A step beside a reference of a second."""
    samples_s = (step_s * 0.9, step_s, step_s * 1.1)
    return dataclasses.replace(
        Measurement("ok", step_s, samples_s, (10, 20), reference_s=1.0, key=key_of(plan)), **changes
    )


def row_of(
    plan: Plan = PLAN, step_s: float = 0.5, *, age_s: float = 0.0, is_whole: bool = True, **changes: Any
) -> StoredMeasurement:
    """The same as a store keeps it."""
    row = StoredMeasurement.of(plan, outcome_of(plan, step_s, **changes), REFERENCE, is_whole=is_whole)
    return dataclasses.replace(row, taken_s=time.time() - age_s)


def foreign(path: Path, *statements: str) -> Path:
    """A database of others, or a store that was tampered with."""
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()
    return path
