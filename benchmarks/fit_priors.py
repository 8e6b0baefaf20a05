"""Fits the priors for a new host to the host models of finished runs: python benchmarks/fit_priors.py RUN... [--out F].

`rlplace train --priors F` takes them. A RUN is a run folder with a `host_model.json`, or such a file; `--store auto`
(the store of this user, or a file or run folder) adds the host models of a store. docs/host-model.md says how.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from record import argument, mistakes_in_a_line, parse
from scipy.optimize import minimize_scalar

from rlplace.errors import FileProblem, InvalidValue
from rlplace.measure.host_model import LearnedHost, Priors, load_learned_host, load_priors, save_priors
from rlplace.measure.host_model.learned_host import FIGURES_OF, LearnedFactor, likelihood
from rlplace.measure.host_model.scales import SECTIONS, Figure, Section
from rlplace.say import counted
from rlplace.store import MeasurementStore
from rlplace.store.log import LEAST_IDLE, OFF, store_path

WEIGHT = 4
"""The shipped figures count as much as so many factors that are known exactly."""
DEVIATIONS = np.geomspace(1e-3, 10.0, 241)
"""Where the deviation of a kind is looked for."""


def fit_priors(hosts: Sequence[LearnedHost], shipped: Priors) -> tuple[Priors, list[tuple[Section, str]]]:
    """Priors with the figures that are most probable given host models of runs, and which of them were fitted.

    Empirical Bayes (Morris 1983, J. Am. Stat. Assoc. 78(381)), each kind of factor of each source of costs apart. A
    factor's likelihood is its posterior with its prior divided out, N(m; x, s^2): 1/s^2 = 1/sd^2 - 1/prior_sd^2 and
    m = s^2 * (mean / sd^2 - prior_mean / prior_sd^2). That takes factors of one run for independent. The deviation tau
    of a kind maximises the sum of log N(m; mu, tau^2 + s^2), to which the shipped figures add the weight of `WEIGHT`
    factors that are known exactly and have the shipped median and deviation. mu is 0, but for kinds that have a
    median: there it is the logarithm of the median, fitted along. A figure of which no factor was learned stays, and so
        does one that is taken as known (deviation 0).

    Args:
        hosts: of each run.
        shipped: the figures that count as `WEIGHT` factors.

    Raises:
        InvalidValue: nothing was learned that a figure could be fitted to.
    """
    found: list[tuple[Section, str]] = []
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
                of = f"{counted(len(sources), 'factor')} of {counted(len({run for run, _ in sources}), 'run')}"
                told = f"fitted to {of}; the shipped {was:g} counts as {WEIGHT} more factors"
                figures[name] = Figure(now, told)
                found.append((section, name))
    if not found:
        raise InvalidValue(
            "factors",
            0,
            "at least one factor that measured steps say something about",
            hint="Name runs that measured more plans.",
        )
    return Priors(sections["estimated"], sections["profiled"]), found


def fit_figures(
    factors: Sequence[LearnedFactor], median: float, deviation: float, weight: float = WEIGHT
) -> tuple[float, float]:
    """The most probable median and deviation of factors of one kind.

    Args:
        factors: the learned factors of each; those that too little was learned of are left out.
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


def main(runs: Sequence[Path], store: str, out: Path) -> None:
    if out.exists():
        raise FileProblem(out, "is there already: name another file for the priors with `--out`.")
    found = [load_learned_host(path) for path in runs]
    if (database := store_path(store)) is not None:
        with MeasurementStore.read(database) as kept:
            found += kept.learned_hosts(least_idle=LEAST_IDLE)
    learned = [host for place, host in enumerate(found) if host not in found[:place]]
    priors, fitted = fit_priors(learned, load_priors())
    save_priors(priors, out)
    for section, name in fitted:
        figure = priors.section(section)[name]
        print(f"{section:10} {name:16} {figure.value:<10g} {figure.source}")
    print(f"{out}: {counted(len(fitted), 'figure')} fitted, the others as they ship")


if __name__ == "__main__":
    given = parse(
        __doc__,
        argument("runs", nargs="*", type=Path),
        argument("--store", default=OFF, help="measurements whose learned hosts count, too"),
        argument("--out", default=Path("priors.json"), type=Path, help="priors.json here by default"),
    )
    with mistakes_in_a_line("fit_priors"):
        main(given.runs, given.store, given.out)
