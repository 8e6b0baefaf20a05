"""`Measurement` and the `Measurer` protocol: the result of running or simulating a placement.

`MeasurementLog` is the part of a store that measuring uses: it keeps every measurement and finds earlier ones.
"""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rlplace import __version__
from rlplace.measure.problem import Plan, Problem, Timeline

Status = Literal["ok", "oom", "error", "timeout", "lost"]
"""`lost`: a device was not there any more, which says nothing of the placement."""


@dataclass(frozen=True)
class MeasurementKey:
    """The key of a measurement: two with the same key were asked the same question."""

    graph: str
    """Fingerprint of the graph."""
    host: str
    """Fingerprint of the host."""
    plan: str
    """Fingerprint of the plan: devices, orders of ops and of transfers."""
    protocol: str
    """How it was timed: `simulated`, or the rounds of the race."""
    versions: str = ""
    """Of rlplace, PyTorch and Python, where it was run."""


@dataclass(frozen=True)
class Measurement:
    """One placement's step time and memory.

    Attributes:
        status: `ok`, or the kind of failure (`step_time_s` is then infinite).
        step_time_s: median step time.
        samples_s: every timed step, in order; a single value when simulated.
        peak_bytes: peak of each device, (D,).
        why: the cause when status is not `ok`.
        reference_s: median step time of the reference placement in the same race; 0 without a reference.
        key: of the plan; None if unknown.
        timeline: of a traced step of the same visit, which is not one of the timed ones; None where none was traced.
    """

    status: Status
    step_time_s: float
    samples_s: tuple[float, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    why: str = ""
    reference_s: float = 0.0
    key: MeasurementKey | None = None
    timeline: Timeline | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        """In one line: the step time with its spread, or the failure."""
        if not self.ok:
            return f"Measurement({self.status}{self.why and f': {self.why}'})"
        steps = f" ± {self.spread_s * 1e3:.4g} ms, median of {len(self.samples_s)} steps" if self.samples_s[1:] else ""
        peak = f", at most {max(self.peak_bytes) / 2**20:,.1f} MiB on a device" if self.peak_bytes else ""
        return f"Measurement({self.step_time_s * 1e3:.4g} ms{steps}{peak})"

    @property
    def ratio(self) -> float:
        """Step time divided by that of the reference, so that a drift of the machine cancels; infinite after a failure.

        Without a reference it is divided by one second.
        """
        return self.step_time_s / (self.reference_s or 1.0) if self.ok else math.inf

    @property
    def spread_s(self) -> float:
        """Half the interquartile range of the samples."""
        if len(self.samples_s) < 2:
            return 0.0
        low, high = np.percentile(self.samples_s, (25, 75))
        return float(high - low) / 2

    @property
    def relative_error(self) -> float:
        """Standard error of the median, divided by the median; 0 if there are too few samples."""
        if len(self.samples_s) < 3 or not self.ok:
            return 0.0
        # of normal samples: half the interquartile range is 0.6745 deviations; a median varies by 1.2533 / sqrt(n)
        return 1.2533 * self.spread_s / 0.6745 / math.sqrt(len(self.samples_s)) / self.step_time_s

    @property
    def rounds_s(self) -> tuple[float, ...]:
        """Every timed step; where there are none, the step time alone."""
        return self.samples_s or (self.step_time_s,)

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def beside(self, reference_s: float) -> Measurement:
        """As it would be where a step of the reference takes `reference_s`, so that a drift of the machine cancels.

        A failure, a measurement without a reference, and any beside a time that is not known (NaN) stay as they are.
        """
        if not self.ok or not self.reference_s or not math.isfinite(reference_s):
            return self
        factor = reference_s / self.reference_s
        return replace(
            self,
            step_time_s=self.step_time_s * factor,
            samples_s=tuple(sample_s * factor for sample_s in self.samples_s),
            reference_s=reference_s,
            timeline=self.timeline and self.timeline.slowed(factor),
        )


class Measurer(Protocol):
    """Interface of everything that returns the step time of a placement: the simulator, the host itself, a pool of
    hosts."""

    @property
    def problem(self) -> Problem:
        """The problem that placements are measured on."""

    def measure(self, placements: NDArray[np.int32]) -> list[Measurement]:
        """One `Measurement` for each row of `placements` (B, N)."""


class PlanMeasurer(Protocol):
    """Times plans exactly as they are."""

    def measure_plans(self, plans: Sequence[Plan]) -> list[Measurement]:
        """One `Measurement` for each plan, in their order."""


@runtime_checkable
class StepTimer(Protocol):
    """A measurer that can give step times alone, faster than whole measurements (the simulator)."""

    def step_times(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
        """(B,) seconds for (B, N) placements; infinite where a placement failed."""


@runtime_checkable
class CutoffTimer(StepTimer, Protocol):
    """A step timer that can leave slow placements early."""

    def step_times_within(self, placements: NDArray[np.int32], cutoff_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """`step_times`, but those above `cutoff_s` (B,) may come back as infinite."""


@runtime_checkable
class PathTimer(StepTimer, Protocol):
    """A step timer that gives the critical path of a step (the simulator)."""

    def critical_ops(
        self, devices: NDArray[np.int32], priorities: NDArray[np.float64] | None = None
    ) -> NDArray[np.int32]:
        """(C,) ops of a critical path of a placement (N,), ready ops by priority; empty where it has none."""


@runtime_checkable
class PlanTimer(Protocol):
    """A step timer that runs ops in an order that is given (the simulator); priorities are (N,), higher ones first."""

    def step_times(
        self, placements: NDArray[np.int32], priorities: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        """As `StepTimer`, ready ops by priority."""

    def step_times_within(
        self,
        placements: NDArray[np.int32],
        cutoff_s: NDArray[np.float64],
        priorities: NDArray[np.float64] | None = None,
    ) -> NDArray[np.float64]:
        """As `CutoffTimer`, ready ops by priority."""

    def plan_and_time(
        self, devices: NDArray[np.int32], priorities: NDArray[np.float64] | None = None
    ) -> tuple[Plan, Measurement]:
        """The plan of a placement (N,), ready ops by priority, and its measurement."""

    def retime(self, plan: Plan) -> Measurement:
        """The measurement of exactly this plan."""


class MeasurementLog(Protocol):
    """Keeps measurements and finds them again; failures to keep or find never stop a measurement."""

    def recall(self, key: MeasurementKey, reference: str, plan: Plan, problem: Problem) -> Measurement | None:
        """An earlier measurement under this key beside this reference; None if it is to be run.

        Args:
            key: of the plan.
            reference: fingerprint of the placement that is timed in turn with it.
            plan: that was measured; the timeline of its traced step comes with the measurement.
            problem: whose graph was placed.
        """

    def keep(self, plan: Plan, outcome: Measurement, reference: str, *, is_whole: bool) -> None:
        """Takes a measurement that was just made.

        Args:
            plan: the plans that ran.
            outcome: the measurement, with its key.
            reference: fingerprint of the placement that was timed in turn with it; empty without one.
            is_whole: whether it ended as the protocol says, not for want of time.
        """

    def keep_trace(self, problem: Problem, plan: Plan, timeline: Timeline) -> None:
        """Takes the timeline of a step of a plan."""


def versions_line() -> str:
    """Versions that a step time depends on, in one line."""
    import torch

    return f"rlplace {__version__}, torch {torch.__version__}, python {platform.python_version()}"


def placement_fingerprint(devices: NDArray[np.int32]) -> str:
    """16 hex digits over the devices of ops (N,), with any order of ops; orders hardly matter to a reference."""
    return hashlib.sha256(devices.astype("<i4").tobytes()).hexdigest()[:16]
