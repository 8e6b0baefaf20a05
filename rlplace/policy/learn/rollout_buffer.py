"""`PlacementRolloutBuffer`: a rollout of one-step episodes, with a log-probability for each group."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.buffers import DictRolloutBuffer
from stable_baselines3.common.type_aliases import DictRolloutBufferSamples
from torch import Tensor


class PlacementRolloutBuffer(DictRolloutBuffer):
    """Keeps log-probabilities by group, (steps, B, G).

    Every episode has one step and all start in the same state, so the return is the reward, and the advantage the
    reward less the mean reward of the rollout: a better baseline than any learned value.

    Attributes:
        rng: shuffles the minibatches.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As Stable-Baselines3's, with a generator of its own."""
        self.rng = np.random.default_rng(0)
        super().__init__(*args, **kwargs)

    def reset(self) -> None:
        """Empties the buffer."""
        super().reset()
        self.log_probs = np.zeros((self.buffer_size, self.n_envs, self.action_dim), dtype=np.float32)

    def compute_returns_and_advantage(self, last_values: Tensor, dones: NDArray[np.bool_]) -> None:
        """Sets returns and advantages; there is no next state, so `last_values` and `dones` do not matter."""
        self.returns = self.rewards.copy()
        self.advantages = self.rewards - self.rewards.mean()

    def get(self, batch_size: int | None = None) -> Generator[DictRolloutBufferSamples, None, None]:  # type: ignore[override]
        """Minibatches of the whole rollout, shuffled; one batch of everything, in order, without `batch_size`."""
        if not self.generator_ready:
            for key, values in self.observations.items():
                self.observations[key] = self.swap_and_flatten(values)
            for name in ("actions", "values", "log_probs", "advantages", "returns"):
                setattr(self, name, self.swap_and_flatten(getattr(self, name)))
            self.generator_ready = True
        num_samples = self.buffer_size * self.n_envs
        if batch_size is None or batch_size >= num_samples:
            yield self._get_samples(np.arange(num_samples))
            return
        order = self.rng.permutation(num_samples)
        for first in range(0, num_samples, batch_size):
            yield self._get_samples(order[first : first + batch_size])

    def _get_samples(  # type: ignore[override]
        self, batch_inds: NDArray[np.int64], env: object = None
    ) -> DictRolloutBufferSamples:
        return DictRolloutBufferSamples(
            observations={key: self.to_torch(values[batch_inds]) for key, values in self.observations.items()},
            actions=self.to_torch(self.actions[batch_inds]),
            old_values=self.to_torch(self.values[batch_inds].flatten()),
            old_log_prob=self.to_torch(self.log_probs[batch_inds]),
            advantages=self.to_torch(self.advantages[batch_inds].flatten()),
            returns=self.to_torch(self.returns[batch_inds].flatten()),
        )
