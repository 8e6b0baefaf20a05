"""`Check`: one question about the system; `Finding`: the answer; `run_checks`: all answers, whatever fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rlplace.runs.doctor.system import System

Verdict = Literal["ok", "warn", "fail"]
VERDICTS: tuple[Verdict, ...] = ("ok", "warn", "fail")
"""From best to worst."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    name: str
    """what was looked at"""
    verdict: Verdict
    """`ok`; `warn`, figures may be worse than they need be; `fail`, something will not work"""
    found: str
    """in one line"""
    remedy: str = ""
    """what to do about it; empty where there is nothing to do"""


@dataclass(frozen=True, slots=True)
class Check:
    """One question about the system."""

    name: str
    """that of its finding, where it has only one"""
    look: Callable[[System], Iterable[Finding]]
    """answers the question"""
    needs: str = ""
    """the check that must not have failed before this one"""


def run_checks(system: System, checks: Sequence[Check]) -> list[Finding]:
    """What all checks found, in their order; a check that fails itself is a `fail` with its error."""
    findings: list[Finding] = []
    for check in checks:
        if check.needs in {finding.name for finding in findings if finding.verdict == "fail"}:
            findings.append(Finding(check.name, "warn", f"not looked at: the check of {check.needs} failed"))
            continue
        try:
            findings.extend(check.look(system))
        except Exception as error:
            found = f"the check failed: {type(error).__name__}: {' '.join(str(error).split())}"
            findings.append(Finding(check.name, "fail", found, "mend what the error names, or report it as a bug"))
    return findings


def worst(findings: Iterable[Finding]) -> Verdict:
    """The worst verdict of all; `ok` where there is none.

    >>> worst([Finding("a", "ok", ""), Finding("b", "warn", "")])
    'warn'
    """
    return max((finding.verdict for finding in findings), key=VERDICTS.index, default="ok")
