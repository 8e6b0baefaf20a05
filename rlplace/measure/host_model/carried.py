"""`knowledge_of`: what runs learned about one host, put together for the next workload on it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlplace.measure.costs.costs import CostSource
from rlplace.measure.host_model.knowledge import HostKnowledge, Kind, KnownFactor
from rlplace.measure.host_model.learned_host import LearnedFactor, LearnedHost
from rlplace.measure.host_model.priors import SECTIONS
from rlplace.measure.host_model.refit import FIGURES_OF, likelihood
from rlplace.measure.host_model.scales import LARGEST

CARRIED = 0.2
"""How far a factor differs from one workload to the next on the same host, as a share of how far from host to host: an
op type has other shapes there."""
LEAST_LEARNED = 0.1
"""A factor whose variance fell by less than this share is left out: hardly anything was learned of it."""
MOST_RUNS = 32
"""The latest are enough; a host may also change."""


def knowledge_of(learned: Sequence[LearnedHost], source: CostSource) -> HostKnowledge | None:
    """What earlier runs on a host tell about its factors; None where they tell nothing.

    From each run's posterior its prior is divided out, as in `fit_priors`, so that what is told twice counts once. A
    factor of run i was seen as m_i with variance s_i^2, and differs from run to run by c, `CARRIED` of its prior's
    deviation. The host's own is the mean weighted by 1 / (s_i^2 + c^2), and the next workload's has the variance
    1 / sum(1 / (s_i^2 + c^2)) + c^2. Factors are taken for independent.

    Args:
        learned: what runs kept, on one host, the latest first.
        source: of the costs of the next problem; only what was learned on costs of the same kind says something of it.
    """
    runs = [host for host in learned if SECTIONS[host.cost_source] == SECTIONS[source]][:MOST_RUNS]
    seen: dict[tuple[Kind, str], list[tuple[float, float, float, bool]]] = {}
    for run in runs:
        for factor in run.factors:
            if (found := _seen(run, factor)) is not None:
                seen.setdefault((factor.kind, factor.name), []).append(found)
    factors: dict[tuple[Kind, str], KnownFactor] = {}
    for key, every in seen.items():
        is_absolute = every[0][3]  # of the latest run
        alike = [one for one in every if one[3] == is_absolute]
        carried = alike[0][2]
        weights = [1.0 / (variance + carried) for _, variance, _, _ in alike]
        total = math.fsum(weights)
        mean = math.fsum(weight * one[0] for weight, one in zip(weights, alike, strict=True)) / total
        factors[key] = KnownFactor(mean, 1.0 / total + carried, is_absolute)
    return HostKnowledge(factors, len(runs)) if factors else None


def _seen(run: LearnedHost, factor: LearnedFactor) -> tuple[float, float, float, bool] | None:
    """Mean and variance that measured steps alone give a factor's logarithm, how much that varies between workloads,
    and whether the mean is that of the figure itself; None where hardly anything was learned."""
    found = likelihood(factor, LEAST_LEARNED)
    if found is None or abs(found[0]) > LARGEST:
        return None
    mean, variance = found
    is_absolute = factor.median > 0
    deviation: float = getattr(run.prior, FIGURES_OF[factor.kind][0])
    carried = (CARRIED * deviation) ** 2
    return mean + (math.log(factor.median) if is_absolute else 0.0), variance, carried, is_absolute
