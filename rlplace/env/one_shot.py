"""`OneShotEnv`: one action places all groups, and the episode is over; `PlacementVecEnv`: B of them, measured together.

Importing this module registers `rlplace/OneShot-v0`, which simulates, and `rlplace/OneShotMeasured-v0`, for a host that
runs the placements. `gymnasium.make("rlplace.env:rlplace/OneShot-v0", ...)` imports it first. `BatchedVecEnv` is the
base of our Stable-Baselines3 `VecEnv`s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from rlplace.env.placement_env import (
    NUM_GROUPS,
    ActionSpace,
    Observation,
    PlacementEnv,
    SharedMeasurer,
    check_actions,
    find_measurer,
)
from rlplace.env.problem_features import GraphObservation
from rlplace.env.rewards import Reward, Scores, make_scorer
from rlplace.errors import InvalidValue
from rlplace.measure.hosts.host import Host
from rlplace.measure.measurement import Measurer
from rlplace.measure.problem import Problem

Action = NDArray[np.int64]


def action_space(problem: Problem) -> spaces.MultiDiscrete:
    """A device for each of G groups."""
    return spaces.MultiDiscrete(np.full(problem.grouping.num_groups, problem.host.num_devices))


class OneShotEnv(PlacementEnv[Action]):
    """Places all G groups of a problem at once, as in Mirhoseini et al. 2017.

    | space | |
    |---|---|
    | action | `MultiDiscrete`, (G,): the device of each group |
    | observation | `Dict`: `graph`, the index of the graph; or its features, see `GraphObservation` |
    | reward | of the step time, once |

    The info of a step has `step_time_s` (infinite where the placement failed), `status` and `placement`, (N,) int32. A
    group may be barred from some devices: `action_masks` says from which, and an action that has one there fails.
    """

    action_space: spaces.MultiDiscrete

    def __init__(
        self,
        measurer: Measurer | SharedMeasurer | None = None,
        reward: str | Reward = "log_speedup",
        baseline_s: float | None = None,
        deterministic: bool = True,
        render_mode: str | None = None,
        *,
        problem: Problem | None = None,
        workload: str | None = None,
        host: str | Host = "auto",
        num_groups: int = NUM_GROUPS,
        workload_seed: int = 0,
        observation: str = "index",
    ) -> None:
        """An env over the problem of `measurer`, over `problem`, or over `workload` on `host`.

        Args:
            measurer: what measures placements; where it is not given, they are simulated or, if not `deterministic`,
                run on the problem's host.
            reward: `sqrt`, `log_speedup` or a reward object.
            baseline_s: the step time a named reward compares with; by default the best single device's, measured now.
            deterministic: whether the measurer gives a placement the same step time every time.
            render_mode: `human`, `rgb_array` or `ansi`; None draws nothing.
            problem: what is placed, instead of `measurer`.
            workload: a WORKLOAD word (`nmt@small`), instead of either.
            host: a HOST word (`4xV100-pcie`) or a host, for a workload.
            num_groups: groups to aim at, for a workload.
            workload_seed: of a workload's weights and inputs.
            observation: `index` or `graph`, see `GraphObservation`.

        Raises:
            UnknownName: no reward, render mode or observation has that name.
            InvalidValue: not exactly one of `measurer`, `problem` and `workload`.
            UserError: a workload or host that cannot be had.
        """
        found = find_measurer(measurer, problem, workload, host, num_groups, workload_seed, runs=not deterministic)
        super().__init__(found, reward, baseline_s, deterministic, render_mode)
        self._observation = GraphObservation(self.problem, observation)
        self.observation_space = self._observation.space
        self.action_space = action_space(self.problem)

    def action_masks(self) -> NDArray[np.bool_]:
        """(G * D,) bool: whether each group may be on each device, as sb3-contrib's maskable algorithms ask for it."""
        return self.problem.group_allowed.reshape(-1)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """The observation and an empty info; `seed` and `options` change nothing, as nothing here is random."""
        super().reset(seed=seed, options=options)
        return self._observation.one(), {}

    def step(self, action: Action) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Measures the placement `action`, (G,), and ends the episode.

        Raises:
            InvalidValue: not (G,) integers that name devices, or a reward of the user's that is not finite.
        """
        devices = check_actions(action, self.action_space, "OneShotEnv")
        scores = self.scorer.score(devices[None])
        info = self._ended(float(scores.step_time_s[0]), scores.status[0], scores.placements[0])
        return self._observation.one(), float(scores.reward[0]), True, False, info


gym.register("rlplace/OneShot-v0", entry_point="rlplace.env.one_shot:OneShotEnv", kwargs={"deterministic": True})
gym.register(
    "rlplace/OneShotMeasured-v0",
    entry_point="rlplace.env.one_shot:OneShotEnv",
    kwargs={"deterministic": False},
    nondeterministic=True,
)


Indices = int | Iterable[int] | None


class BatchedVecEnv(VecEnv):
    """A `VecEnv` of `num_envs` envs over one problem, whose placements are measured in one batched call.

    Attributes:
        scorer: measures and rewards placements.
        last_scores: outcomes of the last placements that were measured; None before there are any.
    """

    def __init__(
        self,
        measurer: Measurer,
        num_envs: int,
        reward: str | Reward,
        observation_space: spaces.Space[Any],
        action_space: ActionSpace,
        *,
        baseline_s: float | None,
        deterministic: bool,
    ) -> None:
        """Envs over the problem of `measurer`.

        Args:
            measurer: what measures placements.
            num_envs: how many, B.
            reward: `sqrt`, `log_speedup` or a reward object.
            observation_space: of each env.
            action_space: of each env.
            baseline_s: the step time a named reward compares with; None is the best single device's, measured now.
            deterministic: whether the measurer gives a placement the same step time every time.

        Raises:
            UnknownName: no reward has that name.
            InvalidValue: `num_envs` is less than 1.
        """
        if num_envs < 1:
            raise InvalidValue("num_envs", num_envs, "at least 1", where=type(self).__name__)
        self.scorer = make_scorer(measurer, reward, baseline_s=baseline_s, deterministic=deterministic)
        self.render_mode: str | None = None
        self.last_scores: Scores | None = None
        self._actions: NDArray[np.int64] | None = None
        self._action_space = action_space
        super().__init__(num_envs, observation_space, action_space)

    def step_async(self, actions: NDArray[np.int64]) -> None:
        """Takes the actions, one an env, that the next `step_wait` carries out.

        Raises:
            InvalidValue: another number of them, or one that is not in the action space.
        """
        self._actions = check_actions(actions, self._action_space, type(self).__name__, self.num_envs)

    def take_actions(self) -> NDArray[np.int64]:
        """The actions of `step_async`, once.

        Raises:
            InvalidValue: there are none.
        """
        if self._actions is None:
            raise InvalidValue("actions", None, "actions given to step_async first", where=type(self).__name__)
        actions, self._actions = self._actions, None
        return actions

    def measured(
        self, group_devices: NDArray[np.integer], length: int, last: dict[str, Any]
    ) -> tuple[Scores, list[dict[str, Any]]]:
        """Outcomes of placements (B, G), and the infos of the last step of their episodes.

        Args:
            group_devices: devices of groups.
            length: steps of an episode.
            last: the observation after the last step.
        """
        scores = self.last_scores = self.scorer.score(group_devices)
        columns = scores.step_time_s.tolist(), scores.status, scores.placements, scores.reward.tolist()
        infos = [
            {
                "step_time_s": step_time_s,
                "status": status,
                "placement": placement,
                "episode": {"r": reward, "l": length},
                "terminal_observation": last,
            }
            for step_time_s, status, placement, reward in zip(*columns, strict=True)
        ]
        return scores, infos

    def close(self) -> None:
        """Nothing to close: the measurer belongs to the caller."""

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """The attribute, once for each env asked for."""
        return [getattr(self, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Sets the attribute, which all envs share."""
        setattr(self, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Indices = None, **kwargs: Any) -> list[Any]:
        """The method's result for each env asked for."""
        return [getattr(self, method_name)(*args, **kwargs) for _ in self._get_indices(indices)]

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: Indices = None
    ) -> list[bool]:
        """False for each env asked for: there are no wrappers."""
        return [False] * len(list(self._get_indices(indices)))

    def get_images(self) -> Sequence[NDArray[np.uint8] | None]:
        """None for each env: there is nothing to see."""
        return [None] * self.num_envs


class PlacementVecEnv(BatchedVecEnv):
    """A Stable-Baselines3 `VecEnv` of `num_envs` one-shot episodes a step over one problem.

    Spaces, rewards and infos are those of `OneShotEnv`; every step ends every episode. The placements of a step go to
    the measurer in one call, equal ones once, and known ones not at all if the measurer is deterministic.
    """

    def __init__(
        self,
        measurer: Measurer,
        num_envs: int,
        reward: str | Reward = "log_speedup",
        *,
        baseline_s: float | None = None,
        deterministic: bool = True,
        observation: str = "index",
    ) -> None:
        """Envs over the problem of `measurer`.

        Args:
            measurer: what measures placements.
            num_envs: placements a step, B.
            reward: `sqrt`, `log_speedup` or a reward object.
            baseline_s: the step time a named reward compares with; by default the best single device's, measured now.
            deterministic: whether the measurer gives a placement the same step time every time.
            observation: `index` or `graph`, see `GraphObservation`.

        Raises:
            UnknownName: no reward or observation has that name.
            InvalidValue: `num_envs` is less than 1.
        """
        self._observation = GraphObservation(measurer.problem, observation)
        spaces = self._observation.space, action_space(measurer.problem)
        super().__init__(measurer, num_envs, reward, *spaces, baseline_s=baseline_s, deterministic=deterministic)

    def reset(self) -> dict[str, NDArray[Any]]:
        """The observations of `num_envs` new episodes."""
        self._reset_seeds()
        self._reset_options()
        return self._observation.batch(self.num_envs)

    def step_wait(self) -> tuple[dict[str, NDArray[Any]], NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        """Measures the placements (B, G); observations of the next episodes, and rewards, ends and infos of these."""
        scores, infos = self.measured(self.take_actions(), 1, self._observation.one())
        observations, dones = self._observation.batch(self.num_envs), np.ones(self.num_envs, dtype=np.bool_)
        return observations, scores.reward.astype(np.float32), dones, infos

    def action_masks(self) -> NDArray[np.bool_]:
        """(G * D,) bool: whether each group may be on each device; the same in every env."""
        return self.scorer.problem.group_allowed.reshape(-1)
