"""What this package requires, from the metadata of its installation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError

from rlplace.runs.doctor.system import System

PACKAGE = "rlplace"

_REQUIREMENT = re.compile(
    r"(?P<package>[\w.-]+)\s*(?:>=\s*(?P<least>[\d.]+))?\s*(?:;\s*extra\s*==\s*['\"](?P<extra>\w+))?"
)


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package that is needed, always or for one extra."""

    package: str
    least: str = ""
    """lowest version that will do; empty: any"""
    extra: str = ""
    """the extra that it belongs to; empty: always needed"""

    @property
    def words(self) -> str:
        """As pip takes it."""
        return f"{self.package}>={self.least}" if self.least else self.package

    def is_met_by(self, version: str) -> bool:
        """Whether that version will do.

        >>> Requirement("torch", "2.9").is_met_by("2.10.0+cu128")
        True
        """
        return not self.least or release(version) >= release(self.least)


def parse_requirement(text: str) -> Requirement:
    """A line of `Requires-Dist`; of its versions only a lowest one is read, as all of ours are.

    >>> parse_requirement("onnx>=1.16; extra == 'onnx'")
    Requirement(package='onnx', least='1.16', extra='onnx')
    """
    match = _REQUIREMENT.match(text)
    if match is None:
        raise ValueError(f"{text!r} is no requirement")
    return Requirement(match["package"], match["least"] or "", match["extra"] or "")


def release(version: str) -> tuple[int, ...]:
    """The numbers that a version starts with, zeros at the end left out.

    >>> release("2.13.0+cpu")
    (2, 13)
    """
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(number) for number in match[0].split(".")] if match else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def requirements(system: System) -> list[Requirement]:
    """All requirements of the installed package; none where it is not installed."""
    try:
        lines = system.distribution(PACKAGE).requires or []
    except PackageNotFoundError:
        return []
    return [parse_requirement(line) for line in lines]


def requirement_of(system: System, package: str) -> Requirement:
    """The requirement of one package; any version where none is known."""
    known = (each for each in requirements(system) if each.package == package)
    return next(known, Requirement(package))
