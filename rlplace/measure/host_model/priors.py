"""`Priors`: the figures of `Prior` for problems of every source of costs, each with where it comes from.

`Prior`: how far the true figures of a host are from those that a problem was given, before anything is measured.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from rlplace.decode import decode_record, described, shortened
from rlplace.errors import InvalidValue, UnknownName
from rlplace.files import read_json, write_json_atomic
from rlplace.measure.costs.costs import CostSource
from rlplace.measure.problem import Problem


@dataclass(frozen=True)
class Prior:
    """Standard deviations of the natural logarithms of factors; 0.7 is about a factor of 2 either way, 0 is known."""

    op_type: float = 0.5
    """Of the time of an op type on a kind of device."""
    device: float = 0.12
    """Of a device's speed beside others of its kind."""
    bandwidth: float = 0.6
    """Of a link's bandwidth."""
    latency: float = 0.3
    """Of a link's latency."""
    overhead_s: float = 5e-6
    """Median of the seconds that are added to every op on a device: launches that nothing hides."""
    overhead: float = 1.0
    """Of these seconds."""
    dispatch_s: float = 5e-6
    """Median of the seconds that a dispatcher takes to launch an op or a copy, where nothing says what it is."""
    dispatch: float = 0.0
    """Of these seconds."""
    corun: float = 0.05
    """Median of how much a busy device slows another that shares its memory, where nothing says what it is."""
    corun_deviation: float = 0.0
    """Of that slowdown."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidValue(field.name, value, "a finite number >= 0", where="prior")


SCHEMA = 1
SHIPPED = Path(__file__).with_name("priors.json")
"""The file that is used where no other is named."""
Section = Literal["estimated", "profiled"]
SECTIONS: dict[CostSource, Section] = {"estimated": "estimated", "given": "estimated", "profiled": "profiled"}
"""Which figures hold for which source of costs: times that a graph file gives were measured on no host that we know."""
FIGURES = tuple(field.name for field in fields(Prior))
LARGEST_BYTES = 1 << 20


@dataclass(frozen=True)
class Figure:
    """One figure of a `Prior`."""

    value: float
    source: str
    """A line: the paper, the measurements that it was fitted to, or that it is assumed."""

    def __post_init__(self) -> None:
        if not self.source.strip() or "\n" in self.source:
            raise InvalidValue("source", shortened(self.source), "one line that says where the value comes from")


@dataclass(frozen=True)
class Priors:
    """What a priors file holds: every figure of `Prior`, twice."""

    estimated: dict[str, Figure]
    """By name, for costs from data sheets."""
    profiled: dict[str, Figure]
    """By name, for costs and links that were measured on the host."""
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise InvalidValue("schema", self.schema, f"{SCHEMA}", where="priors")
        for section in ("estimated", "profiled"):
            figures = self.section(section)
            for name in figures:
                if name not in FIGURES:
                    raise UnknownName(f"figure of {section} priors", name, FIGURES)
            if missing := [name for name in FIGURES if name not in figures]:
                raise InvalidValue(f"{section}.{missing[0]}", None, "a value and its source", where="priors")
            self.prior(section)

    def section(self, section: Section) -> dict[str, Figure]:
        """The figures of one section by name."""
        return self.estimated if section == "estimated" else self.profiled

    def prior(self, section: Section) -> Prior:
        """The prior of one section."""
        try:
            return Prior(**{name: figure.value for name, figure in self.section(section).items()})
        except InvalidValue as error:
            raise InvalidValue(f"{section}.{error.field}", error.actual, error.expected, where="priors") from error

    def of(self, source: CostSource) -> Prior:
        """The prior of problems whose costs have this source."""
        return self.prior(SECTIONS[source])


def load_priors(path: str | os.PathLike[str] | None = None) -> Priors:
    """The figures of a priors file; reading runs no code.

    Args:
        path: of the file; by default the one that ships.

    Raises:
        FileProblem: the file is missing or no JSON.
        InvalidValue: a figure is missing or out of range, or the file has another schema.
        UnknownName: a figure that a prior does not have.
    """
    path = SHIPPED if path is None else Path(path)
    hint = "Name a file that `rlplace fit-priors` wrote."
    data = read_json(path, largest_bytes=LARGEST_BYTES, hint=hint)
    if not isinstance(data, Mapping) or "schema" not in data:
        raise InvalidValue("priors", described(data), f"a mapping with schema {SCHEMA}", where=str(path), hint=hint)
    return decode_record(Priors, data, str(path))


def save_priors(priors: Priors, path: str | os.PathLike[str]) -> None:
    """Writes a priors file, whole or not at all, such that `load_priors` gives equal ones back.

    Raises:
        FileProblem: the file cannot be written.
    """
    write_json_atomic(path, {"schema": priors.schema, **asdict(priors)})


def prior_of(problem: Problem, path: str | os.PathLike[str] | None = None) -> Prior:
    """How far the host may be from the problem's figures, by where its costs come from.

    Args:
        problem: estimated or profiled.
        path: of a priors file; by default the one that ships.

    Raises:
        FileProblem, InvalidValue, UnknownName: as `load_priors`.
    """
    return load_priors(path).of(problem.costs.source)
