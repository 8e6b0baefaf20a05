"""`LearnedHost`: what was learned about a host, as a run keeps it in `host_model.json`.

`Posterior`: what a host's factors are after measuring, and how sure that is.

`describe`: what measured steps taught about a host, in words.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlplace.decode import decode_record, described
from rlplace.errors import InvalidValue
from rlplace.files import read_json, refuse_link, write_json_atomic
from rlplace.measure.costs.costs import CostSource
from rlplace.measure.host_model.knowledge import Kind
from rlplace.measure.host_model.priors import Prior
from rlplace.measure.host_model.scales import Scale, Scales, median_of
from rlplace.measure.problem import Problem

SCHEMA = 1
FILE = "host_model.json"
"""Its name in a run folder."""
LARGEST_BYTES = 64 << 20
LARGEST_LOG, LEAST_DEVIATION = 100.0, 1e-30
"""Logarithms of factors beyond these are of no host, and their squares would leave what floats hold."""
DIGITS = 8
"""Of a number of an equation, that are kept."""
LARGEST_SLOPE, LARGEST_TARGET = 1e6, 1e8
"""Of an equation that is read: far beyond what measured steps give."""


MOST_FACTORS, MOST_EQUATIONS = 5_000, 20_000
"""Matrices of factors by factors are made of them; 16 devices with a link for each two have fewer than 1,000."""


@dataclass(frozen=True)
class LearnedFactor:
    """One factor: a normal distribution of its natural logarithm."""

    kind: Kind
    name: str
    """Op type and kind of device, device, or link."""
    log_mean: float
    log_deviation: float
    """Given all that was measured; that of the factor alone, whatever the others are."""
    prior_deviation: float
    """Before anything was measured, around `prior_mean`."""
    median: float = 0.0
    """The prior's figure that it is a factor on, in seconds or as a share; 0 where it is on a figure of the problem."""
    prior_mean: float = 0.0
    """Of the logarithm before anything was measured: 0, unless other workloads had taught something."""

    def __post_init__(self) -> None:
        for name in ("log_deviation", "prior_deviation"):
            if not LEAST_DEVIATION <= getattr(self, name) <= LARGEST_LOG:
                expected = f"a finite number > 0, at most {LARGEST_LOG:g}"
                raise InvalidValue(name, getattr(self, name), expected, where="factor")
        for name in ("log_mean", "prior_mean"):
            if not abs(getattr(self, name)) <= LARGEST_LOG:
                raise InvalidValue(name, getattr(self, name), f"at most {LARGEST_LOG:g} from 0", where="factor")
        if not 0 <= self.median <= math.exp(LARGEST_LOG):
            raise InvalidValue("median", self.median, "a finite number >= 0", where="factor")


@dataclass(frozen=True)
class Equation:
    """What measured steps say of all factors at once, as one linear equation in their logarithms x: the sum of
    `slopes[i] * x[i]` is `target`, with a standard deviation of 1."""

    target: float
    slopes: tuple[float, ...]
    """One for each factor, in their order."""

    def __post_init__(self) -> None:
        numbers = (("target", (self.target,), LARGEST_TARGET), ("slopes", self.slopes, LARGEST_SLOPE))
        for name, values, largest in numbers:
            for value in values:
                if not abs(value) <= largest:
                    raise InvalidValue(name, value, f"numbers from -{largest:g} to {largest:g}", where="equation")


@dataclass(frozen=True)
class LearnedHost:
    """What `host_model.json` holds."""

    host: str
    host_fingerprint: str
    cost_source: CostSource
    """Of the problem whose figures the factors are on."""
    prior: Prior
    factors: tuple[LearnedFactor, ...]
    lines: tuple[str, ...]
    """What it means, in words."""
    schema: int = SCHEMA
    equations: tuple[Equation, ...] = ()
    """What the measured steps alone say, the prior aside; empty in files of before there were any."""

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise InvalidValue("schema", self.schema, f"{SCHEMA}", where="host model")
        for name, most in (("factors", MOST_FACTORS), ("equations", MOST_EQUATIONS)):
            if (count := len(getattr(self, name))) > most:
                raise InvalidValue(name, count, f"at most {most:,} of them", where="host model")
        for place, equation in enumerate(self.equations):
            if len(equation.slopes) != len(self.factors):
                expected = f"{len(self.factors)} numbers, one for each factor"
                raise InvalidValue(f"equations[{place}].slopes", len(equation.slopes), expected, where="host model")

    @classmethod
    def of(cls, posterior: Posterior) -> LearnedHost:
        """What a posterior says, factor by factor, and the equations that say how factors depend on each other."""
        scales = posterior.scales
        factors = tuple(
            LearnedFactor(
                item.kind,
                item.name,
                mean,
                deviation,
                item.deviation,
                median_of(scales.problem.host, scales.prior, item.kind),
                item.mean,
            )
            for item, mean, deviation in zip(
                scales.items, posterior.mean.tolist(), posterior.deviation.tolist(), strict=True
            )
        )
        host, source = scales.problem.host, scales.problem.costs.source
        equations = tuple(
            Equation(_rounded(target), tuple(map(_rounded, slopes)))
            for slopes, target in zip(*(each.tolist() for each in posterior.equations()), strict=True)
        )
        return cls(
            host.name, host.fingerprint, source, scales.prior, factors, tuple(describe(posterior)), equations=equations
        )


def save_posterior(posterior: Posterior, path: str | os.PathLike[str]) -> None:
    """Writes what was learned about a host as JSON, whole or not at all.

    Args:
        posterior: what was learned.
        path: of the file, or of a run folder.

    Raises:
        FileProblem: the file cannot be written.
    """
    learned = LearnedHost.of(posterior)
    write_json_atomic(_file(path), {"schema": learned.schema, **asdict(learned)})


def load_learned_host(path: str | os.PathLike[str]) -> LearnedHost:
    """What `save_posterior` wrote; reading runs no code.

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
    if not isinstance(data, Mapping) or "schema" not in data:
        expected = f"a mapping with schema {SCHEMA}"
        raise InvalidValue("host model", described(data), expected, where=str(file), hint=hint)
    return decode_record(LearnedHost, data, str(file))


def _file(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    return path / FILE if os.path.isdir(path) else path


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


SURE = 1.96
"""Standard deviations of the posterior by which a factor differs from what was given, to be worth a line."""
MOST = 8
"""Lines, those that are surest first."""


def describe(posterior: Posterior, *, most: int = MOST) -> list[str]:
    """Lines such as `cpu:1 is 4 % slower than given (3 to 5 %)`: what differs from what was given, the surest first.

    Args:
        posterior: what was learned.
        most: how many lines at most.
    """
    deviation = posterior.deviation
    sureness = np.abs(posterior.mean) / np.maximum(deviation, 1e-12)
    ranked = [place for place in np.argsort(-sureness, kind="stable").tolist() if sureness[place] >= SURE]
    scales = posterior.scales
    return [_line(scales, place, float(posterior.mean[place]), float(deviation[place])) for place in ranked[:most]]


def _line(scales: Scales, place: int, mean: float, deviation: float) -> str:
    item = scales.items[place]
    low, middle, high = (math.exp(mean + SURE * side * deviation) for side in (-1.0, 0.0, 1.0))
    if item.kind == "device":
        word = "slower" if mean > 0 else "faster"
        ends = sorted(abs(factor - 1.0) * 100 for factor in (low, high))
        return f"{item.name} is {abs(middle - 1.0) * 100:.0f} % {word} than given ({ends[0]:.0f} to {ends[1]:.0f} %)"
    between = f"({_number(low)} to {_number(high)})"
    if item.kind == "op type":
        return f"{item.name} takes {_number(middle)} times as long as given {between}"
    if item.kind in ("bandwidth", "latency"):
        times = "times" if middle > 1.0 else "of"
        return f"{item.name} has {_number(middle)} {times} the {item.kind} given {between}"
    return _other(scales, item, low, middle, high)


def _other(scales: Scales, item: Scale, low: float, middle: float, high: float) -> str:
    """What is no factor on a figure of the problem's, in its unit."""
    host, prior = scales.problem.host, scales.prior
    if item.kind == "co-run":
        given = max((max(row) for row in host.corun_slowdown), default=0.0) or prior.corun
        ends = f"({low * given * 100:.0f} to {high * given * 100:.0f} %)"
        return f"a busy device slows another that shares its memory by {middle * given * 100:.0f} % {ends}"
    given = prior.overhead_s if item.kind == "overhead" else host.dispatch_s or prior.dispatch_s
    what = "an op takes {} longer than given" if item.kind == "overhead" else "a launch takes {}"
    return f"{what.format(f'{middle * given * 1e6:.1f} us')} ({low * given * 1e6:.1f} to {high * given * 1e6:.1f} us)"


def _number(factor: float) -> str:
    return f"{factor:.2g}" if factor < 10 else f"{factor:.0f}"
