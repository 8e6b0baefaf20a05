"""`make_runner`: plans are run in a worker process, unless somebody wants them here or no worker can be had."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.isolate.process import CannotIsolate
from rlplace.measure.isolate.runner import IsolatedRunner
from rlplace.measure.measurement import Measurement
from rlplace.measure.plan import Plan, Timeline
from rlplace.measure.problem import Problem
from rlplace.measure.run.eager_step import Other
from rlplace.measure.run.race import RaceProtocol, Timer
from rlplace.measure.run.runner import HostRunner, Planner

VARIABLE = "RLPLACE_IN_PROCESS"
"""Of the environment: 1 has plans run in the process that asks, where nobody says otherwise."""


class Runner(Protocol):
    """Runs plans for real: `HostRunner` in this process, `IsolatedRunner` in a worker's."""

    def measure_plans(
        self,
        plans: Sequence[Plan],
        *,
        protocol: RaceProtocol | None = None,
        others: Sequence[Other] = (),
        deadline_s: float = float("inf"),
    ) -> list[Measurement]:
        """A measurement for each plan, then one for each of `others`, all in one race."""
        ...

    def trace(self, plan: Plan, *, num_steps: int = 5, warmup: int = 2) -> list[Timeline]:
        """Measured timelines of steps of `plan`, in order of step time."""
        ...

    def timer(self, plan: Plan) -> Timer:
        """What runs one step of `plan`, which is loaded now, to be raced by another runner."""
        ...

    def close(self) -> None:
        """Ends its threads, and its worker."""
        ...


def is_isolated(asked: bool | None) -> bool:
    """Whether plans run in a worker: as asked, else as the environment says, else yes where workers can be had."""
    if asked is not None:
        return asked
    return os.environ.get(VARIABLE, "") != "1" and os.name == "posix"


def make_runner(
    problem: Problem, planner: Planner, *, reference: NDArray[np.int32] | None, seed: int, isolated: bool | None
) -> Runner:
    """The runner for a problem on a host of this machine; warns where a worker is wanted and cannot be had.

    Args:
        problem: its graph with a program.
        planner: the simulator.
        reference: (N,) placement timed beside every other.
        seed: of random ops.
        isolated: whether plans run in a worker; None is the default.

    Raises:
        InvalidValue: a simulated host, one with a device that this machine lacks, or a graph without a program.
    """
    if is_isolated(isolated):
        try:
            return IsolatedRunner(problem, planner, reference=reference, seed=seed)
        except CannotIsolate as error:
            warnings.warn(
                f"placements are measured in this process, as no worker can be had: {error}. A placement that crashes "
                "will end this process.",
                RuntimeWarning,
                stacklevel=3,
            )
    return HostRunner(problem, planner, reference=reference, seed=seed)
