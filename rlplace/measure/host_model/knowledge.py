"""`HostKnowledge`: what other workloads taught about a host, as a prior for the next one on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["op type", "device", "bandwidth", "latency", "overhead", "dispatch", "co-run"]


@dataclass(frozen=True)
class KnownFactor:
    """What is known of one factor: a normal distribution, from measured steps alone.

    Attributes:
        mean: of the logarithm; where `is_absolute`, of the figure itself, in seconds or as a share.
        variance: of it on another workload.
        is_absolute: whether the factor is on a figure of the prior rather than of the problem.
    """

    mean: float
    variance: float
    is_absolute: bool = False


@dataclass(frozen=True)
class HostKnowledge:
    """Factors of one host that were learned on other workloads.

    Attributes:
        factors: by kind and name.
        num_runs: searches that they come from.
    """

    factors: Mapping[tuple[Kind, str], KnownFactor]
    num_runs: int = 1

    def prior_of(self, kind: Kind, name: str, deviation: float, median: float) -> tuple[float, float]:
        """Mean and deviation of a factor's logarithm, before the next workload is measured.

        Args:
            kind: of the factor.
            name: of it.
            deviation: of its logarithm on a host that is not known.
            median: the prior's figure that it is on; 0 where it is on a figure of the problem.
        """
        known = self.factors.get((kind, name))
        if known is None or known.is_absolute != (median > 0):
            return 0.0, deviation
        mean = known.mean - (math.log(median) if known.is_absolute else 0.0)
        share = deviation**2 / (deviation**2 + known.variance)
        return share * mean, deviation * math.sqrt(1.0 - share)
