"""`Posterior`: what a host's factors are after measuring, and how sure that is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.host_model.scales import Scales
from rlplace.measure.problem import Problem

STEEPEST = 1e4
"""Of an equation: no step time tells a factor better than to this many parts."""


@dataclass(frozen=True, eq=False)
class Posterior:
    """A normal distribution of the logarithms of P factors, around the most probable ones.

    Attributes:
        scales: which factors.
        mean: (P,) the most probable logarithms.
        root: (P, P) a root of their covariance: `root @ root.T`.
        loss: half the sum of squares at the mean, in units of noise and of the prior.
        slopes: (B, P) derivatives of the residuals of measured steps in units of the prior's deviations.
        residuals: (B,) at the mean, in units of noise.
    """

    scales: Scales
    mean: NDArray[np.float64]
    root: NDArray[np.float64]
    loss: float = 0.0
    slopes: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    residuals: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def of(
        cls,
        scales: Scales,
        mean: NDArray[np.float64],
        slopes: NDArray[np.float64],
        loss: float = 0.0,
        residuals: NDArray[np.float64] | None = None,
    ) -> Posterior:
        """The distribution whose precision, in units of the prior's deviations, is 1 and what measurements add.

        Args:
            scales: which factors.
            mean: (P,).
            slopes: (B, P) derivatives of residuals, both in their units.
            loss: at the mean.
            residuals: (B,) at the mean; 0 by default.
        """
        # a factor of the precision without squaring the slopes, which may be large
        factor = np.linalg.qr(np.concatenate((np.eye(len(scales)), slopes)), mode="r")
        root = np.linalg.inv(factor * np.sign(np.diag(factor))[:, None])
        left = np.zeros(len(slopes)) if residuals is None else residuals
        return cls(scales, mean, scales.spread(root), loss, slopes, left)

    @classmethod
    def prior(cls, scales: Scales) -> Posterior:
        """What is known before anything is measured."""
        return cls(scales, scales.mean.copy(), scales.spread(np.eye(len(scales))))

    @property
    def deviation(self) -> NDArray[np.float64]:
        """(P,) standard deviations of the logarithms."""
        found: NDArray[np.float64] = np.sqrt((self.root**2).sum(axis=1))
        return found

    @property
    def problem(self) -> Problem:
        """The problem under the most probable factors."""
        return self.scales.apply(self.mean)

    def draw(self, generator: np.random.Generator) -> Problem:
        """The problem under factors drawn from the distribution."""
        return self.scales.apply(self.mean + self.root @ generator.standard_normal(len(self.mean)))

    def equations(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What the measured steps alone say, without the prior: slopes (R, P) and targets (R,).

        `slopes @ x` is `targets` at the logarithms x of the factors, each with a standard deviation of 1: the step
        times as they are near the mean, in at most P equations that say the same as all of them. Where the factors
        explain the step times worse than their noise, the equations say as much less.
        """
        if not len(self.slopes):
            return np.zeros((0, len(self.mean))), np.zeros(0)
        slopes = self.scales.unspread(self.slopes)
        targets = slopes @ self.mean - self.residuals
        missed = math.sqrt(float(np.mean(self.residuals**2)))
        steepest = np.abs(slopes).max(axis=1) / STEEPEST
        weights = 1.0 / np.maximum(np.maximum(steepest, missed), 1.0)
        both = np.column_stack((slopes, targets)) * weights[:, None]
        if len(both) > len(self.mean):
            both = np.linalg.qr(both, mode="r")[: len(self.mean)]
        return both[:, :-1], both[:, -1]
