"""A task's scoring, and its host, as the timer and the measurers that other code asks; all that is asked counts."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.measurement import Measurement
from rlplace.measure.problem import Problem
from rlplace.search.task import Task


class Scoring:
    """A task's scoring as a `StepTimer`: every placement that is timed counts as one of the task's."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def step_times(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
        """(B,) seconds of (B, N) placements, as `Task.score`."""
        return self._task.score(placements)


class Simulating:
    """A task's scoring as a `Measurer`: every placement counts once, also one that does not fit into memory.

    A `Measurer` that is a `StepTimer` too would be asked again, by `measure`, why a step time is infinite.
    """

    def __init__(self, task: Task) -> None:
        self._task = task

    @property
    def problem(self) -> Problem:
        """The task's problem."""
        return self._task.problem

    def measure(self, placements: NDArray[np.int32]) -> list[Measurement]:
        """One measurement a placement, of its step time alone; one that is infinite does not fit into memory."""
        times = self._task.score(placements).tolist()
        return [Measurement("ok" if math.isfinite(step_s) else "oom", step_s) for step_s in times]


class Measuring:
    """A task's host as a `Measurer`: every placement that is run counts as one of the task's measurements."""

    def __init__(self, task: Task) -> None:
        self._task = task

    @property
    def problem(self) -> Problem:
        """The task's problem."""
        return self._task.problem

    def measure(self, placements: NDArray[np.int32]) -> list[Measurement]:
        """As `Task.measure`: one measurement a placement, as far as the budget allows."""
        return self._task.measure(placements)
