"""`fitted_host`: what the measured steps of a run say of its host, where the run stopped before it said so itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from rlplace.errors import UserError
from rlplace.measure.host_model import HostModel, LearnedHost, Scales, prior_of
from rlplace.measure.measurement import Measurement
from rlplace.measure.placement import check_plan
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.store import MeasurementStore
from rlplace.store.folders import FILE
from rlplace.store.store import Filter

MOST = 64
"""The latest plans are enough, and fitted within seconds."""
LEAST = 6
"""Fewer plans say too little."""


def fitted_host(folder: Path, problem: Problem) -> LearnedHost | None:
    """What a host model learns from the step times in a run's own store; None where they are too few, or explain less.

    Args:
        folder: of the run.
        problem: of the run, as it was profiled.

    Raises:
        FileProblem, InvalidValue, UnknownName: the store cannot be read, or holds what no store has.
    """
    if not (folder / FILE).exists():
        return None
    plans, outcomes = _measured(folder / FILE, problem)
    if len(plans) < LEAST:
        return None
    model = HostModel(Scales(problem, prior_of(problem)))
    model.learn(plans, outcomes)
    before, after = model.held_out_errors()
    return None if after > before else LearnedHost.of(model.fit())


def _measured(path: Path, problem: Problem) -> tuple[list[Plan], list[Measurement]]:
    """The latest plans that ran, and what each took, as beside one reference: a drift of the machine cancels."""
    graph, host = problem.graph, problem.host
    found: dict[str, tuple[Plan, Measurement]] = {}
    with MeasurementStore.read(path) as store:
        for row in store.measurements(Filter(graph=graph.fingerprint, host=host.fingerprint, status="ok")):
            if row.plan in found:
                continue
            plan = store.plan(row.plan)
            try:
                check_plan(graph, host.num_devices, plan)
            except UserError:  # of another version, or a stranger's: it says nothing of this step
                continue
            found[row.plan] = plan, row.measurement
            if len(found) == MOST:
                break
    references = [outcome.reference_s for _, outcome in found.values() if outcome.reference_s > 0]
    reference_s = float(np.median(references)) if references else 0.0
    return [plan for plan, _ in found.values()], [_steadied(outcome, reference_s) for _, outcome in found.values()]


def _steadied(outcome: Measurement, reference_s: float) -> Measurement:
    if not outcome.reference_s > 0:
        return outcome
    factor = reference_s / outcome.reference_s
    samples_s = tuple(sample_s * factor for sample_s in outcome.samples_s)
    return dataclasses.replace(outcome, step_time_s=outcome.step_time_s * factor, samples_s=samples_s)
