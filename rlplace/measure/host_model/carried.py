"""`knowledge_of`: what runs learned about one host, put together for the next workload on it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlplace.measure.costs.costs import CostSource
from rlplace.measure.host_model.knowledge import Factor, HostKnowledge, SeenRun
from rlplace.measure.host_model.learned_host import LearnedHost
from rlplace.measure.host_model.priors import SECTIONS
from rlplace.measure.host_model.refit import FIGURES_OF, likelihood
from rlplace.measure.host_model.scales import LARGEST

LEAST_LEARNED = 0.1
"""Of a run that kept no equations, a factor whose variance fell by less than this share is left out: hardly anything
was learned of it."""
MOST_RUNS = 32
"""The latest are enough; a host may also change."""


def knowledge_of(learned: Sequence[LearnedHost], source: CostSource) -> HostKnowledge | None:
    """What earlier runs on a host tell about its factors; None where they tell nothing.

    A run tells what its measured steps alone say (`LearnedHost.equations`), so that what it was told itself does not
    count twice. One that kept no equations tells it factor by factor, its prior divided out as in `fit_priors`.

    Args:
        learned: what runs kept, on one host, the latest first.
        source: of the costs of the next problem; only what was learned on costs of the same kind says something of it.
    """
    runs = [host for host in learned if SECTIONS[host.cost_source] == SECTIONS[source]][:MOST_RUNS]
    seen = [_of_equations(run) if run.equations else _of_factors(run) for run in runs]
    told = tuple(run for run in seen if len(run.targets))
    return HostKnowledge(told) if told else None


def _of_equations(run: LearnedHost) -> SeenRun:
    slopes = np.array([equation.slopes for equation in run.equations])
    return SeenRun(_factors(run), slopes, np.array([equation.target for equation in run.equations]))


def _of_factors(run: LearnedHost) -> SeenRun:
    """An equation for each factor that something was learned of."""
    rows, targets = [], []
    for place, factor in enumerate(run.factors):
        found = likelihood(factor, LEAST_LEARNED)
        if found is None or abs(found[0]) > LARGEST:
            continue
        mean, deviation = found[0], math.sqrt(found[1])
        rows.append(np.eye(len(run.factors))[place] / deviation)
        targets.append(mean / deviation)
    return SeenRun(_factors(run), np.array(rows).reshape(len(rows), len(run.factors)), np.array(targets))


def _factors(run: LearnedHost) -> tuple[Factor, ...]:
    """The run's factors, as far as they may be from 1 on a host that is not known."""
    return tuple(
        Factor(
            factor.kind,
            factor.name,
            getattr(run.prior, FIGURES_OF[factor.kind][0]) or factor.prior_deviation,
            factor.median,
        )
        for factor in run.factors
    )
