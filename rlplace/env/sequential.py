"""`SequentialEnv`: an action places one group; the episode is over when all are placed. `SequentialVecEnv`: B in step.

Importing this module registers `rlplace/Sequential-v0`, which simulates, and `rlplace/SequentialMeasured-v0`, for a
host that runs the placements. `gymnasium.make("rlplace.env:rlplace/Sequential-v0", ...)` imports it first. `Shaping`
makes the rewards of the steps, which are differences of a potential.

`SequentialBatch`: many episodes in step, each of which places one group after the other; arrays in, arrays out.
`ListSchedules`: list schedules from weights over named groupings, as actions of a policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlplace.env.placement_env import (
    NUM_GROUPS,
    BatchedVecEnv,
    Indices,
    Observation,
    PlacementEnv,
    SharedMeasurer,
    check_actions,
    find_measurer,
)
from rlplace.env.rewards import Reward, rewards_of
from rlplace.errors import InvalidValue, check_known, refuse_if
from rlplace.graphs import Grouping
from rlplace.measure import Host, Measurer, Problem
from rlplace.search.improve.starting_points import FIRST_WEIGHTS, GROUPINGS, Pair, Schedulers, varied
from rlplace.search.schedule.partial_schedule import (
    DECISION_FEATURES,
    ESTIMATES,
    FEATURES,
    GroupLayout,
    clear,
    decide,
    estimates,
    group_layout,
    new_schedules,
    next_groups,
    observe,
    schedule_bounds,
)

__all__ = [
    "DECISION_FEATURES",
    "ESTIMATES",
    "FEATURES",
    "FIRST_WEIGHTS",
    "GROUPINGS",
    "ListSchedules",
    "Pair",
    "SequentialBatch",
    "SequentialEnv",
    "SequentialObservation",
    "SequentialVecEnv",
    "varied",
]
LongArray = NDArray[np.int64]


class SequentialEnv(PlacementEnv[np.int64]):
    """Places one group per step on one of D devices, with the schedule of the groups placed so far.

    | space | |
    |---|---|
    | action | `Discrete(D)`: the device of the next group; with `choose_group` `Discrete(G * D)`: group * D + device |
    | observation | `Dict`: `group`, the group that is next, and `features` of each device for it |
    | reward | differences of a potential, which add up to the reward of `OneShotEnv` for the same placement |

    Groups come in the order of their first ops, or by `order`. A group that is chosen earlier waits in the schedule.
    The info of the last step is that of a step of `OneShotEnv`. The info of other steps is empty.

    `action_masks` has the devices that pins and memory allow for a group. A forbidden action does not end the episode.
    At the end the placement is measured as in `OneShotEnv`, where a broken pin fails. If a group is chosen twice, the
    episode ends at once with the reward of a failure.
    """

    observation_space: spaces.Dict
    action_space: spaces.Discrete

    def __init__(
        self,
        measurer: Measurer | SharedMeasurer | None = None,
        reward: str | Reward = "log_speedup",
        baseline_s: float | None = None,
        deterministic: bool = True,
        potential: str = "bound",
        choose_group: bool = False,
        order: NDArray[np.floating] | None = None,
        memory_mask: str = "resident",
        render_mode: str | None = None,
        *,
        problem: Problem | None = None,
        workload: str | None = None,
        host: str | Host = "auto",
        num_groups: int = NUM_GROUPS,
        workload_seed: int = 0,
    ) -> None:
        """An env over the problem of `measurer`, over `problem`, or over `workload` on `host`.

        Args:
            measurer: measures placements. By default they are simulated or, if not `deterministic`, run on the
                problem's host.
            reward: `sqrt`, `log_speedup` or a reward object.
            baseline_s: step time of the baseline for a named reward; by default that of the best single device,
                measured now.
            deterministic: whether the measurer gives a placement the same step time every time.
            potential: one of `POTENTIALS`; with `none` all rewards but the last are 0.
            choose_group: whether an action also chooses the group.
            order: (G,) priorities of groups, higher first; the order of their first ops by default.
            memory_mask: one of `MEMORY_MASKS`: the memory of a group that has to fit on a device.
            render_mode: `human`, `rgb_array` or `ansi`; None draws nothing.
            problem: the problem to place, instead of `measurer`.
            workload: a WORKLOAD word (`nmt@small`), instead of either.
            host: a HOST word (`4xV100-pcie`) or a host, for a workload.
            num_groups: groups to aim at, for a workload.
            workload_seed: of a workload's weights and inputs.

        Raises:
            UnknownName: no reward, potential, mask or render mode has that name.
            InvalidValue: not exactly one of `measurer`, `problem` and `workload`, or not one finite number a group in
                `order`.
            UserError: no such workload or host.
        """
        found = find_measurer(measurer, problem, workload, host, num_groups, workload_seed, runs=not deterministic)
        super().__init__(found, reward, baseline_s, deterministic, render_mode)
        self._shaping = Shaping(potential, self.scorer.reward, 1)
        self._batch = SequentialBatch(self.problem, 1, order=order, memory_mask=memory_mask)
        self._chooses_group, self._is_over = choose_group, False
        num_groups, num_devices = self._batch.num_groups, self._batch.num_devices
        self.observation_space = observation_space(num_groups, num_devices, choose_group=choose_group)
        self.action_space = spaces.Discrete(num_devices * (num_groups if choose_group else 1))

    def action_masks(self) -> NDArray[np.bool_]:
        """(D,) or (G * D,) bool: whether each action is allowed now; never all False, True everywhere after the end."""
        if self._is_over:
            return np.ones(self.action_space.n, dtype=np.bool_)
        seen = self._batch.observe_all(0)[1] if self._chooses_group else self._batch.observe().mask.copy()
        return seen.reshape(-1)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """The observation and an empty info; `seed` and `options` have no effect, because the environment is not
        random."""
        super().reset(seed=seed, options=options)
        self._batch.reset()
        self._shaping.reset()
        self._is_over = False
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Places a group; after the last group the placement is measured, and the episode ends.

        Raises:
            InvalidValue: the action is no integer of the space, the episode is over, or a reward of the user's is not
                finite.
        """
        refuse_if(self._is_over, "step", "after the end", "reset first", where="SequentialEnv")
        devices = check_actions(action, self.action_space, "SequentialEnv").reshape(-1)
        groups: NDArray[np.integer] | None = None
        if self._chooses_group:
            groups, devices = np.divmod(devices, self._batch.num_devices)
            if self._batch.placed[0, groups[0]] >= 0:
                return self._end(np.full(1, np.inf), "error", self.problem.grouping.expand(self._batch.placed[0]))
        self._batch.step(devices, groups)
        if not self._batch.is_done:
            return self._observe(), float(self._shaping.step(self._batch)[0]), False, False, {}
        scores = self.scorer.score(self._batch.placed)
        return self._end(scores.step_time_s, scores.status[0], scores.placements[0])

    def _end(
        self, step_time_s: NDArray[np.float64], status: str, placement: NDArray[np.int32]
    ) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        self._is_over = True
        reward = self._shaping.finish(rewards_of(self.scorer.reward, step_time_s))
        return self._observe(), float(reward[0]), True, False, self._ended(float(step_time_s[0]), status, placement)

    def _observe(self) -> Observation:
        if self._is_over:
            return last_observation(self.observation_space)
        seen = batch_observation(self._batch.observe())
        if self._chooses_group:
            seen["features"] = flat_features(self._batch.observe_all(0)[0], is_batch=False)[None]
        return {name: rows[0] for name, rows in seen.items()}


gym.register(
    "rlplace/Sequential-v0", entry_point="rlplace.env.sequential:SequentialEnv", kwargs={"deterministic": True}
)
gym.register(
    "rlplace/SequentialMeasured-v0",
    entry_point="rlplace.env.sequential:SequentialEnv",
    kwargs={"deterministic": False},
    nondeterministic=True,
)


LARGEST = 1e6
"""No feature is larger; a higher number is cut off."""


def observation_space(num_groups: int, num_devices: int, *, choose_group: bool = False) -> spaces.Dict:
    """A dictionary with `group`, the group that is next, and `features`, flat float32.

    Features are log(1 + x) of `DECISION_FEATURES`, device after device: (D * F,). With `choose_group` they are those of
    every group, group after group: (G * D * F,), zeros for groups that are decided. After the last step all is 0.
    """
    count = num_devices * len(DECISION_FEATURES) * (num_groups if choose_group else 1)
    features = spaces.Box(0.0, float(np.log1p(LARGEST)), (count,), np.float32)
    return spaces.Dict({"group": spaces.Discrete(num_groups), "features": features})


def last_observation(space: spaces.Dict) -> dict[str, Any]:
    """The observation after the last step: zeros."""
    return {"group": np.int64(0), "features": np.zeros(space["features"].shape or (), dtype=np.float32)}


def flat_features(features: NDArray[np.float32], *, is_batch: bool) -> NDArray[np.float32]:
    """A new array of log(1 + x) of `features`, all axes but that of a batch made one."""
    flat = np.clip(features.reshape(len(features), -1) if is_batch else features.reshape(-1), 0.0, LARGEST)
    return np.log1p(flat, out=flat)


def batch_observation(observation: SequentialObservation) -> dict[str, NDArray[Any]]:
    """The observations of B envs: `group` (B,) int64 and `features` (B, D * F) float32."""
    return {
        "group": np.maximum(observation.group, 0),
        "features": flat_features(observation.features, is_batch=True),
    }


POTENTIALS = ("bound", "finish", "none")
"""The potential of the rewards before the last step: `SequentialBatch.bound_s`, `partial_s`, or nothing: it is 0."""
LEAST_S = 1e-12
"""Every potential is of at least this many seconds, so that a reward may take logarithms."""


class Shaping:
    """Rewards of the steps of B episodes: differences of a potential (Ng, Harada, Russell 1999).

    The potential of an episode's start is 0, then it is the reward of a time that the partial schedule gives, and in
    the end that of the step time. So the rewards of an episode add up to the reward of its placement, for any
        potential: the optimum is that of the one-shot env, where nothing is discounted.
    """

    def __init__(self, potential: str, reward: Reward, num_episodes: int) -> None:
        """Shaping at the start of every episode.

        Args:
            potential: one of `POTENTIALS`.
            reward: of seconds.
            num_episodes: B.

        Raises:
            UnknownName: no potential has that name.
        """
        check_known("potential", potential, POTENTIALS)
        self._name, self._reward, self._before = potential, reward, np.zeros(num_episodes)

    def reset(self) -> None:
        """All episodes begin anew."""
        self._before[:] = 0.0

    def step(self, batch: SequentialBatch) -> NDArray[np.float64]:
        """(B,) rewards of a step that was not the last."""
        if self._name == "none":
            return np.zeros_like(self._before)
        seconds = batch.bound_s if self._name == "bound" else np.maximum(batch.partial_s, batch.least_s)
        return self.finish(rewards_of(self._reward, np.maximum(seconds, LEAST_S)))

    def finish(self, reward: NDArray[np.float64]) -> NDArray[np.float64]:
        """(B,) rewards of the last step, where `reward` (B,) is that of the placements."""
        difference = reward - self._before
        self._before[:] = reward
        return difference


Step = tuple[dict[str, NDArray[Any]], NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]


class SequentialVecEnv(BatchedVecEnv):
    """A Stable-Baselines3 `VecEnv` for one problem, with `num_envs` sequential episodes that end together.

    Spaces, rewards and infos are those of `SequentialEnv`. All episodes take G steps. The final placements are measured
    in one call. Equal placements are measured once. With a deterministic measurer, known placements are not measured
    again.
    """

    def __init__(
        self,
        measurer: Measurer,
        num_envs: int,
        reward: str | Reward = "log_speedup",
        *,
        baseline_s: float | None = None,
        deterministic: bool = True,
        potential: str = "bound",
        order: NDArray[np.floating] | None = None,
        memory_mask: str = "resident",
    ) -> None:
        """Envs over the problem of `measurer`.

        Args:
            measurer: measures placements.
            num_envs: episodes in step, B.
            reward: `sqrt`, `log_speedup` or a reward object.
            baseline_s: step time of the baseline for a named reward; by default that of the best single device,
                measured now.
            deterministic: whether the measurer gives a placement the same step time every time.
            potential: one of `POTENTIALS`; with `none` all rewards but the last are 0.
            order: (G,) priorities of groups, higher first; the order of their first ops by default.
            memory_mask: one of `MEMORY_MASKS`: the memory of a group that has to fit on a device.

        Raises:
            UnknownName: no reward, potential or mask has that name.
            InvalidValue: `num_envs` is less than 1, or `order` has not one finite number a group.
        """
        num_groups, num_devices = measurer.problem.grouping.num_groups, measurer.problem.host.num_devices
        space = observation_space(num_groups, num_devices)
        super().__init__(
            measurer,
            num_envs,
            reward,
            space,
            spaces.Discrete(num_devices),
            baseline_s=baseline_s,
            deterministic=deterministic,
        )
        self._shaping = Shaping(potential, self.scorer.reward, num_envs)
        self._batch = SequentialBatch(measurer.problem, num_envs, order=order, memory_mask=memory_mask)
        self._last_observation = last_observation(space)
        self._seen = self._batch.observe()

    def reset(self) -> dict[str, NDArray[Any]]:
        """The observations of `num_envs` new episodes."""
        self._reset_seeds()
        self._reset_options()
        return self._begin()

    def step_wait(self) -> Step:
        """Places a group in every episode; at the end observations are those of the next episodes."""
        self._batch.step(self.take_actions())
        if self._batch.is_done:
            scores, infos = self.measured(self._batch.placed, self._batch.num_groups, self._last_observation)
            rewards = self._shaping.finish(scores.reward).astype(np.float32)
            return self._begin(), rewards, np.ones(self.num_envs, dtype=np.bool_), infos
        rewards = self._shaping.step(self._batch).astype(np.float32)
        self._seen = self._batch.observe()
        done = np.zeros(self.num_envs, dtype=np.bool_)
        return batch_observation(self._seen), rewards, done, [{} for _ in range(self.num_envs)]

    def action_masks(self) -> NDArray[np.bool_]:
        """(B, D) bool: where the next group of each episode may be, by its pins and by memory."""
        return self._seen.mask.copy()

    def env_method(self, method_name: str, *args: Any, indices: Indices = None, **kwargs: Any) -> list[Any]:
        """The method's result for each env asked for; of `action_masks` its row."""
        if method_name == "action_masks":
            masks = self.action_masks()
            return [masks[index] for index in self._get_indices(indices)]
        return super().env_method(method_name, *args, indices=indices, **kwargs)

    def _begin(self) -> dict[str, NDArray[Any]]:
        self._batch.reset()
        self._shaping.reset()
        self._seen = self._batch.observe()
        return batch_observation(self._seen)


@dataclass(frozen=True, eq=False, slots=True)
class SequentialObservation:
    """The next decisions of B episodes. The next observation overwrites the arrays: copy them to keep them.

    Attributes:
        group: (B,) int64, the group to place now; -1 if none is left.
        features: (B, D, F) float32, of each device, by `DECISION_FEATURES`.
        mask: (B, D) bool, where the group may go; at least one device.
    """

    group: LongArray
    features: NDArray[np.float32]
    mask: NDArray[np.bool_]


class SequentialBatch:
    """B episodes of one problem: every step places one group of each episode, and all end after G steps.

    The next group is the group of the first op (in the order of the problem) without a device. The partial schedule
    contains all ops before this op. With `order`, or with groups given to `step`, another group may come first. The
    schedule then waits, and its end result is the same.

    Attributes:
        num_episodes: B.
        num_groups: G, steps of an episode.
        num_devices: D.
        num_steps: groups that are placed in every episode.
        placed: (B, G) int32 devices of groups, -1 where undecided; changes with every step.
        partial_s: (B,) float64, the end of the ops that are scheduled so far; changes with every step.
        bound_s: (B,) float64, a lower bound of the step time; equal to `partial_s` at the end. It is the largest sum of
            an op's end and the least remaining time. Before the first step it is the longest path of least times. It
            changes with every step, and never decreases.
        least_s: the value of `bound_s` before the first step: a lower bound for all placements.
    """

    def __init__(
        self,
        problem: Problem,
        num_episodes: int,
        grouping: Grouping | None = None,
        order: NDArray[np.floating] | None = None,
        *,
        memory_mask: str = "resident",
    ) -> None:
        """Episodes at their start.

        Args:
            problem: the problem to place.
            num_episodes: B.
            grouping: the ops that are placed together; the problem's own groups by default.
            order: (G,) priorities of groups, higher first, ties by index.
            memory_mask: one of `MEMORY_MASKS`: the memory of a group that has to fit on a device.

        Raises:
            UnknownName: no mask has that name.
            InvalidValue: `num_episodes` is less than 1, or `order` has not one finite number a group.
        """
        refuse_if(num_episodes < 1, "num_episodes", num_episodes, "at least 1", where="SequentialBatch")
        grouping = problem.grouping if grouping is None else grouping
        self.num_episodes = num_episodes
        self.num_groups, self.num_devices = grouping.num_groups, problem.host.num_devices
        self._sequence = None if order is None else self._by_priority(order)
        self._layout = group_layout(problem, grouping)
        self._bounds = schedule_bounds(problem, grouping, self._layout, memory_mask)
        self._schedules = new_schedules(self._layout, self._bounds, num_episodes)
        self.placed, self.num_steps = self._schedules.placed, 0
        self.partial_s, self.bound_s = self._schedules.finish_s, self._schedules.bound_s
        self.least_s = self._bounds.least_s
        self._episodes = np.arange(num_episodes, dtype=np.int64)
        self._group = np.zeros(num_episodes, dtype=np.int64)
        shape = (num_episodes, self.num_devices)
        self._observation = SequentialObservation(
            group=self._group,
            features=np.zeros((*shape, len(DECISION_FEATURES)), dtype=np.float32),
            mask=np.zeros(shape, dtype=np.bool_),
        )
        self._turn()

    @property
    def is_done(self) -> bool:
        """Whether every group is decided."""
        return self.num_steps == self.num_groups

    def reset(self) -> None:
        """All episodes begin anew."""
        clear(self._bounds, self._schedules)
        self.num_steps = 0
        self._turn()

    def observe(self, groups: NDArray[np.integer] | None = None) -> SequentialObservation:
        """The next decision, and the features of each device for it.

        Args:
            groups: (B,) undecided groups to look at; those that are next by default.

        Raises:
            InvalidValue: wrong length, or a group that is decided or unknown.
        """
        self._turn(groups)
        made = self._observation
        observe(self._layout, self._bounds, self._schedules, self._episodes, self._group, made.features, made.mask)
        return made

    def observe_all(self, episode: int) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """(G, D, F) float32 features and (G, D) bool masks of every group of one episode; zeros and False once decided.

        Args:
            episode: which of B.
        """
        shape = (self.num_groups, self.num_devices)
        features, mask = np.zeros((*shape, len(DECISION_FEATURES)), dtype=np.float32), np.zeros(shape, dtype=np.bool_)
        is_open = self.placed[episode] < 0
        groups = np.where(is_open, np.arange(self.num_groups), -1)
        episodes = np.full(self.num_groups, episode, dtype=np.int64)
        observe(self._layout, self._bounds, self._schedules, episodes, groups, features, mask)
        return features, mask & is_open[:, None]

    def step(self, devices: NDArray[np.integer], groups: NDArray[np.integer] | None = None) -> None:
        """Places one group of each episode, and schedules the ops that can run.

        Args:
            devices: (B,) device of each group, allowed or not.
            groups: (B,) undecided groups; those that are next by default.

        Raises:
            InvalidValue: wrong length, no integers, an unknown device or group, or no undecided group.
        """
        refuse_if(self.is_done, "step", self.num_steps + 1, f"at most {self.num_groups}, then reset", where="episode")
        self._turn(groups)
        decide(
            self._layout,
            self._bounds,
            self._schedules,
            self._group,
            self._in_range(devices, self.num_devices, "device"),
        )
        self.num_steps += 1

    def _turn(self, groups: NDArray[np.integer] | None = None) -> None:
        """Sets the groups that are next: `groups` (B,), or those by the order."""
        if groups is not None:
            found = self._in_range(groups, self.num_groups, "group")
            decided = self.placed[self._episodes, found] >= 0
            if decided.any():
                raise InvalidValue("group", int(found[decided.argmax()]), "one that is undecided", where="episode")
            self._group[:] = found
        elif self._sequence is None:
            next_groups(self._layout, self._schedules, self._group)
        else:
            is_open = self.placed[:, self._sequence] < 0
            self._group[:] = np.where(is_open.any(axis=1), self._sequence[is_open.argmax(axis=1)], -1)

    def _by_priority(self, order: NDArray[np.floating]) -> LongArray:
        order = np.asarray(order, dtype=np.float64)
        refuse_if(
            order.shape != (self.num_groups,) or not np.all(np.isfinite(order)),
            "order",
            order,
            f"{self.num_groups} finite numbers, one a group",
            where="SequentialBatch",
        )
        return np.argsort(-order, kind="stable").astype(np.int64)

    def _in_range(self, values: NDArray[np.integer], count: int, one: str) -> LongArray:
        found = np.asarray(values)
        refuse_if(
            found.shape != (self.num_episodes,) or not np.issubdtype(found.dtype, np.integer),
            f"{one}s",
            f"{found.dtype} {found.shape}",
            f"{self.num_episodes} integers, one an episode",
            where="episode",
        )
        if found.min() < 0 or found.max() >= count:
            raise InvalidValue(
                one, int(found.min() if found.min() < 0 else found.max()), f"0..{count - 1}", where="episode"
            )
        return found.astype(np.int64)


class ListSchedules(Schedulers):
    """A problem's list schedulers over the groupings of `GROUPINGS`, each laid out when it is first asked for.

    Args:
        problem: the problem to place.
    """

    def place(self, pairs: Sequence[Pair]) -> NDArray[np.int32]:
        """(B, N) int32 devices of ops: for each pair of a grouping's name and weights (9,), its schedule."""
        rows = [self[name].grouping.expand(self[name].place(np.array(weights)))[0] for name, weights in pairs]
        return np.array(rows, dtype=np.int32).reshape(len(pairs), self._problem.graph.num_ops)

    def estimate(self, placements: NDArray[np.int32]) -> NDArray[np.float64]:
        """(B, 6) `ESTIMATES` of placements (B, N): nothing of it is simulated."""
        return estimates(self._ungrouped, placements)

    @cached_property
    def _ungrouped(self) -> GroupLayout:
        return group_layout(self._problem, Grouping(np.arange(self._problem.graph.num_ops, dtype=np.int32)))
