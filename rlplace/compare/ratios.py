"""Ratios over a suite of problems: their geometric mean and how sure one can be of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue

DRAWS = 10_000


@dataclass(frozen=True)
class MeanRatio:
    """A geometric mean with its 95 % interval.

    Attributes:
        mean: geometric mean over problems.
        low: lower end of the interval.
        high: upper end of the interval.
        num_problems: how many ratios went in.
    """

    mean: float
    low: float
    high: float
    num_problems: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_ratio(ratios: Sequence[float], workloads: Sequence[str], *, seed: int = 0) -> MeanRatio:
    """The geometric mean of `ratios`, its interval bootstrapped by workload.

    Problems of one workload are alike, so whole workloads are drawn with replacement (cluster bootstrap, percentile
    interval; Efron & Tibshirani 1993, chapter 13).

    Args:
        ratios: positive, one a problem.
        workloads: of each problem.
        seed: of the draws.

    Raises:
        InvalidValue: no ratio, one that is not positive and finite, or another number of workloads.

    Example:
        >>> print(mean_ratio([1.0, 4.0], ["a", "a"]))
        2.000 [2.000, 2.000]
    """
    logs, sums, counts = _by_workload(ratios, workloads)
    drawn = np.random.default_rng(seed).integers(0, len(sums), (DRAWS, len(sums)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.percentile(means, (2.5, 97.5))
    return MeanRatio(float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high)), len(logs))


def paired_ratio(ratios: Sequence[float], workloads: Sequence[str]) -> MeanRatio:
    """The geometric mean over workloads of what each has on geometric average, with a t-interval over the workloads.

    For ratios of two methods on the same problems: a workload counts once, however many problems it has. With a single
    workload the interval is without end.

    Args:
        ratios: positive, one a problem.
        workloads: of each problem.

    Raises:
        InvalidValue: no ratio, one that is not positive and finite, or another number of workloads.

    Example:
        >>> print(paired_ratio([1.0, 4.0, 2.0], ["a", "a", "b"]))
        2.000 [2.000, 2.000]
    """
    from scipy.stats import t

    logs, sums, counts = _by_workload(ratios, workloads)
    means = sums / counts
    half = np.inf
    if len(means) > 1:
        half = t.ppf(0.975, len(means) - 1) * means.std(ddof=1) / np.sqrt(len(means))
    low, high = float(np.exp(means.mean() - half)), float(np.exp(means.mean() + half))
    return MeanRatio(float(np.exp(means.mean())), low, high, len(logs))


def _by_workload(
    ratios: Sequence[float], workloads: Sequence[str]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Logarithms (P,), their sum for each workload (W,), and how many each has (W,).

    Raises:
        InvalidValue: no ratio, one that is not positive and finite, or another number of workloads.
    """
    values = np.asarray(ratios, dtype=np.float64)
    if len(values) == 0 or len(workloads) != len(values):
        raise InvalidValue("ratios", len(values), f"one for each of {len(workloads)} problems, at least one")
    if not np.all(np.isfinite(values)) or np.any(values <= 0):
        raise InvalidValue("ratios", values.tolist(), "positive finite numbers")
    logs: NDArray[np.float64] = np.log(values)
    names, cluster = np.unique(np.asarray(workloads), return_inverse=True)
    sums = np.bincount(cluster, weights=logs, minlength=len(names)).astype(np.float64)
    counts = np.bincount(cluster, minlength=len(names)).astype(np.float64)
    return logs, sums, counts
