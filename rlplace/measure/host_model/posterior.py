"""`Posterior`: what a host's factors are after measuring, and how sure that is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.measure.host_model.scales import Scales
from rlplace.measure.problem import Problem


@dataclass(frozen=True, eq=False)
class Posterior:
    """A normal distribution of the logarithms of P factors, around the most probable ones.

    Attributes:
        scales: which factors.
        mean: (P,) the most probable logarithms.
        root: (P, P) a root of their covariance: `root @ root.T`.
        loss: half the sum of squares at the mean, in units of noise and of the prior.
    """

    scales: Scales
    mean: NDArray[np.float64]
    root: NDArray[np.float64]
    loss: float = 0.0

    @classmethod
    def of(cls, scales: Scales, mean: NDArray[np.float64], slopes: NDArray[np.float64], loss: float = 0.0) -> Posterior:
        """The distribution whose precision, in units of the prior's deviations, is 1 and what measurements add.

        Args:
            scales: which factors.
            mean: (P,).
            slopes: (B, P) derivatives of residuals, both in their units.
            loss: at the mean.
        """
        # a factor of the precision without squaring the slopes, which may be large
        factor = np.linalg.qr(np.concatenate((np.eye(len(scales)), slopes)), mode="r")
        root = np.linalg.inv(factor * np.sign(np.diag(factor))[:, None])
        return cls(scales, mean, scales.deviation[:, None] * root, loss)

    @classmethod
    def prior(cls, scales: Scales) -> Posterior:
        """What is known before anything is measured."""
        return cls(scales, scales.mean.copy(), np.diag(scales.deviation))

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
