"""`Reward`: the reward of a step time, by name.

`Scorer`: measures a batch of group placements, equal ones once, and rewards them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue, check_known, refuse_if
from rlplace.measure import Measurement, Measurer, Problem
from rlplace.measure.measurement import Status, StepTimer
from rlplace.records import Positive, record

FloatArray = NDArray[np.float64]


class Reward(Protocol):
    """Turns step times into rewards; larger is better, and every reward is finite."""

    def __call__(self, step_time_s: FloatArray) -> FloatArray:
        """(B,) rewards of (B,) step times; an infinite step time is a placement that failed."""


@record(frozen=True)
class _Reward:
    """A reward of finite step times.

    A placement that fails counts as one that takes `failure_slowdown` times the baseline: finite, so that it can enter
    a mean, and worse than any placement worth keeping.
    """

    baseline_s: Positive
    """Step time to compare with: the best single device's, usually."""
    failure_slowdown: Positive = 10.0

    def _finite(self, step_time_s: FloatArray) -> FloatArray:
        step_time_s = np.asarray(step_time_s, dtype=np.float64)
        return np.where(np.isfinite(step_time_s), step_time_s, self.baseline_s * self.failure_slowdown)


@record(frozen=True)
class SqrtReward(_Reward):
    """-sqrt(step time in seconds), as in Mirhoseini et al. 2017 (section 3.1).

    Example:
        >>> SqrtReward(baseline_s=1.0)(np.array([0.25, np.inf])).round(2).tolist()
        [-0.5, -3.16]
    """

    def __call__(self, step_time_s: FloatArray) -> FloatArray:
        """(B,) `-sqrt(step_time_s)`."""
        return -np.sqrt(self._finite(step_time_s))


@record(frozen=True)
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
        failure_slowdown: a failed placement counts as a step of this many times `baseline_s`.

    Raises:
        UnknownName: no reward has that name.
        InvalidValue: `baseline_s` or `failure_slowdown` is not a finite number above 0.
    """
    check_known("reward", name, REWARD_NAMES)
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
    refuse_if(rewards.shape != step_time_s.shape, "rewards", f"of shape {rewards.shape}", expected, where=where)
    if not np.isfinite(rewards).all():
        row = int(np.flatnonzero(~np.isfinite(rewards))[0])
        raise InvalidValue(
            "rewards",
            f"{rewards[row]} for a step of {step_time_s[row]:.4g} s",
            expected,
            where=where,
            hint="A placement that failed has an infinite step time: give it a low reward that is finite.",
        )
    return rewards


CACHE_ENTRIES = 200_000


@dataclass(frozen=True)
class Scores:
    """Outcomes of B placements of groups.

    Attributes:
        step_time_s: (B,) float64, infinite where the placement failed.
        reward: (B,) float64, finite.
        status: B statuses.
        placements: (B, N) int32, devices of ops.
    """

    step_time_s: NDArray[np.float64]
    reward: NDArray[np.float64]
    status: tuple[Status, ...]
    placements: NDArray[np.int32]


class Scorer:
    """Measures placements of groups in one batched call.

    Equal placements of a batch are measured once. With `deterministic` every outcome is also stored, and an equal
    placement is never measured again. Do not use it for real steps, because their times vary. A placement with a group
    on a forbidden device is not measured: its status is `error`.

    Attributes:
        reference_s: for a measurer that also times a reference placement. Step times are then the ratio to the
            reference, times `reference_s`, so that a drift of the machine does not change rewards. None uses the step
            times unchanged.
    """

    def __init__(
        self, measurer: Measurer, reward: Reward, *, deterministic: bool, reference_s: float | None = None
    ) -> None:
        self.measurer, self.reference_s = measurer, reference_s
        self.reward, self.deterministic = reward, deterministic
        self._known: dict[bytes, tuple[float, Status]] = {}

    @property
    def problem(self) -> Problem:
        """The problem of the measurer."""
        return self.measurer.problem

    def score(self, group_devices: NDArray[np.integer]) -> Scores:
        """Outcomes of `group_devices` (B, G), devices of groups, in order.

        Raises:
            InvalidValue: wrong length, no integers, or a device out of range; a reward that is not finite.
        """
        rows = np.ascontiguousarray(self.problem.check_groups(group_devices))
        is_allowed = self.problem.group_allowed[np.arange(rows.shape[1]), rows]
        return self._score(
            self.problem.grouping.expand(rows), [row.tobytes() for row in rows], np.all(is_allowed, axis=1)
        )

    def score_placements(self, placements: NDArray[np.integer]) -> Scores:
        """Outcomes of `placements` (B, N), devices of ops, in order; not kept, for any measurer."""
        rows = np.ascontiguousarray(placements, dtype=np.int32)
        allowed = self.problem.allowed
        is_allowed = np.ones(rows.shape, dtype=np.bool_) if allowed is None else allowed[np.arange(rows.shape[1]), rows]
        return self._score(rows, [row.tobytes() for row in rows], np.all(is_allowed, axis=1), is_kept=False)

    def _score(
        self, placements: NDArray[np.int32], keys: list[bytes], is_allowed: NDArray[np.bool_], *, is_kept: bool = True
    ) -> Scores:
        outcomes = self._known if self.deterministic and is_kept else {}
        outcomes.update((keys[row], _outcome(np.inf, "error")) for row in np.flatnonzero(~is_allowed).tolist())
        new = {key: row for row, key in reversed(list(enumerate(keys))) if key not in outcomes}
        if new:
            fresh = sorted(new.values())
            outcomes.update(zip((keys[row] for row in fresh), self._measure(placements[fresh]), strict=True))
        found = [outcomes[key] for key in keys]
        while len(self._known) > CACHE_ENTRIES:
            del self._known[next(iter(self._known))]
        step_time_s = np.array([step_time_s for step_time_s, _ in found], dtype=np.float64)
        return Scores(step_time_s, rewards_of(self.reward, step_time_s), tuple(one for _, one in found), placements)

    def _measure(self, placements: NDArray[np.int32]) -> list[tuple[float, Status]]:
        if not isinstance(self.measurer, StepTimer):
            return [_outcome(self._seconds(one), one.status) for one in self.measurer.measure(placements)]
        step_time_s = self.measurer.step_times(placements)
        outcomes = [_outcome(float(seconds), "ok") for seconds in step_time_s]
        if len(failed := np.flatnonzero(~np.isfinite(step_time_s))):
            for row, measurement in zip(failed.tolist(), self.measurer.measure(placements[failed]), strict=True):
                outcomes[row] = _outcome(measurement.step_time_s, measurement.status)
        return outcomes

    def _seconds(self, measurement: Measurement) -> float:
        if self.reference_s is None or not measurement.reference_s:
            return measurement.step_time_s
        return measurement.ratio * self.reference_s


def make_scorer(
    measurer: Measurer,
    reward: str | Reward = "log_speedup",
    *,
    baseline_s: float | None = None,
    deterministic: bool,
) -> Scorer:
    """A `Scorer` whose reward is given by name or as an object.

    Args:
        measurer: measures placements.
        reward: a reward's name, or a reward.
        baseline_s: step time of the baseline for a named reward; by default that of the best single device, measured
            now.
        deterministic: whether the measurer gives a placement the same step time every time.

    Raises:
        UnknownName: no reward has that name.
        InvalidValue: `measurer` measures nothing, or `reward` cannot be called.
    """
    refuse_if(
        not hasattr(measurer, "measure"),
        "measurer",
        type(measurer).__name__,
        "one with `measure`",
        where="environment",
        hint="For the simulator's step times: `Simulator(problem)`.",
    )
    if isinstance(reward, str):
        check_known("reward", reward, REWARD_NAMES)  # before anything is measured
        reward = make_reward(reward, single_device_s(measurer) if baseline_s is None else baseline_s)
    elif not callable(reward):
        raise InvalidValue(
            "reward",
            reward,
            "a name or something that can be called",
            where="environment",
            hint=f"A function from (B,) seconds to (B,) rewards, or one of {', '.join(REWARD_NAMES)}.",
        )
    return Scorer(measurer, reward, deterministic=deterministic)


def single_device_s(measurer: Measurer) -> float:
    """Step time on the best single device; where no device can run it alone, the summed mean costs of all ops.

    Groups that may not be on that device are on the next one where they may be.
    """
    problem = measurer.problem
    everywhere = np.arange(problem.host.num_devices, dtype=np.int32)[:, None]
    groups = problem.nearest_groups(np.repeat(everywhere, problem.grouping.num_groups, axis=1))
    best_s = min(measurement.step_time_s for measurement in measurer.measure(problem.grouping.expand(groups)))
    return best_s if np.isfinite(best_s) else float(problem.costs.op_time_s.mean(axis=1).sum())


def _outcome(step_time_s: float, status: Status) -> tuple[float, Status]:
    return (step_time_s if status == "ok" else float("inf")), status
