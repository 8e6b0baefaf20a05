"""`Believed`: which measurements of a node the driver may keep: those that the node's own `Evaluator` believes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rlplace.measure.measurement import Measurement, MeasurementKey
from rlplace.measure.measurement_log import MeasurementLog
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.timeline import Timeline


class Believed(MeasurementLog):
    """A log that answers nothing and keeps only which plans it was told of: an `Evaluator` tells what it believes."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def recall(self, key: MeasurementKey, reference: str) -> Measurement | None:
        """Nothing: the driver has asked its own log before."""
        return None

    def keep(self, plan: Plan, outcome: Measurement, reference: str, *, is_whole: bool) -> None:
        """Takes note of the plan."""
        self._told.add(plan.fingerprint)

    def keep_trace(self, problem: Problem, plan: Plan, timeline: Timeline) -> None:
        """Does nothing."""

    def marked(self, plans: Sequence[Plan], outcomes: Sequence[Measurement]) -> list[Measurement]:
        """The outcomes of a race; those that were not believed without a key. Then it forgets what it was told."""
        told, self._told = self._told, set()
        return [
            outcome if plan.fingerprint in told else dataclasses.replace(outcome, key=None)
            for plan, outcome in zip(plans, outcomes, strict=True)
        ]
