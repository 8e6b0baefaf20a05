"""What a partial schedule is worth: the rewards of a sequential episode are its differences."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.env.rewards import Reward, rewards_of
from rlplace.env.sequential.batch import SequentialBatch
from rlplace.errors import UnknownName

POTENTIALS = ("bound", "finish", "none")
"""What the reward before the last step is of: `SequentialBatch.bound_s`, `partial_s`, or nothing: it is 0."""
LEAST_S = 1e-12
"""Every potential is of at least this many seconds, so that a reward may take logarithms."""


class Shaping:
    """Rewards of the steps of B episodes: differences of a potential (Ng, Harada, Russell 1999).

    The potential of an episode's start is 0, then it is the reward of a time that the partial schedule gives, and in
    the end that of the step time. So the rewards of an episode add up to the reward of its placement, whatever the
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
        if potential not in POTENTIALS:
            raise UnknownName("potential", potential, POTENTIALS)
        self._name = potential
        self._reward = reward
        self._before = np.zeros(num_episodes)

    def reset(self) -> None:
        """All episodes begin anew."""
        self._before[:] = 0.0

    def step(self, batch: SequentialBatch) -> NDArray[np.float64]:
        """(B,) rewards of a step that was not the last."""
        if self._name == "none":
            return np.zeros_like(self._before)
        seconds = batch.bound_s if self._name == "bound" else np.maximum(batch.partial_s, batch.least_s)
        return self._move(rewards_of(self._reward, np.maximum(seconds, LEAST_S)))

    def finish(self, reward: NDArray[np.float64]) -> NDArray[np.float64]:
        """(B,) rewards of the last step, where `reward` (B,) is what the placements are worth."""
        return self._move(reward)

    def _move(self, after: NDArray[np.float64]) -> NDArray[np.float64]:
        difference = after - self._before
        self._before[:] = after
        return difference
