"""`CloneLearner`: clones the best placements seen so far, and nothing else.

`imitate`: teaches a policy a placement before it learns from step times.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlplace.errors import InvalidValue
from rlplace.policy.config import CloneConfig
from rlplace.policy.learn.elites import Elites, settle
from rlplace.policy.learn.state import LearnerState, learner_state, load_learner_state
from rlplace.policy.module import at_temperature_1
from rlplace.policy.protocols import GroupPolicy, StartsSomewhere


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


LEAST_WEIGHT = 0.5
"""Weight of a group without cost against the mean group: it may hold a large parameter all the same."""
CERTAIN = 1e-6
"""A device whose log-probability is above minus this is not told from one that is certain."""


def imitate(
    policy: GroupPolicy,
    group_devices: NDArray[np.integer],
    *,
    num_steps: int = 60,
    learning_rate: float = 3e-3,
    smoothing: float = 0.06,
) -> float:
    """The loss left after cloning a teacher's placement (behaviour cloning; Pomerleau 1991).

    Where the policy says what its groups cost (`group_cost`, (G, D)), each counts by it. A policy that starts from a
    placement just starts from the first teacher's, and has nothing left to learn.

    Args:
        policy: learns, in place.
        group_devices: (G,) devices of groups, or (M, G) for several teachers to be followed alike.
        num_steps: gradient steps (Adam).
        learning_rate: of Adam.
        smoothing: probability that is left for other devices than the teacher's, so that the policy keeps trying them.

    Raises:
        InvalidValue: the wrong number of groups, or a device that does not exist or that pins bar.
    """
    teachers_MG = np.atleast_2d(np.asarray(group_devices))
    if teachers_MG.shape[1:] != (policy.num_groups,):
        raise InvalidValue("group_devices", teachers_MG.shape, f"{policy.num_groups} devices, one a group")
    if teachers_MG.size and not 0 <= teachers_MG.min() <= teachers_MG.max() < policy.num_devices:
        raise InvalidValue("device", int(teachers_MG.max()), f"0..{policy.num_devices - 1}", where="imitate")
    with torch.no_grad():
        if torch.isneginf(policy.evaluate(teachers_MG)[0]).any():
            raise InvalidValue("group_devices", "a group on a device where it may not be", "allowed devices only")
    if isinstance(policy, StartsSomewhere):
        policy.start_from(teachers_MG[0])
        return 0.0
    weight_G = _weights(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=learning_rate)
    loss = torch.zeros(())
    for _ in range(num_steps):
        loss = (cloning_loss(policy, teachers_MG, smoothing) * weight_G).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return loss.item()


def cloning_loss(policy: GroupPolicy, group_devices: NDArray[np.integer], smoothing: float) -> Tensor:
    """(G,) mean cross-entropy, in nats, towards placements (M, G) with a probability of `1 - smoothing`.

    It is label smoothing with two labels, the known device and all others: a policy that became certain would try
    nothing else. It holds at a temperature of 1, however the policy samples.
    """
    with at_temperature_1(policy):
        log_prob_MG, _ = policy.evaluate(group_devices)
    log_other_MG = torch.log1p(-log_prob_MG.clamp(max=-CERTAIN).exp())
    return -((1 - smoothing) * log_prob_MG + smoothing * log_other_MG).mean(dim=0)


def _weights(policy: GroupPolicy) -> Tensor:
    cost_GD = getattr(policy, "group_cost", None)
    if cost_GD is None:
        return torch.ones(())
    cost_G = cost_GD.mean(dim=1)
    weight_G: Tensor = LEAST_WEIGHT + (1 - LEAST_WEIGHT) * cost_G / cost_G.mean().clamp(min=1e-12)
    return weight_G
