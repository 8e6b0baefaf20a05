"""`PlacementVecEnv`: B one-shot envs that are measured in one batched call."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.env.batched_vec import BatchedVecEnv
from rlplace.env.graph_observation import GraphObservation
from rlplace.env.one_shot import action_space
from rlplace.env.rewards import Reward
from rlplace.measure.measurement import Measurer


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
        scores = self.scorer.score(self.take_actions())
        self.last_scores = scores
        last = self._observation.one()
        infos = [
            {
                "step_time_s": step_time_s,
                "status": status,
                "placement": placement,
                "episode": {"r": reward, "l": 1},
                "terminal_observation": last,
            }
            for step_time_s, status, placement, reward in zip(
                scores.step_time_s.tolist(), scores.status, scores.placements, scores.reward.tolist(), strict=True
            )
        ]
        observations, dones = self._observation.batch(self.num_envs), np.ones(self.num_envs, dtype=np.bool_)
        return observations, scores.reward.astype(np.float32), dones, infos

    def action_masks(self) -> NDArray[np.bool_]:
        """(G * D,) bool: whether each group may be on each device; the same in every env."""
        return self.scorer.problem.group_allowed.reshape(-1)
