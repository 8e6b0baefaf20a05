"""`LoopBudget`: what one method may spend on a search that measures."""

from __future__ import annotations

from dataclasses import dataclass

FINALISTS = 4
"""Best measured placements of a method that race against each other at last."""
FINAL_SHARE = 0.15
"""Share of a method's time in which its best measured placements are told apart."""
STEPS = 6.5
"""Steps that measuring a placement takes, about: a warm-up, up to five rounds, its share of the reference's."""


@dataclass(frozen=True)
class LoopBudget:
    """What one method may spend.

    Attributes:
        seconds: wall time, measuring included.
        simulate_share: share of it for simulated placements.
        measurements: placements that may be run, the last race aside.
    """

    seconds: float
    simulate_share: float = 0.6
    measurements: int = 0

    @classmethod
    def of(cls, seconds: float, simulate_share: float, reference_s: float) -> LoopBudget:
        """As many measurements as fit into the time for them, where a step takes about `reference_s`."""
        measuring_s = (1.0 - simulate_share) * seconds - FINAL_SHARE * seconds
        count = int(measuring_s / (STEPS * max(reference_s, 1e-6)))
        return cls(seconds, simulate_share, max(count, FINALISTS))
