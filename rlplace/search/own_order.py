"""`OwnOrder`: a simulator for tasks whose placements are planned later, in the problem's own order of ops."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.simulate.simulator import Simulator


class OwnOrder:
    """A step timer that knows no order but the problem's own.

    A search of a step that is cut into micro-batches would else go on in the order that suits its start: what it finds
    then, the host is never asked to run so, and observers are not told of it.

    Attributes:
        threads: placements simulated at once.

    Args:
        simulator: times placements.
    """

    def __init__(self, simulator: Simulator) -> None:
        self.threads = simulator.threads
        self._simulator = simulator

    def step_times(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
        """(B,) seconds of (B, N) placements."""
        return self._simulator.step_times(placements)

    def step_times_within(self, placements: NDArray[np.int32], cutoff_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """The same, sooner where they are above `cutoff_s` (B,)."""
        return self._simulator.step_times_within(placements, cutoff_s)


class OwnOrderWithPaths(OwnOrder):
    """The same, which tells critical paths: for what wants the best placement, not different ones to learn from."""

    def critical_ops(
        self, devices: NDArray[np.int32], priorities: NDArray[np.float64] | None = None
    ) -> NDArray[np.int32]:
        """(C,) ops of a critical path of a placement (N,), whatever the priorities."""
        return self._simulator.critical_ops(devices)
