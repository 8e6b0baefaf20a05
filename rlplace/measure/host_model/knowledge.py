"""`HostKnowledge`: what other workloads taught about a host, as a prior for the next one on it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Kind = Literal["op type", "device", "bandwidth", "latency", "overhead", "dispatch", "co-run"]

CARRIED: Mapping[Kind, float] = {
    "op type": 0.2,
    "device": 0.05,
    "bandwidth": 0.05,
    "latency": 0.05,
    "overhead": 0.2,
    "dispatch": 0.2,
    "co-run": 0.2,
}
"""How far a factor differs from one workload to the next on the same host, as a share of how far from host to host: an
op type has other shapes there, a link is the same link."""


class Factor(NamedTuple):
    """A factor before anything is measured: its logarithm is normal around 0.

    Attributes:
        kind: of the factor.
        name: of it.
        deviation: of its logarithm on a host that is not known.
        median: the prior's figure that it is on, in seconds or as a share; 0 where it is on a figure of the problem.
    """

    kind: Kind
    name: str
    deviation: float
    median: float = 0.0


@dataclass(frozen=True, eq=False)
class SeenRun:
    """What the measured steps of one run say, as linear equations in the logarithms u of its K factors.

    Attributes:
        factors: K of them.
        slopes: (R, K); `slopes @ u` is `targets`, each with a standard deviation of 1.
        targets: (R,).
    """

    factors: tuple[Factor, ...]
    slopes: NDArray[np.float64]
    targets: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class HostKnowledge:
    """Measured steps of other workloads on one host.

    Attributes:
        runs: searches that they come from.
    """

    runs: tuple[SeenRun, ...]

    @property
    def num_runs(self) -> int:
        """Searches that taught something."""
        return len(self.runs)

    @property
    def factors(self) -> frozenset[tuple[Kind, str]]:
        """Kinds and names of the factors that some measured step depended on."""
        return frozenset(
            (factor.kind, factor.name)
            for run in self.runs
            for factor, slopes in zip(run.factors, run.slopes.T, strict=True)
            if slopes.any()
        )

    def prior(self, factors: Sequence[Factor]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Means (P,) of the logarithms of a workload's factors, and a root (P, P) of their covariance.

        The host has h, of which each run, and the next workload, has its own with a deviation of c = `CARRIED` of the
        factor's; h has the rest of its variance. A run's equations S u = t + noise are then S h = t + noise of the
        covariance I + S diag(c^2) S'. All are solved together with the prior (least squares by QR), also for factors
        that the next workload does not have: what those might be makes the equations that they are in say less of the
        others, and two such equations may still tell a difference.

        Args:
            factors: of the next workload, P of them. One on a figure of the prior is known as that figure.
        """
        place: dict[tuple[Kind, str, bool], int] = {}
        every: list[Factor] = []
        for factor in (*factors, *(factor for run in self.runs for factor in run.factors)):
            if place.setdefault(_key(factor), len(every)) == len(every):
                every.append(factor)
        deviation = np.array([factor.deviation for factor in every])
        centre = np.array([_log_median(factor) for factor in every])
        own = deviation * [CARRIED[factor.kind] for factor in every]
        of_host = np.sqrt(deviation**2 - own**2)
        rows, targets = [np.eye(len(every))], [np.zeros(len(every))]
        for run in self.runs:
            at = [place[_key(factor)] for factor in run.factors]
            medians = np.array([_log_median(factor) for factor in run.factors])
            left = run.targets + run.slopes @ (medians - centre[at])
            spread = run.slopes * own[at]
            whitened = np.linalg.cholesky(np.eye(len(left)) + spread @ spread.T)
            equations = np.zeros((len(left), len(every)))
            equations[:, at] = np.linalg.solve(whitened, run.slopes * of_host[at])
            rows.append(equations)
            targets.append(np.linalg.solve(whitened, left))
        stacked, target = np.concatenate(rows), np.concatenate(targets)
        triangle = np.linalg.qr(stacked, mode="r")
        root = of_host[:, None] * np.linalg.inv(triangle)
        count = len(factors)
        mean = (root @ (np.linalg.inv(triangle).T @ (stacked.T @ target)))[:count]
        covariance = root[:count] @ root[:count].T + np.diag(own[:count] ** 2)
        return mean, np.linalg.cholesky(covariance)


def _key(factor: Factor) -> tuple[Kind, str, bool]:
    """What two runs call the same: a factor on the problem's figure is another than one on the prior's."""
    return factor.kind, factor.name, factor.median > 0


def _log_median(factor: Factor) -> float:
    return math.log(factor.median) if factor.median > 0 else 0.0
