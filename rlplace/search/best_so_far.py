"""`BestSoFar`: the best step time that a search has found, and what it had spent by then."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BestSoFar:
    """One improvement of a search; a run's `history` is one of these for each, in order.

    Attributes:
        evaluations: placements scored by then.
        measurements: placements run on the host by then.
        seconds: wall time since the search began; not compared, so that runs that found the same are equal.
        best_s: the step time that is now the best, in seconds; finite.
    """

    evaluations: int
    measurements: int
    seconds: float = field(compare=False)
    best_s: float

    def to_list(self) -> list[float]:
        """`[evaluations, measured, seconds, step_time_s]`, as `--json` and `result.json` hold it.

        Example:
            >>> BestSoFar(64, 0, 0.5, 0.125).to_list()
            [64, 0, 0.5, 0.125]
        """
        return [self.evaluations, self.measurements, self.seconds, self.best_s]
