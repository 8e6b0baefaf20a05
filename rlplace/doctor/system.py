"""`System`: everything that checks touch, one small function each, so that tests can stand in for a machine.

`Check`: one question about the system; `Finding`: the answer; `run_checks`: all answers, also where a check fails.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from timeit import Timer
from typing import Any, Literal

from rlplace.measure.hosts.control_groups import small_file
from rlplace.measure.timing.threads import usable_cores

Verdict = Literal["ok", "warn", "fail"]
VERDICTS: tuple[Verdict, ...] = ("ok", "warn", "fail")
"""From best to worst."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    """The subject of the check."""
    verdict: Verdict
    """`ok`; `warn`, figures may be worse than they need be; `fail`, something will not work."""
    found: str
    """One line."""
    remedy: str = ""
    """The recommended action; empty if there is none."""


def first_of(name: str, found: str, *problems: tuple[bool, Verdict, str]) -> Finding:
    """The finding of the first problem that is there, `ok` where none is.

    Args:
        name: the subject of the check.
        found: in one line.
        problems: for each problem, whether it is there, its verdict, and the recommended action.

    >>> first_of("load", "2.00 on 4 cores", (2.0 > 3.0, "warn", "wait")).verdict
    'ok'
    """
    for is_there, verdict, remedy in problems:
        if is_there:
            return Finding(name, verdict, found, remedy)
    return Finding(name, "ok", found)


@dataclass(frozen=True, slots=True)
class Check:
    """One question about the system."""

    name: str
    """That of its finding, where it has only one."""
    look: Callable[[System], Finding | Iterable[Finding]]
    """Answers the question."""
    needs: str = ""
    """The check that must not have failed before this one."""


def run_checks(system: System, checks: Sequence[Check]) -> list[Finding]:
    """The results of all checks, in their order; a check that fails itself is a `fail` with its error."""
    findings: list[Finding] = []
    for check in checks:
        if check.needs in {finding.name for finding in findings if finding.verdict == "fail"}:
            findings.append(Finding(check.name, "warn", f"not looked at: the check of {check.needs} failed"))
            continue
        try:
            answer = check.look(system)
            findings += [answer] if isinstance(answer, Finding) else answer
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


NUM_ELEMENTS = 32768
"""As many as PyTorch leaves to one thread: more would be shared among several threads, at any setting of their
number."""
OPS_PER_SAMPLE = 32
TIMED_S = 0.33
WARM_UP = 0.1
"""Share of the samples, the first, that do not count."""


def op_times_s(torch: Any) -> list[float]:
    """Seconds of each sample, a fixed number of products of small tensors; about 0.3 s in all."""
    left, right, product = (torch.ones(NUM_ELEMENTS) for _ in range(3))
    timer = Timer(lambda: torch.mul(left, right, out=product))
    times_s, end_s = list[float](), time.perf_counter() + TIMED_S
    while time.perf_counter() < end_s:
        times_s.append(timer.timeit(OPS_PER_SAMPLE))
    return times_s[int(len(times_s) * WARM_UP) :]


@dataclass(frozen=True, slots=True)
class System:
    """The machine and the installation, as this process sees them."""

    root: Path = Path("/")
    """Folder above `proc` and `sys`."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    """Environment variables."""
    current_folder: Callable[[], str] = os.getcwd
    """Raises OSError where it has been removed."""
    usable_cores: Callable[[], Sequence[int]] = usable_cores
    """Logical cores that this process may run on."""
    num_cores: Callable[[], int | None] = os.cpu_count
    """Logical cores of the machine."""
    distribution: Callable[[str], importlib.metadata.Distribution] = importlib.metadata.distribution
    """The metadata of an installed package; raises PackageNotFoundError."""
    import_torch: Callable[[], Any] = lambda: importlib.import_module("torch")
    """PyTorch, imported at the first call."""
    op_times_s: Callable[[Any], Sequence[float]] = op_times_s
    """Times of one small op of that torch, again and again."""

    def read(self, path: str) -> str:
        """A small file of the system, stripped; empty where there is none or it cannot be read."""
        return small_file(self.root / path)

    def installed(self, package: str) -> importlib.metadata.Distribution | None:
        """The metadata of a package; None where it is not installed."""
        try:
            return self.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            return None
