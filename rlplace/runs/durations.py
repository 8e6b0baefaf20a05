"""`Durations`: how long the parts of a run take, as expected before it begins and as they took in the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from rlplace.report.format import format_clock

LEAST_LIMIT_S = 20.0
"""A part that surrounds a search is given so long at least, however short the search."""


def limit_s(budget_s: float) -> float:
    """Seconds after which calibration, or the final table, is cut short: no longer than the search, within reason.

    On a busy machine either may take many times what it was expected to.
    """
    return max(budget_s, LEAST_LIMIT_S)


def cut_words(what: str, rounds: int, asked: int) -> str:
    """What people are told of a race that was cut short."""
    return f"the machine is slow: {what} was cut short, after {rounds} of {asked} rounds"


@dataclass(frozen=True)
class Durations:
    """Seconds of each part of a run; 0 of one that it does not have.

    Example:
        >>> print(Durations(calibration_s=12.0, search_s=150.0))
        calibration 0:12, search 2:30
    """

    profiling_s: float = 0.0
    """Times of ops and links, and where it is asked for, the choice of how the batch is cut."""
    calibration_s: float = 0.0
    """Placements that are measured before the search, and what is learned from them."""
    heuristics_s: float = 0.0
    """Placements without search, and the kernels of searches: read from disk, or compiled the first time."""
    search_s: float = 0.0
    """The search of all methods, measuring included."""
    table_s: float = 0.0
    """The final table, and the timeline of the best placement."""

    @property
    def total_s(self) -> float:
        """All parts together."""
        return float(sum(asdict(self).values()))

    def to_dict(self) -> dict[str, float]:
        """The parts and `total_s`, as `result.json` keeps them."""
        return {**asdict(self), "total_s": self.total_s}

    def __str__(self) -> str:
        shown = {name: seconds for name, seconds in asdict(self).items() if seconds >= 0.5 or name == "search_s"}
        return ", ".join(f"{name.removesuffix('_s')} {format_clock(seconds)}" for name, seconds in shown.items())


class Stopwatch:
    """Times one part after another.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s = clock()

    def lap_s(self) -> float:
        """Seconds since the last lap, or since it was made."""
        before, self._since_s = self._since_s, self._clock()
        return self._since_s - before
