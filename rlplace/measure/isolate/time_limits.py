"""`TimeLimits`: how long a contender of a race may take before it is clear that it cannot matter."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlplace.measure.run.race import RaceProtocol
from rlplace.measure.run.runner import LONGEST_S

MAKING_S = 900.0
"""What compiling a model, or another way of making a contender, may take; plain PyTorch's own steps have it too."""
BETWEEN_S = 900.0
"""What a worker may take between steps, to load what it was sent and to make code of plans."""
STOPPED_S = 10.0
"""How long a worker that a signal stopped may stay stopped."""


@dataclass(frozen=True)
class TimeLimits:
    """Seconds that one step may take until its worker is ended and the contender is a `timeout`.

    A race that drops the hopeless needs of a slow placement only that it is slow: once a step was timed, a limit of
    many times the best one, and what loading takes, tells that. A race that drops nobody wants all figures.
    """

    longest_s: float = LONGEST_S
    """Of any step."""
    least_s: float = 5.0
    """Of any step, however fast others are: a busy machine may hold one up."""
    num_best: float = 20.0
    """Times the best step known."""
    num_first: float = 4.0
    """Times the longest first step, in which a plan is loaded: that of another may take longer."""

    def limit_s(self, protocol: RaceProtocol, best_s: float, first_s: float) -> float:
        """Seconds for a step of a plan.

        Args:
            protocol: of the race: what it drops as hopeless.
            best_s: the best step known; 0 where none is.
            first_s: the longest first step known; 0 where none is.

        >>> hopeful = RaceProtocol(hopeless=float("inf"))
        >>> TimeLimits().limit_s(RaceProtocol(), 0.5, 2.0), TimeLimits().limit_s(hopeful, 0.5, 2.0)
        (18.0, 120.0)
        """
        if best_s <= 0.0 or math.isinf(protocol.hopeless):
            return self.longest_s
        several = max(self.num_best, 2.0 * protocol.hopeless)
        return min(max(several * best_s + self.num_first * first_s, self.least_s), self.longest_s)
