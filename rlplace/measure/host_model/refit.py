"""`fit_priors`: the figures of priors that explain what was learned about hosts so far.

`knowledge_of`: what runs learned about one host, put together for the next workload on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar

from rlplace.errors import InvalidValue
from rlplace.measure.costs.costs import CostSource
from rlplace.measure.host_model.knowledge import Factor, HostKnowledge, Kind, SeenRun
from rlplace.measure.host_model.learned_host import LearnedFactor, LearnedHost
from rlplace.measure.host_model.priors import SECTIONS, Figure, Priors, Section
from rlplace.measure.host_model.scales import LARGEST

WEIGHT = 4
"""The shipped figures count as much as so many factors that are known exactly."""
LEAST_LEARNED = 0.5
"""A factor whose variance fell by less than this share of the prior's is left out: divided by so little, an error of
the normal approximation would become a factor of hundreds."""
DEVIATIONS = np.geomspace(1e-3, 10.0, 241)
"""Where the deviation of a kind is looked for."""
FIGURES_OF: dict[Kind, tuple[str, str]] = {
    "op type": ("op_type", ""),
    "device": ("device", ""),
    "bandwidth": ("bandwidth", ""),
    "latency": ("latency", ""),
    "overhead": ("overhead", "overhead_s"),
    "dispatch": ("dispatch", "dispatch_s"),
    "co-run": ("corun_deviation", "corun"),
}
"""Names of the deviation, and of the median if there is one, that a prior has for factors of each kind."""


@dataclass(frozen=True)
class FittedFigure:
    """A figure that was fitted.

    Attributes:
        section: the costs that it holds for.
        name: of the figure.
        value: now.
        shipped: before.
        num_factors: what it was fitted to.
        num_runs: that these factors come from.
    """

    section: Section
    name: str
    value: float
    shipped: float
    num_factors: int
    num_runs: int


def fit_priors(hosts: Sequence[LearnedHost], shipped: Priors) -> tuple[Priors, tuple[FittedFigure, ...]]:
    """Priors with the figures that are most probable given what runs learned, and which of them were fitted.

    Empirical Bayes (Morris 1983, J. Am. Stat. Assoc. 78(381)), each kind of factor of each source of costs apart. A
    factor's likelihood is its posterior with its prior divided out, N(m; x, s^2): 1/s^2 = 1/sd^2 - 1/prior_sd^2 and
    m = s^2 * (mean / sd^2 - prior_mean / prior_sd^2). That takes factors of one run for independent. The deviation tau
    of a kind maximises the sum of log N(m; mu, tau^2 + s^2), to which the shipped figures add what `WEIGHT` factors
    would add that are known exactly and have the shipped median and deviation. mu is 0, but for kinds that have a
    median: there it is the logarithm of the median, fitted along. What no factor was learned of keeps its figure, and
    so does what is taken as known (deviation 0).

    Args:
        hosts: what each run learned.
        shipped: the figures that count as `WEIGHT` factors.

    Raises:
        InvalidValue: nothing was learned that a figure could be fitted to.
    """
    found: list[FittedFigure] = []
    sections: dict[Section, dict[str, Figure]] = {}
    for section in ("estimated", "profiled"):
        figures = sections[section] = dict(shipped.section(section))
        for kind, (deviation_name, median_name) in FIGURES_OF.items():
            taught = [
                (run, factor)
                for run, host in enumerate(hosts)
                if SECTIONS[host.cost_source] == section
                for factor in host.factors
                if factor.kind == kind and likelihood(factor) is not None
            ]
            before = figures[deviation_name].value
            if not taught or before <= 0:
                continue
            median_before = figures[median_name].value if median_name else 0.0
            median, deviation = fit_figures([factor for _, factor in taught], median_before, before)
            news = [(deviation_name, deviation, taught)]
            if median_before > 0 and (on_prior := [pair for pair in taught if pair[1].median > 0]):
                news.append((median_name, median, on_prior))
            for name, value, sources in news:
                now, was = float(f"{value:.4g}"), figures[name].value
                fitted = FittedFigure(section, name, now, was, len(sources), len({run for run, _ in sources}))
                figures[name] = Figure(now, _source(fitted))
                found.append(fitted)
    if not found:
        expected = "at least one factor that measured steps say something about"
        hint = "Name runs that measured more plans."
        raise InvalidValue("factors", 0, expected, where="fit-priors", hint=hint)
    return Priors(sections["estimated"], sections["profiled"]), tuple(found)


def likelihood(factor: LearnedFactor, least_learned: float = LEAST_LEARNED) -> tuple[float, float] | None:
    """Mean and variance of what measured steps alone say about a factor's logarithm; None where that is nothing.

    Args:
        factor: what was learned.
        least_learned: share of the prior's variance below which it is nothing.
    """
    kept = (factor.log_deviation / factor.prior_deviation) ** 2
    if 1.0 - kept < least_learned:
        return None
    return (factor.log_mean - kept * factor.prior_mean) / (1.0 - kept), factor.log_deviation**2 / (1.0 - kept)


def fit_figures(
    factors: Sequence[LearnedFactor], median: float, deviation: float, weight: float = WEIGHT
) -> tuple[float, float]:
    """The most probable median and deviation of factors of one kind.

    Args:
        factors: what was learned of each; those that too little was learned of are left out.
        median: shipped; 0 for a kind that has none, or whose median is not to be fitted.
        deviation: shipped, more than 0.
        weight: how many factors the shipped figures count as.

    Returns:
        The median (as given, where no factor is on a prior's median) and the deviation of the logarithms.
    """
    taught = [(factor, pair) for factor in factors if (pair := likelihood(factor)) is not None]
    if not taught:
        return median, deviation
    factors = [factor for factor, _ in taught]
    means, variances = (np.array(column) for column in zip(*(pair for _, pair in taught), strict=True))
    is_on = np.array([median > 0 and factor.median > 0 for factor in factors])
    start = math.log(median) if median > 0 else 0.0
    means = means + np.array([math.log(f.median) - start if on else 0.0 for f, on in zip(factors, is_on, strict=True)])

    def shift(spread: float) -> float:
        """By how much the logarithm of the median moves, where the deviation is the root of `spread`."""
        precision: NDArray[np.float64] = is_on / (spread + variances)
        return float(precision @ means / (precision.sum() + weight / spread)) if is_on.any() else 0.0

    def loss(log_deviation: float) -> float:
        """Twice the negative logarithm of the marginal likelihood, but for a constant."""
        spread = math.exp(2 * log_deviation)
        moved, total = shift(spread), spread + variances
        of_factors = np.log(total) + (means - moved * is_on) ** 2 / total
        return float(of_factors.sum()) + weight * (2 * log_deviation + (deviation**2 + moved**2) / spread)

    grid = np.log(DEVIATIONS)
    least = int(np.argmin([loss(at) for at in grid.tolist()]))
    ends = float(grid[max(least - 1, 0)]), float(grid[min(least + 1, len(grid) - 1)])
    best = float(minimize_scalar(loss, bounds=ends, method="bounded", options={"xatol": 1e-9}).x)
    moved = shift(math.exp(2 * best))
    return (median * math.exp(moved) if is_on.any() else median), math.exp(best)


def _source(figure: FittedFigure) -> str:
    factors = f"{figure.num_factors} factor{'s' * (figure.num_factors != 1)}"
    runs = f"{figure.num_runs} run{'s' * (figure.num_runs != 1)}"
    return f"fitted to {factors} of {runs}; the shipped {figure.shipped:g} counts as {WEIGHT} more factors"


LEAST_CARRIED = 0.1
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
        found = likelihood(factor, LEAST_CARRIED)
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
