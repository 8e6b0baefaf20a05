"""`SpeedVerdict`: whether a step is faster than others, slower, or not clearly different, by the rounds of a race.

`judge` is the one rule by which a winner is named. `interval` has the statistics, and `disturbance` tells whether the
machine was fit to be measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rlplace.measure.hosts.host import Printable
from rlplace.records import Count, Positive, Seconds, record
from rlplace.say import counted, format_seconds

Outcome = Literal["faster", "slower", "no clear difference", "not known"]
LEVEL, LEVEL_SLOWER = 0.05, 0.01
"""Probability, at most, that a step is called faster though it is not; and that it is called slower."""
LEAST_ROUNDS, MOST_PAIRS = 5, 100
"""With fewer rounds, all pairs have the same sign by chance in more than `LEVEL` of cases; more pairs do not count."""
JUDGING_S = 25.0
"""Seconds of a race that gives a verdict, about."""
LEAST_JUDGED, USUAL_ROUNDS, MOST_ROUNDS = 6, 30, 40
"""Rounds of such a race: at least, however long steps are, mostly, and at most. From `USUAL_ROUNDS` on, it mostly tells
steps apart that differ by 5 % where each scatters by 5 %."""
LEAST_IDLE, MOST_SCATTER = 0.75, 0.1
"""Share of the processor's time that is idle on a quiet machine, at least; and half the interquartile range of steps
there over their median, at most."""
TINY_S, LARGE = 1e-300, 1e300
"""Simulated steps without costs take no time, and are as long as one another; an interval without end ends there."""


@record(frozen=True)
class Beside:
    """A step that was timed in turn with the one that is judged."""

    name: Printable
    step_s: Positive
    """Its median."""
    ratio: Positive
    """The judged step over this one: the Hodges-Lehmann estimate of paired rounds."""
    low: Seconds
    """Of the 95 % interval of the ratio, and `high` likewise; both are the ratio where step times are exact."""
    high: Seconds


@record(frozen=True)
class SpeedVerdict:
    """Whether a step is faster than each of others."""

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
    time_s: Annotated[Seconds, Field(lt=253402300800)] = 0.0
    """When it was measured, in seconds since 1970, before the year 10000; 0 if unknown."""
    name: str = "placed"
    """Of the judged step."""

    @property
    def is_worth_it(self) -> bool:
        """Whether placing is known to help."""
        return self.outcome == "faster"

    def __str__(self) -> str:
        """The line that a run ends with: all step times, and the outcome beside the step that is hardest to beat."""
        names = sorted(self.beside, key=lambda each: each.name)
        told = ", ".join(f"{name} {format_seconds(step_s)}" for name, step_s in (
            (self.name, self.step_s), *((each.name, each.step_s) for each in names)
        ))  # fmt: skip
        if self.outcome == "not known":
            return f"{told}: not known to be faster, so not worth it until that is known ({self.why})"
        first = self.beside[0]
        between = f", 95 % interval {first.low:.2f} to {first.high:.2f}"
        ratio = f"{first.ratio:.2f} of {first.name}{between if self.rounds else ''}"
        if self.is_worth_it:
            return f"{told}: faster than {'all of these' if names[1:] else first.name} ({ratio})"
        how = "slower than" if self.outcome == "slower" else "no clear difference to"
        return f"{told}: not worth it, {how} {first.name} ({ratio})"


def judge(
    ours: Sequence[float],
    others: Mapping[str, Sequence[float]],
    *,
    is_exact: bool = False,
    why: str = "",
    candidates: int = 1,
    time_s: float = 0.0,
    name: str = "placed",
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
        name: of the judged step, for people.
    """
    rounds = min(MOST_PAIRS, *map(len, (ours, *others.values())))
    level = LEVEL / candidates / (1 if len(others) > 1 else 2)
    beside, is_faster, is_slower = [], True, False
    for other, theirs in others.items():
        mine, beat = (np.log(np.maximum(each[:rounds], TINY_S)) for each in (ours, theirs))
        levels = LEVEL / 2, level, LEVEL_SLOWER / len(others)
        between, above, below = (interval(mine - beat, each, is_exact=is_exact) for each in levels)
        is_faster &= bool(above[2] < 0)
        is_slower |= bool(below[0] > 0)
        low, ratio, high = np.minimum(np.exp(between), LARGE).tolist()
        beside.append(Beside(other, max(float(np.median(theirs)), TINY_S), ratio, low, high))
    if not others:
        why = why or "there is nothing to compare it with"
    elif rounds < LEAST_ROUNDS and not is_exact:
        why = why or f"only {counted(rounds, 'round')} of at least {LEAST_ROUNDS} were timed"
    known: Outcome = "faster" if is_faster else "slower" if is_slower else "no clear difference"
    hardest = tuple(sorted(beside, key=lambda each: each.low if known == "slower" else each.high, reverse=True))
    step_s = max(float(np.median(ours)), TINY_S)
    return SpeedVerdict("not known" if why else known, step_s, hardest, 0 if is_exact else rounds, why, time_s, name)


def interval(logs: NDArray[np.float64], level: float, *, is_exact: bool = False) -> NDArray[np.float64]:
    """(3,) lower bound, estimate and upper bound of the centre of `logs` (R,), R > 0; infinite bounds of too few.

    The bounds belong to the exact Wilcoxon signed-rank test: each is on the wrong side of the centre with probability
    `level` at most. They are order statistics of the means of all pairs, and the estimate is the median of these
    (Hollander & Wolfe, Nonparametric Statistical Methods, section 3.1). A value that is exact is all three.
    """
    first, second = np.triu_indices(len(logs))
    means = np.sort((logs[first] + logs[second]) / 2)
    beyond = 1 if is_exact else _num_beyond(len(logs), level)
    low, high = (means[beyond - 1], means[-beyond]) if beyond else (-np.inf, np.inf)
    return np.array([low, np.median(means), high])


@lru_cache
def _num_beyond(count: int, level: float) -> int:
    """The most means of pairs that may lie beyond a bound at this level; 0 if there is no bound.

    The distribution of their number is that of a sum of the ranks 1..`count`, each taken with probability 1/2.
    """
    chance = np.ones(1)
    for rank in range(1, count + 1):
        chance = np.convolve(chance, [0.5, *[0.0] * (rank - 1), 0.5])
    return int(np.searchsorted(np.cumsum(chance), level, side="right"))


def disturbance(idle: float, scatter: float, name: str) -> str:
    """The signs that a machine was disturbed while it was measured; empty without any.

    Args:
        idle: share of the processor's time that was idle before or after; nan if unknown.
        scatter: half the interquartile range of the reference's steps over their median.
        name: of the reference.
    """
    load = [f"other work took {1 - idle:.0%} of the processor's time"] * (idle < LEAST_IDLE)
    signs = load + [f"the steps of {name} scatter by ± {scatter:.0%}"] * (scatter > MOST_SCATTER)
    return f"the machine was disturbed: {' and '.join(signs)}".replace("%", " %") if signs else ""


def judged_rounds(most_s: float, round_s: float) -> int:
    """The rounds of a race that gives a verdict: those for which `JUDGING_S` has room; `USUAL_ROUNDS` if `most_s` has.

    >>> judged_rounds(60.0, 0.5), judged_rounds(60.0, 2.0), judged_rounds(12.0, 1.0), judged_rounds(12.0, 9.0)
    (40, 30, 12, 6)
    """
    shortly, at_most = (int(seconds / max(round_s, 1e-9)) for seconds in (min(most_s, JUDGING_S), most_s))
    return min(max(shortly, min(at_most, USUAL_ROUNDS), LEAST_JUDGED), MOST_ROUNDS)
