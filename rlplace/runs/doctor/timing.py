"""Checks of time: the clock that steps are measured with, and whether the same work takes the same time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles

from rlplace.report.format import format_seconds
from rlplace.runs.doctor.check import Finding
from rlplace.runs.doctor.system import System

SLOWEST_CALL_S = 1e-6
NUM_CALLS = 2000
WIDEST_SPREAD = 0.15
MOST_LOST = 0.1


@dataclass(frozen=True, slots=True)
class Steadiness:
    """How much times of the same work differ."""

    median_s: float
    spread: float
    """between the 10th and the 90th percentile, as a share of the median"""
    lost: float
    """share of all time beyond a median for each sample: what interruptions took"""

    @property
    def is_steady(self) -> bool:
        """Whether figures measured now would be worth much."""
        return self.spread <= WIDEST_SPREAD and self.lost <= MOST_LOST


def steadiness(times_s: Sequence[float]) -> Steadiness:
    """How steady these times are.

    Args:
        times_s: two or more, of the same work.

    >>> steadiness([1.0, 1.0, 1.0, 5.0]).lost
    0.5
    """
    middle_s, deciles_s = median(times_s), quantiles(times_s, n=10, method="inclusive")
    lost = 1 - middle_s * len(times_s) / sum(times_s)
    return Steadiness(middle_s, (deciles_s[-1] - deciles_s[0]) / middle_s, max(lost, 0.0))


def check_clock(system: System) -> Iterator[Finding]:
    """How fine the clock is: what reading it costs, and its smallest step."""
    readings_s = [system.now_s() for _ in range(NUM_CALLS)]
    call_s = (readings_s[-1] - readings_s[0]) / (NUM_CALLS - 1)
    steps_s = [after_s - before_s for before_s, after_s in pairwise(readings_s) if after_s > before_s]
    source = system.read("sys/devices/system/clocksource/clocksource0/current_clocksource")
    found = f"a reading takes {format_seconds(call_s)}"
    if steps_s:
        found = f"steps of {format_seconds(min(steps_s))}, {found}"
    if source:
        found += f", source {source}"
    if not steps_s or max(call_s, min(steps_s)) > SLOWEST_CALL_S:
        remedy = "short ops cannot be timed well: on Linux, see whether the clock source tsc is available"
        yield Finding("clock", "warn", found, remedy)
    else:
        yield Finding("clock", "ok", found)


def check_timing(system: System) -> Iterator[Finding]:
    """Whether the same small work takes the same time again and again."""
    steady = steadiness(system.op_times_s(system.import_torch()))
    found = (
        f"the same work takes {format_seconds(steady.median_s)}, 80 % of times within {steady.spread:.0%}; "
        f"{steady.lost:.0%} of the time was lost to interruptions"
    )
    if steady.is_steady:
        yield Finding("timing", "ok", found)
    else:
        yield Finding("timing", "warn", found, "end other work, and keep the CPU's frequency fixed, before measuring")
