"""`SequentialVecEnv`: B sequential envs in step; what they place is measured in one batched call."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rlplace.env.batched_vec import BatchedVecEnv, Indices
from rlplace.env.rewards import Reward
from rlplace.env.sequential.batch import SequentialBatch
from rlplace.env.sequential.observation import batch_observation, last_observation, observation_space
from rlplace.env.sequential.potential import Shaping
from rlplace.measure.measurement import Measurer

Step = tuple[dict[str, NDArray[Any]], NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]


class SequentialVecEnv(BatchedVecEnv):
    """A Stable-Baselines3 `VecEnv` of `num_envs` sequential episodes over one problem, which end together.

    Spaces, rewards and infos are those of `SequentialEnv`. All episodes take G steps; the placements of the last go to
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
        potential: str = "bound",
        order: NDArray[np.floating] | None = None,
        memory_mask: str = "resident",
    ) -> None:
        """Envs over the problem of `measurer`.

        Args:
            measurer: what measures placements.
            num_envs: episodes in step, B.
            reward: `sqrt`, `log_speedup` or a reward object.
            baseline_s: the step time a named reward compares with; by default the best single device's, measured now.
            deterministic: whether the measurer gives a placement the same step time every time.
            potential: one of `POTENTIALS`; with `none` all rewards but the last are 0.
            order: (G,) priorities of groups, higher first; the order of their first ops by default.
            memory_mask: one of `MEMORY_MASKS`: what of a group has to fit on a device.

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
            return self._end()
        rewards = self._shaping.step(self._batch)
        self._seen = self._batch.observe()
        done = np.zeros(self.num_envs, dtype=np.bool_)
        return batch_observation(self._seen), rewards.astype(np.float32), done, [{} for _ in range(self.num_envs)]

    def action_masks(self) -> NDArray[np.bool_]:
        """(B, D) bool: where the next group of each episode may be, by its pins and by what fits."""
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

    def _end(self) -> Step:
        scores = self.scorer.score(self._batch.placed)
        self.last_scores = scores
        rewards = self._shaping.finish(scores.reward)
        infos = [
            {
                "step_time_s": step_time_s,
                "status": status,
                "placement": placement,
                "episode": {"r": reward, "l": self._batch.num_groups},
                "terminal_observation": self._last_observation,
            }
            for step_time_s, status, placement, reward in zip(
                scores.step_time_s.tolist(), scores.status, scores.placements, scores.reward.tolist(), strict=True
            )
        ]
        return self._begin(), rewards.astype(np.float32), np.ones(self.num_envs, dtype=np.bool_), infos
