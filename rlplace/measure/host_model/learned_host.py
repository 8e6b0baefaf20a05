"""`LearnedHost`: what was learned about a host, as a run keeps it in `host_model.json`."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rlplace.decode import decode_record, described
from rlplace.errors import InvalidValue
from rlplace.files import read_json, refuse_link, write_json_atomic
from rlplace.measure.costs.costs import CostSource
from rlplace.measure.host_model.knowledge import Kind
from rlplace.measure.host_model.posterior import Posterior
from rlplace.measure.host_model.prior import Prior
from rlplace.measure.host_model.scales import median_of
from rlplace.measure.host_model.words import describe

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
