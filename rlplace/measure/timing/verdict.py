"""`SpeedVerdict`: whether a step is faster than others, slower, or not clearly different, by the rounds of a race.

`judge` is the one rule by which a winner is named. `interval` has the statistics, and `disturbance` tells whether the
machine was fit to be measured.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from operator import attrgetter
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rlplace.records import Count, Positive, Seconds, record
from rlplace.say import counted, format_seconds

Outcome = Literal["faster", "slower", "no clear difference", "not known"]
LATEST_S = 253402300799.0
"""The end of the year 9999, the last that a date can have."""
LEVEL, LEVEL_SLOWER = 0.05, 0.01
"""Probability, at most, that a step is called faster though it is not; and that it is called slower."""
LEAST_ROUNDS = 5
"""With fewer, all pairs have the same sign by chance in more than `LEVEL` of cases."""
JUDGING_S = 25.0
"""Seconds of a race that gives a verdict, about."""
LEAST_JUDGED, USUAL_ROUNDS, MOST_ROUNDS = 8, 30, 40
"""Rounds of such a race: at least, however long steps are, mostly, and at most. From `USUAL_ROUNDS` on, it mostly tells
steps apart that differ by 5 % where each scatters by 5 %."""
MOST_PAIRS = 200
"""More pairs are averaged, neighbours first, to so many."""
LEAST_IDLE = 0.75
"""Share of the processor's time that other work must leave: with less, a machine is disturbed."""
MOST_SCATTER = 0.1
"""Half the interquartile range of a quiet machine's steps is at most this share of their median."""


@record(frozen=True)
class Beside:
    """A step that was timed in turn with the one that is judged."""

    name: str
    step_s: Positive
    """Its median."""
    ratio: Positive
    """The judged step over this one: the Hodges-Lehmann estimate of paired rounds."""
    low: Annotated[float, Field(ge=0)] = 0.0
    """Of the 95 % interval of the ratio, and `high` likewise; both are the ratio where step times are exact."""
    high: Annotated[float, Field(ge=0)] | None = None
    """None if there were too few rounds for any."""


@record(frozen=True)
class SpeedVerdict:
    """Whether a step is faster than each of others.

    `print` gives the words that a run ends with.
    """

    outcome: Outcome
    """`faster` than each of them; `slower` than at least one; or neither."""
    step_s: Positive
    """Median of the judged step in that race."""
    beside: tuple[Beside, ...] = ()
    """The others, the one that is hardest to beat first."""
    rounds: Count = 0
    """Rounds of the race; 0 for simulated steps."""
    why: str = ""
    """Why it is not known; on a disturbed machine, the signs of that."""
    time_s: Annotated[Seconds, Field(le=LATEST_S)] = 0.0
    """When it was measured, in seconds since 1970; 0 if unknown."""

    @property
    def is_worth_it(self) -> bool:
        """Whether placing is known to help."""
        return self.outcome == "faster"

    @property
    def date(self) -> str:
        """When it was measured, as in `2026-11-22 14:05 UTC`."""
        return f"{datetime.datetime.fromtimestamp(self.time_s, tz=datetime.UTC):%Y-%m-%d %H:%M} UTC"

    def __str__(self) -> str:
        """The outcome, beside the step that is hardest to beat."""
        if not self.beside or self.outcome == "not known":
            why = self.why or "there is nothing to compare it with"
            return f"not known to be faster, so not worth it until that is known ({why})"
        hardest = self.beside[0]
        is_exact = hardest.low == hardest.high
        between = "" if is_exact else f", 95 % interval {hardest.low:.2f} to {hardest.high or math.inf:.2f}"
        ratio = f"{hardest.ratio:.2f} of {hardest.name}{between}"
        if self.outcome == "faster":
            return f"faster than {', '.join(sorted(each.name for each in self.beside))} ({ratio})"
        to = "slower than" if self.outcome == "slower" else "no clear difference to"
        return f"not worth it, {to} {hardest.name} ({ratio})"

    @property
    def line(self) -> str:
        """The step times and the outcome, in one line."""
        told = [f"{each.name} {format_seconds(each.step_s)}" for each in sorted(self.beside, key=lambda one: one.name)]
        return f"placed {format_seconds(self.step_s)}, {', '.join(told)}: {self}"


def judge(
    ours: Sequence[float],
    others: Mapping[str, Sequence[float]],
    *,
    is_exact: bool = False,
    why: str = "",
    candidates: int = 1,
    time_s: float = 0.0,
) -> SpeedVerdict:
    """The verdict on a step, from the rounds of one race.

    Each other step is compared by the Wilcoxon signed-rank test on the logarithms of paired ratios, so that a drift of
    the machine cancels, and outliers hardly count. `faster` needs a one-sided test at `LEVEL` against each of them, or
    at half of it against a single one. `slower` needs one at `LEVEL_SLOWER`, divided by their number (Bonferroni). Of
    equal steps, fewer than one in twenty gets either word.

    Args:
        ours: seconds of its steps, one a round.
        others: seconds of the other steps, by name, of the same rounds.
        is_exact: whether the times are simulated: then any difference is one, and a single round says all.
        why: signs that the machine was disturbed: then nothing is known.
        candidates: how many steps this one was chosen from, where the same race chose it.
        time_s: when it was measured.
    """
    rounds = min(map(len, (ours, *others.values())))
    level = LEVEL / candidates / (1 if len(others) > 1 else 2)
    beside, are_faster, is_slower = [], [], False
    for name, theirs in others.items():
        logs = np.log(np.maximum(ours[:rounds], TINY_S)) - np.log(np.maximum(theirs[:rounds], TINY_S))
        bounds = partial(interval, logs, is_exact=is_exact)
        low, ratio, high = np.exp(bounds(LEVEL / 2)).tolist()
        are_faster.append(bounds(level)[2] < 0)
        is_slower |= bool(bounds(LEVEL_SLOWER / len(others))[0] > 0)
        beside.append(Beside(name, _median(theirs), ratio, low, high if math.isfinite(high) else None))
    if not (why or is_exact) and rounds < LEAST_ROUNDS:
        why = f"only {counted(rounds, 'round')} of at least {LEAST_ROUNDS} were timed"
    outcome: Outcome = "no clear difference"
    if why or not others:
        outcome = "not known"
    elif all(are_faster):
        outcome = "faster"
    elif is_slower:
        outcome = "slower"
    is_first = attrgetter("low") if outcome == "slower" else lambda each: math.inf if each.high is None else each.high
    hardest = tuple(sorted(beside, key=is_first, reverse=True))
    return SpeedVerdict(outcome, _median(ours), hardest, 0 if is_exact else rounds, why, time_s)


TINY_S = 1e-300
"""Simulated steps without costs take no time, and are as long as one another."""


def _median(samples_s: Sequence[float]) -> float:
    return max(float(np.median(samples_s)), TINY_S)


def interval(logs: NDArray[np.float64], level: float, *, is_exact: bool = False) -> NDArray[np.float64]:
    """(3,) lower bound, estimate and upper bound of the centre of `logs` (R,), R > 0; infinite bounds of too few.

    The bounds belong to the exact Wilcoxon signed-rank test: each is on the wrong side of the centre with probability
    `level` at most. They are order statistics of the means of all pairs, and the estimate is the median of these
    (Hollander & Wolfe, Nonparametric Statistical Methods, section 3.1).
    """
    if len(logs) > MOST_PAIRS:
        logs = np.array([part.mean() for part in np.array_split(logs, MOST_PAIRS)])
    first, second = np.triu_indices(len(logs))
    means = np.sort((logs[first] + logs[second]) / 2)
    if is_exact:
        return np.repeat(np.median(logs), 3)
    beyond = _num_beyond(len(logs), level)
    bounds = (means[beyond - 1], means[-beyond]) if beyond else (-math.inf, math.inf)
    return np.array([bounds[0], np.median(means), bounds[1]])


@lru_cache
def _num_beyond(count: int, level: float) -> int:
    """The most means of pairs that may lie beyond a bound at this level; 0 if there is no bound.

    The distribution of their number is that of a sum of the ranks 1..`count`, each taken with probability 1/2.
    """
    chance = np.zeros(count * (count + 1) // 2 + 1)
    chance[0] = 1.0
    for rank in range(1, count + 1):
        chance[rank:] = (chance[rank:] + chance[: len(chance) - rank]) / 2
        chance[:rank] /= 2
    return int(np.searchsorted(np.cumsum(chance), level, side="right"))


def disturbance(idle: float, samples_s: Sequence[float], name: str) -> str:
    """The signs that a machine was disturbed while it was measured; empty without any.

    Args:
        idle: share of the processor's time that was idle before or after; nan if unknown.
        samples_s: steps of the reference.
        name: of the reference.
    """
    signs = []
    if idle < LEAST_IDLE:
        signs.append(f"other work took {1 - idle:.0%} of the processor's time")
    if len(samples_s) >= LEAST_ROUNDS:
        low, middle, high = np.percentile(samples_s, (25, 50, 75))
        scatter = (high - low) / 2 / middle
        if scatter > MOST_SCATTER:
            signs.append(f"the steps of {name} scatter by ± {scatter:.0%}")
    return f"the machine was disturbed: {' and '.join(signs)}".replace("%", " %") if signs else ""


def judged_rounds(most_s: float, round_s: float) -> int:
    """The rounds of a race that gives a verdict: those for which `JUDGING_S` has room; `USUAL_ROUNDS` if `most_s` has.

    >>> judged_rounds(60.0, 0.5), judged_rounds(60.0, 2.0), judged_rounds(12.0, 1.0), judged_rounds(12.0, 9.0)
    (40, 30, 12, 8)
    """
    shortly, at_most = (int(seconds / max(round_s, 1e-9)) for seconds in (min(most_s, JUDGING_S), most_s))
    return min(max(shortly, min(at_most, USUAL_ROUNDS), LEAST_JUDGED), MOST_ROUNDS)
