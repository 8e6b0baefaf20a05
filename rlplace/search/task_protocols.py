"""What a `Task` works with: the host that runs placements for it, who watches it, and what a method learned on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.measurement import Measurement, Measurer, PlanMeasurer
from rlplace.measure.plan import Plan


class OpenHost(Measurer, PlanMeasurer, Protocol):
    """A host that runs placements and plans for as long as there is time."""

    @property
    def is_open(self) -> bool:
        """Whether it would still run one."""
        ...

    def promising(self, count: int) -> NDArray[np.int32]:
        """(<= count, N): the best placements scored so far that were never run, unlike each other if possible."""
        ...


@runtime_checkable
class LateHost(OpenHost, Protocol):
    """A host that gives measurements as they come: those of some plans later than those of others."""

    def measure_some(self, plans: Sequence[Plan], *, is_all: bool = False) -> list[tuple[Plan, Measurement]]:
        """Takes plans to be measured, and gives the measurements that have come of these and of earlier ones.

        Every plan is given back once, with its measurement. With `is_all` it waits for all that were ever taken; then
        those of `plans` come last, in their order.
        """
        ...


class Observer(Protocol):
    """Watches a task; what it does must not change what is found."""

    def scored(self, placements: NDArray[np.int32], step_s: NDArray[np.float64]) -> None:
        """Placements (B, N) were scored: (B,) seconds, infinite where infeasible."""
        ...

    def learned(self, figures: Mapping[str, float]) -> None:
        """The method has learned something; figures by name."""
        ...


class Saveable(Protocol):
    """What a method learned, as a file."""

    def save(self, path: Path) -> None:
        """Writes it to `path`, and what belongs to it beside it."""
        ...
