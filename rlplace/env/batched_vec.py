"""`BatchedVecEnv`: what our Stable-Baselines3 `VecEnv`s share: envs that are one object, and a measurer for all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from rlplace.env.actions import ActionSpace, check_actions
from rlplace.env.rewards import Reward
from rlplace.env.scoring import Scores, make_scorer
from rlplace.errors import InvalidValue
from rlplace.measure.measurement import Measurer

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
