"""`LearnedHost`: the host model that a run learned, and its file `host_model.json`.

`Posterior` is the distribution of the factors after measuring. `knowledge_of` makes the prior of the next workload on
the same host of what earlier runs learned.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rlplace.errors import InvalidValue
from rlplace.files import read_json, refuse_link, write_json_atomic
from rlplace.measure.costs.costs import CostSource
from rlplace.measure.host_model.scales import (
    LARGEST,
    SECTIONS,
    HostKnowledge,
    Kind,
    Prior,
    Scale,
    Scales,
    SeenRun,
    Tracing,
)
from rlplace.measure.problem import Problem
from rlplace.records import FirstSchema, Number, described, read_record, record
from rlplace.say import counted

SCHEMA: Final = 1
FILE = "host_model.json"
"""Its name in a run folder."""
LARGEST_BYTES = 64 << 20
Log = Annotated[Number, Field(ge=-100, le=100)]
Deviation = Annotated[Number, Field(ge=1e-30, le=100)]
"""Logarithms of factors beyond these are of no host, and their squares would overflow floats."""
DIGITS = 8
"""Of a number of an equation, that are kept."""


@record(frozen=True)
class LearnedFactor:
    """One factor: a normal distribution of its natural logarithm."""

    kind: Kind
    name: str
    """Op type and kind of device, device, or link."""
    log_mean: Log
    log_deviation: Deviation
    """Given all that was measured; that of the factor alone, for any values of the others."""
    prior_deviation: Deviation
    """Before anything was measured, around `prior_mean`."""
    median: Annotated[Number, Field(ge=0, le=math.exp(100))] = 0.0
    """The prior's figure that it is a factor on, in seconds or as a share; 0 where it is on a figure of the problem."""
    prior_mean: Log = 0.0
    """Of the logarithm before anything was measured: 0, unless other workloads had taught something."""


@record(frozen=True)
class Equation:
    """A statement of measured steps on all factors at once, as one linear equation in their logarithms x: the sum of
    `slopes[i] * x[i]` is `target`, with a standard deviation of 1."""

    target: Annotated[float, Field(ge=-1e8, le=1e8)]
    slopes: tuple[Annotated[float, Field(ge=-1e6, le=1e6)], ...]
    """One for each factor, in their order. Ranges are far beyond those of measured steps."""


@record(frozen=True)
class LearnedHost:
    """The content of `host_model.json`."""

    host: str
    host_fingerprint: str
    cost_source: CostSource
    """Of the problem whose figures the factors are on."""
    prior: Prior
    factors: Annotated[tuple[LearnedFactor, ...], Field(max_length=5_000)]
    """Matrices of factors by factors are made of them; 16 devices with a link for each two have fewer than 1,000."""
    lines: tuple[str, ...]
    """Its meaning, in words."""
    schema: FirstSchema = SCHEMA
    equations: Annotated[tuple[Equation, ...], Field(max_length=20_000)] = ()
    """The statement of the measured steps alone, without the prior; empty in files of before there were any."""
    tracing: Tracing | None = None
    """What traced steps cost; None without any."""

    def __post_init__(self) -> None:
        for place, equation in enumerate(self.equations):
            if len(equation.slopes) != len(self.factors):
                raise InvalidValue(
                    f"equations[{place}].slopes",
                    len(equation.slopes),
                    f"{len(self.factors)} numbers, one for each factor",
                )

    @classmethod
    def of(cls, posterior: Posterior, lines: Iterable[str] | None = None) -> LearnedHost:
        """A posterior factor by factor, and the equations that say how factors depend on each other.

        Args:
            posterior: the host model.
            lines: its meaning, in words; as `describe` has it by default.
        """
        scales = posterior.scales
        before = (scales.untraced or scales).items
        learned = zip(before, posterior.mean.tolist(), posterior.deviation.tolist(), strict=True)
        factors = tuple(
            LearnedFactor(item.kind, item.name, mean, deviation, item.deviation, item.median, item.mean)
            for item, mean, deviation in learned
        )
        host, source = scales.problem.host, scales.problem.costs.source
        equations = tuple(
            Equation(_rounded(target), tuple(map(_rounded, slopes)))
            for slopes, target in zip(*(each.tolist() for each in posterior.equations()), strict=True)
        )
        told = tuple(describe(posterior) if lines is None else lines)
        return cls(
            host.name,
            host.fingerprint,
            source,
            scales.prior,
            factors,
            told,
            equations=equations,
            tracing=scales.tracing,
        )


def save_posterior(posterior: Posterior, path: str | os.PathLike[str], lines: Iterable[str] | None = None) -> None:
    """Writes a host model as JSON, whole or not at all.

    Args:
        posterior: the host model.
        path: of the file, or of a run folder.
        lines: its meaning, in words; as `describe` has it by default.

    Raises:
        FileProblem: the file cannot be written.
    """
    learned = LearnedHost.of(posterior, lines)
    write_json_atomic(_file(path), {"schema": learned.schema, **asdict(learned)})


def load_learned_host(path: str | os.PathLike[str]) -> LearnedHost:
    """The host model that `save_posterior` wrote; reading runs no code.

    Args:
        path: of the file, or of a run folder.

    Raises:
        FileProblem: the file is missing or no JSON; in a run folder also if it is a link.
        InvalidValue: a value of the wrong type or range, or another schema.
        UnknownName: a field or a kind of factor that does not exist.
    """
    file = _file(path)
    if file != Path(path):
        refuse_link(file)
    hint = f"Name run folders with a {FILE}: runs of the method `learned` have one."
    data = read_json(file, largest_bytes=LARGEST_BYTES, hint=hint)
    if not isinstance(data, dict) or "factors" not in data:
        raise InvalidValue("host model", described(data), "a mapping with `factors`", where=str(file), hint=hint)
    return read_record(LearnedHost, data, str(file))


def _file(path: str | os.PathLike[str]) -> Path:
    return Path(path, FILE) if os.path.isdir(path) else Path(path)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


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
        """The distribution whose precision, in units of the prior's deviations, is 1 plus that of measurements.

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
        residuals = np.zeros(len(slopes)) if residuals is None else residuals
        return cls(scales, mean, scales.spread(root), loss, slopes, residuals)

    @classmethod
    def prior(cls, scales: Scales) -> Posterior:
        """The distribution before anything is measured."""
        return cls(scales, scales.mean.copy(), scales.spread(np.eye(len(scales))))

    @property
    def deviation(self) -> NDArray[np.float64]:
        """(P,) standard deviations of the logarithms."""
        return np.asarray(np.sqrt((self.root**2).sum(axis=1)))

    @property
    def problem(self) -> Problem:
        """The problem under the most probable factors."""
        return self.scales.apply(self.mean)

    def draw(self, generator: np.random.Generator) -> Problem:
        """The problem under factors drawn from the distribution."""
        return self.scales.apply(self.mean + self.root @ generator.standard_normal(len(self.mean)))

    def equations(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The statement of the measured steps alone, without the prior: slopes (R, P) and targets (R,).

        `slopes @ x` is `targets` at the logarithms x of the factors, each with a standard deviation of 1: the step
        times as they are near the mean, and the traced durations, in at most P equations that say the same as all of
        them. Where the factors explain the step times worse than their noise, the equations say as much less.
        """
        slopes, targets = self.scales.told_by_traces()
        missed = np.ones(len(targets))
        if len(self.slopes):
            of_steps = self.scales.unspread(self.slopes)
            slopes = np.concatenate((slopes, of_steps))
            targets = np.append(targets, of_steps @ self.mean - self.residuals)
            missed = np.append(missed, np.full(len(of_steps), math.sqrt(float(np.mean(self.residuals**2)))))
        if not len(slopes):
            return slopes, targets
        weights = 1.0 / np.maximum(np.maximum(np.abs(slopes).max(axis=1) / STEEPEST, missed), 1.0)
        both = np.column_stack((slopes, targets)) * weights[:, None]
        if len(both) > len(self.mean):
            both = np.linalg.qr(both, mode="r")[: len(self.mean)]
        return both[:, :-1], both[:, -1]


SURE = 1.96
"""Standard deviations of the posterior by which a factor differs from the given figure, to be worth a line."""
LEAST_LEVEL = 0.2
"""Logarithm of how many times as long all of a step takes, to be worth a line."""
MOST = 8
"""Lines, those that are surest first."""


def describe(posterior: Posterior, *, most: int = MOST) -> list[str]:
    """Lines such as `cpu:1 is 4 % slower than given (3 to 5 %)`: factors that differ from the given figures, the surest
    first.

    Figures of all ops in place (co-running, ops whose input comes from elsewhere) take the last of these lines, if
    many ops are surer.

    Args:
        posterior: the host model.
        most: how many of these lines at most; two more say how disturbed the machine is, and what traced steps cost.
    """
    deviation = posterior.deviation
    sureness = np.abs(posterior.mean) / np.maximum(deviation, 1e-12)
    ranked = [place for place in np.argsort(-sureness, kind="stable").tolist() if sureness[place] >= SURE]
    late = [place for place in ranked[most:] if posterior.scales.items[place].kind in ("co-run", "moved")][:most]
    lines = [_line(posterior, place) for place in [*ranked[: max(most - len(late), 0)], *late]]
    if math.log(posterior.scales.level) > LEAST_LEVEL:
        level = _number(posterior.scales.level)
        lines.append(f"a step takes {level} times as long as its ops and transfers say: the machine is disturbed")
    if (tracing := posterior.scales.tracing) is not None:
        share = f"{tracing.share:.1%} of a step" if tracing.share > 0 else "less of a step than its scatter shows"
        cost = f"{tracing.added_s * 1e6:.1f} us an op, {share}"
        lines.append(f"learned in place, from {counted(tracing.num_steps, 'traced step')}; tracing takes {cost}")
    return lines


def _line(posterior: Posterior, place: int) -> str:
    scales, mean, root = posterior.scales, float(posterior.mean[place]), posterior.root[place]
    item = scales.items[place]
    if item.kind == "moved signature":  # a factor on the share of all ops, which is uncertain too
        mean, root = mean + float(posterior.mean[scales.moved_at]), root + posterior.root[scales.moved_at]
    deviation = math.sqrt(float(root @ root))
    low, middle, high = (math.exp(mean + SURE * side * deviation) for side in (-1.0, 0.0, 1.0))
    if item.kind == "device":
        word = "slower" if mean > 0 else "faster"
        ends = sorted(abs(factor - 1.0) * 100 for factor in (low, high))
        return f"{item.name} is {abs(middle - 1.0) * 100:.0f} % {word} than given ({ends[0]:.0f} to {ends[1]:.0f} %)"
    between = f"({_number(low)} to {_number(high)})"
    if item.kind in ("op type", "signature"):
        given = "alone" if scales.problem.costs.source == "profiled" else "given"
        return f"{item.name} takes {_number(middle)} times as long as {given} {between}"
    if item.kind in ("bandwidth", "latency"):
        times = "times" if middle > 1.0 else "of"
        return f"{item.name} has {_number(middle)} {times} the {item.kind} given {between}"
    return _other(scales, item, low, middle, high)


def _other(scales: Scales, item: Scale, low: float, middle: float, high: float) -> str:
    """A figure that is no factor on one of the problem's, in its unit."""
    host, prior = scales.problem.host, scales.prior
    if item.kind in ("moved", "moved signature"):
        low, middle, high = (100 * scales.moved * factor for factor in (low, middle, high))
        longer = f"{middle:.0f} % longer ({low:.0f} to {high:.0f} %)"
        what = "an op" if item.kind == "moved" else item.name
        return f"{what} whose largest input comes from another device takes {longer}"
    if item.kind == "co-run":
        given = max((max(row) for row in host.corun_slowdown), default=0.0) or prior.corun
        ends = f"({low * given * 100:.0f} to {high * given * 100:.0f} %)"
        return f"a busy device slows another that shares its memory by {middle * given * 100:.0f} % {ends}"
    given = prior.overhead_s if item.kind == "overhead" else host.dispatch_s or prior.dispatch_s
    if item.kind == "overhead" and middle * given < LEAST_TOLD_S:
        return f"an op takes no longer than given (at most {high * given * 1e6:.1f} us)"
    what = "an op takes {} longer than given" if item.kind == "overhead" else "a launch takes {}"
    return f"{what.format(f'{middle * given * 1e6:.1f} us')} ({low * given * 1e6:.1f} to {high * given * 1e6:.1f} us)"


LEAST_TOLD_S = 5e-8
"""An overhead of an op below this would read as 0.0 us."""


def _number(factor: float) -> str:
    return f"{factor:.2g}" if factor < 10 else f"{factor:.0f}"


LEAST_LEARNED = 0.5
"""A factor whose variance fell by less than this share of the prior's is left out: divided by so little, an error of
the normal approximation would become a factor of hundreds."""
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


def likelihood(factor: LearnedFactor, least_learned: float = LEAST_LEARNED) -> tuple[float, float] | None:
    """Mean and variance of a factor's logarithm by measured steps alone; None where that is nothing.

    Args:
        factor: the host model.
        least_learned: share of the prior's variance below which it is nothing.
    """
    kept = (factor.log_deviation / factor.prior_deviation) ** 2
    if 1.0 - kept < least_learned:
        return None
    return (factor.log_mean - kept * factor.prior_mean) / (1.0 - kept), factor.log_deviation**2 / (1.0 - kept)


LEAST_CARRIED = 0.1
"""Of a run that kept no equations, a factor whose variance fell by less than this share is left out: hardly anything
was learned of it."""
MOST_RUNS = 32
"""The latest are enough; a host may also change."""


def knowledge_of(learned: Sequence[LearnedHost], source: CostSource) -> HostKnowledge | None:
    """The knowledge of a host's factors from earlier runs; None where they tell nothing.

    A run contributes the statement of its measured steps alone (`LearnedHost.equations`), so that knowledge that it was
    given does not count twice. One that kept no equations tells it factor by factor, its prior divided out.

    Args:
        learned: of runs on one host, the latest first.
        source: of the costs of the next problem; only host models on costs of the same kind say something of it.
    """
    runs = [host for host in learned if SECTIONS[host.cost_source] == SECTIONS[source]][:MOST_RUNS]
    told = tuple(seen for seen in map(_seen, runs) if len(seen.targets))
    return HostKnowledge(told) if told else None


def _seen(run: LearnedHost) -> SeenRun:
    """The information in the measured steps of a run; without its equations, one equation for each factor that the
    steps inform about."""
    rows: list[Any] = [equation.slopes for equation in run.equations]
    targets = [equation.target for equation in run.equations]
    for place, factor in enumerate(() if run.equations else run.factors):
        found = likelihood(factor, LEAST_CARRIED)
        if found is not None and abs(found[0]) <= LARGEST:
            deviation = math.sqrt(found[1])
            rows.append(np.eye(len(run.factors))[place] / deviation)
            targets.append(found[0] / deviation)
    # the factors as far as they may be from 1 on a host that is not known
    factors = tuple(
        Scale(
            factor.kind,
            factor.name,
            (factor.kind in FIGURES_OF and getattr(run.prior, FIGURES_OF[factor.kind][0])) or factor.prior_deviation,
            factor.median,
        )
        for factor in run.factors
    )
    return SeenRun(factors, np.array(rows).reshape(len(rows), len(factors)), np.array(targets))
