"""`CloneLearner`: clones the best placements seen so far, and nothing else."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rlplace.policy.config import CloneConfig
from rlplace.policy.learn.elites import Elites
from rlplace.policy.learn.imitate import cloning_loss, imitate
from rlplace.policy.learn.settle import settle
from rlplace.policy.learn.state import LearnerState, learner_state, load_learner_state
from rlplace.policy.protocols import GroupPolicy


class CloneLearner:
    """The cross-entropy method with a network for its distribution (Rubinstein 1999; de Boer et al. 2005).

    Args:
        policy: learns, in place.
        config: how.
    """

    def __init__(self, policy: GroupPolicy, config: CloneConfig | None = None) -> None:
        self.policy, self.config = policy, config or CloneConfig()
        self.elites = Elites(self.config.num_elites)
        self._optimizer = torch.optim.Adam(policy.parameters(), lr=self.config.learning_rate)

    def imitate(self, group_devices: NDArray[np.integer]) -> None:
        """Clones placements (G,) or (M, G)."""
        imitate(self.policy, group_devices)
        settle(self.policy, self.config.flips)

    def update(
        self, group_devices: NDArray[np.integer], rewards: NDArray[np.floating], *, progress: float = 0.0
    ) -> dict[str, float]:
        """Takes note of placements (B, G) and rewards (B,), and clones the best of all."""
        self.elites.add(group_devices, rewards)
        loss = torch.zeros(())
        for _ in range(self.config.num_steps):
            loss = cloning_loss(self.policy, self.elites.group_devices, self.config.smoothing).mean()
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self._optimizer.step()
        settle(self.policy, self.config.flips, self.elites)
        return {"elite_loss": loss.item(), "best_reward": float(self.elites.rewards[0])}

    def forget(self) -> None:
        """Forgets the best placements."""
        self.elites.clear()

    def state(self) -> LearnerState:
        """All that it and its policy need to go on."""
        return learner_state(self.policy, self._optimizer, self.elites)

    def load_state(self, state: LearnerState) -> None:
        """Goes on from the state of another one, made for the same problem with the same options.

        Raises:
            KeyError, RuntimeError, ValueError: it is of another policy.
        """
        load_learner_state(state, self.policy, self._optimizer, self.elites)
