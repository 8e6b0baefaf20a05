"""`PlacementVecEnv`: B one-shot envs that are measured in one batched call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from rlplace.env.one_shot import action_space, observation_space
from rlplace.env.rewards import Reward
from rlplace.env.scoring import Scores, make_scorer
from rlplace.errors import InvalidValue
from rlplace.measure.measurement import Measurer

Indices = int | Iterable[int] | None


class PlacementVecEnv(VecEnv):
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
    ) -> None:
        """Envs over the problem of `measurer`.

        Args:
            measurer: what measures placements.
            num_envs: placements a step, B.
            reward: `sqrt`, `log_speedup` or a reward object.
            baseline_s: the step time a named reward compares with; by default the best single device's, measured now.
            deterministic: whether the measurer gives a placement the same step time every time.

        Raises:
            UnknownName: no reward has that name.
            InvalidValue: `num_envs` is less than 1.
        """
        if num_envs < 1:
            raise InvalidValue("num_envs", num_envs, "at least 1", where="PlacementVecEnv")
        self.scorer = make_scorer(measurer, reward, baseline_s=baseline_s, deterministic=deterministic)
        self.render_mode: str | None = None
        self.last_scores: Scores | None = None
        self._actions: NDArray[np.int64] | None = None
        super().__init__(num_envs, observation_space(), action_space(measurer.problem))

    def reset(self) -> dict[str, NDArray[Any]]:
        """The observations of `num_envs` new episodes."""
        self._reset_seeds()
        self._reset_options()
        return self._observe()

    def step_async(self, actions: NDArray[np.int64]) -> None:
        """Takes the placements (B, G) that the next `step_wait` measures."""
        self._actions = actions

    def step_wait(self) -> tuple[dict[str, NDArray[Any]], NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        """Observations of the next episodes, and rewards, ends and infos of these."""
        if self._actions is None:
            raise InvalidValue("actions", None, "placements given to step_async first", where="PlacementVecEnv")
        scores = self.scorer.score(self._actions)
        self._actions = None
        self.last_scores = scores
        infos = [
            {
                "step_time_s": step_time_s,
                "status": status,
                "placement": placement,
                "episode": {"r": reward, "l": 1},
                "terminal_observation": {"graph": np.int64(0)},
            }
            for step_time_s, status, placement, reward in zip(
                scores.step_time_s.tolist(), scores.status, scores.placements, scores.reward.tolist(), strict=True
            )
        ]
        return self._observe(), scores.reward.astype(np.float32), np.ones(self.num_envs, dtype=np.bool_), infos

    def action_masks(self) -> NDArray[np.bool_]:
        """(G * D,) bool: whether each group may be on each device; the same in every env."""
        return self.scorer.problem.group_allowed.reshape(-1)

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

    def _observe(self) -> dict[str, NDArray[Any]]:
        return {"graph": np.zeros(self.num_envs, dtype=np.int64)}
