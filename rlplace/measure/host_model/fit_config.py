"""`FitConfig`: how measured step times are weighed, and how long a fit descends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlplace.errors import InvalidValue


@dataclass(frozen=True)
class FitConfig:
    """How measured step times are weighed against each other and against the prior."""

    noise: float = 0.01
    """Standard deviation of a measured step time, as a share of it, where none is given with it."""
    least_noise: float = 0.005
    """Of a measurement whose samples are closer together by luck."""
    misfit: float = 0.01
    """What no factors explain of the fastest plans, likewise: the model is not the host."""
    far: float = 0.1
    """How much more it is of a plan that takes e times the fastest: where nobody wants to be, the fit may be worse."""
    max_rounds: int = 12
    """How often the fit looks for paths that it does not know."""
    max_iterations: int = 8
    """Steps of Levenberg-Marquardt between two looks."""
    sharpness: float = 1e3
    """Of the soft maximum over a plan's paths: k paths of one length count as one that is log(k) / sharpness longer."""
    paths: int = 12
    """Paths of a plan that are kept, the longest."""
    draw_tolerance: float = 0.02
    """A round of a draw's fit that gains less than this share of the loss is the last: it need not be the best, but
    what was measured must not rule it out."""
    draw_rounds: int = 4
    """As `max_rounds`, of a draw's fit."""
    restarts: int = 4
    """Descents from elsewhere, at most, while the factors explain less than they should."""
    tolerance: float = 1e-4
    """A step that gains less than this share of the loss is the last."""

    def __post_init__(self) -> None:
        for name in ("noise", "least_noise", "misfit", "far", "tolerance", "draw_tolerance"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise InvalidValue(name, getattr(self, name), "a finite number >= 0", where="host model")
        if self.restarts < 0:
            raise InvalidValue("restarts", self.restarts, "at least 0", where="host model")
        if not self.sharpness > 0:
            raise InvalidValue("sharpness", self.sharpness, "more than 0", where="host model")
        for name in ("max_rounds", "max_iterations", "paths", "draw_rounds"):
            if getattr(self, name) < 1:
                raise InvalidValue(name, getattr(self, name), "at least 1", where="host model")
