"""`Prior`: how far the true figures of a host are from those that a problem was given, before anything is measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from rlplace.errors import InvalidValue


@dataclass(frozen=True)
class Prior:
    """Standard deviations of the natural logarithms of factors; 0.7 is about a factor of 2 either way, 0 is known."""

    op_type: float = 0.5
    """Of the time of an op type on a kind of device."""
    device: float = 0.12
    """Of a device's speed beside others of its kind."""
    bandwidth: float = 0.6
    """Of a link's bandwidth."""
    latency: float = 0.3
    """Of a link's latency."""
    overhead_s: float = 5e-6
    """Median of the seconds that are added to every op on a device: launches that nothing hides."""
    overhead: float = 1.0
    """Of these seconds."""
    dispatch_s: float = 5e-6
    """Median of the seconds that a dispatcher takes to launch an op or a copy, where nothing says what it is."""
    dispatch: float = 0.0
    """Of these seconds."""
    corun: float = 0.05
    """Median of how much a busy device slows another that shares its memory, where nothing says what it is."""
    corun_deviation: float = 0.0
    """Of that slowdown."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidValue(field.name, value, "a finite number >= 0", where="prior")
