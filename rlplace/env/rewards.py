"""`Reward`: what a step time is worth to the learner, by name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue, UnknownName

FloatArray = NDArray[np.float64]


class Reward(Protocol):
    """Turns step times into rewards; larger is better, and every reward is finite."""

    def __call__(self, step_time_s: FloatArray) -> FloatArray:
        """(B,) rewards of (B,) step times; an infinite step time is a placement that failed."""
        ...


@dataclass(frozen=True)
class _Reward:
    """What both rewards need to know.

    A placement that fails counts as one that takes `failure_slowdown` times the baseline: finite, so that it can enter
    a mean, and worse than any placement worth keeping.
    """

    baseline_s: float
    """Step time to compare with: the best single device's, usually."""
    failure_slowdown: float = 10.0

    def __post_init__(self) -> None:
        for name in ("baseline_s", "failure_slowdown"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InvalidValue(name, value, "a finite number above 0", where="reward")

    def _finite(self, step_time_s: FloatArray) -> FloatArray:
        step_time_s = np.asarray(step_time_s, dtype=np.float64)
        return np.where(np.isfinite(step_time_s), step_time_s, self.baseline_s * self.failure_slowdown)


@dataclass(frozen=True)
class SqrtReward(_Reward):
    """-sqrt(step time in seconds), as in Mirhoseini et al. 2017 (section 3.1).

    Example:
        >>> SqrtReward(baseline_s=1.0)(np.array([0.25, np.inf])).round(2).tolist()
        [-0.5, -3.16]
    """

    def __call__(self, step_time_s: FloatArray) -> FloatArray:
        """(B,) `-sqrt(step_time_s)`."""
        return -np.sqrt(self._finite(step_time_s))


@dataclass(frozen=True)
class LogSpeedupReward(_Reward):
    """-log(step time / baseline): 0 is the baseline, and a halving is worth the same anywhere.

    Example:
        >>> LogSpeedupReward(baseline_s=2.0)(np.array([2.0, 1.0, np.inf])).round(2).tolist()
        [0.0, 0.69, -2.3]
    """

    def __call__(self, step_time_s: FloatArray) -> FloatArray:
        """(B,) `-log(step_time_s / baseline_s)`."""
        return -np.log(self._finite(step_time_s) / self.baseline_s) + 0.0  # no -0.0 at the baseline


_REWARDS: dict[str, type[SqrtReward] | type[LogSpeedupReward]] = {
    "sqrt": SqrtReward,
    "log_speedup": LogSpeedupReward,
}
REWARD_NAMES = tuple(_REWARDS)


def make_reward(name: str, baseline_s: float, failure_slowdown: float = 10.0) -> Reward:
    """The reward called `name`.

    Args:
        name: `sqrt` or `log_speedup`.
        baseline_s: step time of the baseline.
        failure_slowdown: a failed placement counts as one that takes this many times the baseline.

    Raises:
        UnknownName: no reward has that name.
        InvalidValue: `baseline_s` or `failure_slowdown` is not a finite number above 0.
    """
    if name not in _REWARDS:
        raise UnknownName("reward", name, REWARD_NAMES)
    return _REWARDS[name](baseline_s, failure_slowdown)


def rewards_of(reward: Reward, step_time_s: FloatArray) -> FloatArray:
    """(B,) float64 rewards of `step_time_s` (B,), checked: an object of the user's may return anything.

    Raises:
        InvalidValue: `reward` returned something else than (B,) finite numbers.
    """
    given = reward(step_time_s)
    where, expected = f"reward {type(reward).__name__}", f"finite numbers of shape {step_time_s.shape}, one a step time"
    try:
        rewards = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidValue("rewards", given, expected, where=where) from error
    if rewards.shape != step_time_s.shape:
        raise InvalidValue("rewards", f"of shape {rewards.shape}", expected, where=where)
    if not np.isfinite(rewards).all():
        row = int(np.flatnonzero(~np.isfinite(rewards))[0])
        hint = "A placement that failed has an infinite step time: give it a low reward that is finite."
        actual = f"{rewards[row]} for a step of {step_time_s[row]:.4g} s"
        raise InvalidValue("rewards", actual, expected, where=where, hint=hint)
    return rewards
