"""`MeasurementLog`: what measuring knows of a store: it is told every measurement, and may have one from before."""

from __future__ import annotations

import hashlib
import platform
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlplace import __version__
from rlplace.measure.measurement import Measurement, MeasurementKey
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.timeline import Timeline


class MeasurementLog(Protocol):
    """Keeps measurements and finds them again; what it cannot keep or find never stops a measurement."""

    def recall(self, key: MeasurementKey, reference: str) -> Measurement | None:
        """What was measured before under this key beside this reference, as it was then; None if it is to be run."""
        ...

    def keep(self, plan: Plan, outcome: Measurement, reference: str, *, is_whole: bool) -> None:
        """Takes a measurement that was just made.

        Args:
            plan: what ran.
            outcome: what came of it, with its key.
            reference: fingerprint of the placement that was timed in turn with it; empty without one.
            is_whole: whether it ended as the protocol says, not for want of time.
        """
        ...

    def keep_trace(self, problem: Problem, plan: Plan, timeline: Timeline) -> None:
        """Takes the timeline of a step of a plan."""
        ...


def versions_line() -> str:
    """Versions that a step time depends on, in one line."""
    import torch

    return f"rlplace {__version__}, torch {torch.__version__}, python {platform.python_version()}"


def placement_fingerprint(devices: NDArray[np.int32]) -> str:
    """16 hex digits over the devices of ops (N,), whatever their order; orders hardly matter to a reference."""
    return hashlib.sha256(devices.astype("<i4").tobytes()).hexdigest()[:16]
