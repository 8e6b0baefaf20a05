"""`GroupPPO`: proximal policy optimisation with a ratio for each group, and with self-imitation.

`learn_many`: one network learns on several problems at once.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Adam, Optimizer

from rlplace.errors import refuse_if
from rlplace.policy.base import GroupPolicy
from rlplace.policy.learn.learners import EliteLearner, cloning_loss, descend, settle
from rlplace.policy.options import PPOConfig


class GroupPPO(EliteLearner):
    """Proximal policy optimisation (Schulman et al. 2017) for placements of many groups at once.

    - Every episode is one placement, and all episodes start in the same state. So the advantage is the reward minus the
      mean of the batch, divided by the standard deviation: a better baseline than a learned value.
    - The surrogate is clipped for each group and averaged over groups, because the ratio of a whole placement is a
      product over hundreds of groups and becomes too large.
    - The policy also clones the best placements that it has seen (self-imitation, Oh et al. 2018; with this term alone
      it would be a cross-entropy method).
    - If the policy supports it, its samples differ from its mode in about `flips` groups, and it starts from the best
      placement seen.

    Attributes:
        policy: the policy to train, in place.
        elites: the best placements seen, which the policy clones.
    """

    policy: GroupPolicy

    def __init__(
        self,
        policy: GroupPolicy,
        config: PPOConfig | None = None,
        *,
        seed: int = 0,
        optimizer: Optimizer | None = None,
    ) -> None:
        """A learner for `policy`.

        Args:
            policy: the policy to train, in place.
            config: the options.
            seed: of the order of minibatches.
            optimizer: of the policy's parameters, if several learners share them; a new Adam by default.
        """
        self.config = config or PPOConfig()
        super().__init__(
            policy,
            learning_rate=self.config.learning_rate,
            num_elites=self.config.num_elites,
            flips=self.config.flips,
            optimizer=optimizer,
        )
        self._rng = np.random.default_rng(seed)
        self._num_updates = 0

    def update(
        self, group_devices: NDArray[np.integer], rewards: NDArray[np.floating], *, progress: float = 0.0
    ) -> dict[str, float]:
        """One update with placements (B, G) and their rewards (B,); returns losses, entropy and other figures by name.

        The placements may come from elsewhere: the ratio is to the current policy.
        """
        rows_BG = np.asarray(group_devices, dtype=np.int64)
        self.elites.add(rows_BG, rewards)
        advantages_B = relative_advantages(rewards, normalize=self.config.normalize_advantage)
        with torch.no_grad():
            old_BG = self.policy.evaluate(rows_BG)[0]
        log: dict[str, list[float]] = defaultdict(list)
        for _ in range(self.config.n_epochs):
            self._num_updates += 1
            parts = self._minibatches(len(rows_BG))
            if not all(self._step(rows_BG[part], advantages_B[part], old_BG[part], log) for part in parts):
                break
        settle(self.policy, self._flips, self.elites)
        figures = {name: float(np.mean(values)) for name, values in log.items()}
        return figures | {"best_reward": float(self.elites.rewards[0]), "n_updates": float(self._num_updates)}

    def facts(self) -> dict[str, Any]:
        """The generator of minibatches, and the number of passes so far."""
        return {"shuffling": self._rng.bit_generator.state, "n_updates": self._num_updates}

    def load_facts(self, facts: Mapping[str, Any]) -> None:
        """Restores the `facts` of another learner."""
        self._rng.bit_generator.state = facts["shuffling"]
        self._num_updates = operator.index(facts["n_updates"])

    def _minibatches(self, num_rows: int) -> Iterator[NDArray[np.int64]]:
        size = min(self.config.batch_size or num_rows, num_rows)
        order = np.arange(num_rows) if size == num_rows else self._rng.permutation(num_rows)
        return (order[first : first + size] for first in range(0, num_rows, size))

    def _step(
        self, rows_BG: NDArray[np.int64], advantages_B: Tensor, old_BG: Tensor, log: dict[str, list[float]]
    ) -> bool:
        """Takes a gradient step; False, and no step, where the policy has gone too far from the one that sampled."""
        loss, approx_kl = self._loss(rows_BG, advantages_B, old_BG, log)
        if self.config.target_kl is not None and approx_kl > 1.5 * self.config.target_kl:
            return False
        descend(self._optimizer, loss, self.config.max_grad_norm)
        return True

    def _loss(
        self, rows_BG: NDArray[np.int64], advantages_B: Tensor, old_BG: Tensor, log: dict[str, list[float]]
    ) -> tuple[Tensor, float]:
        """The loss of a minibatch, and the mean divergence of a group from the policy that it started from."""
        config = self.config
        log_prob_BG, entropy_BG = self.policy.evaluate(rows_BG)
        log_ratio_BG = log_prob_BG - old_BG
        policy_loss, entropy = clipped_group_loss(log_ratio_BG, advantages_B, config.clip_range), entropy_BG.mean()
        elite_loss = cloning_loss(self.policy, self.elites.group_devices, config.elite_smoothing).mean()
        loss = policy_loss - config.ent_coef * entropy + config.elite_coef * elite_loss
        with torch.no_grad():
            approx_kl = (log_ratio_BG.exp() - 1 - log_ratio_BG).mean()
            clip_fraction = ((log_ratio_BG.exp() - 1).abs() > config.clip_range).float().mean()
        figures = {"policy_gradient_loss": policy_loss, "entropy": entropy, "elite_loss": elite_loss, "loss": loss}
        figures |= {"approx_kl": approx_kl, "clip_fraction": clip_fraction}
        for name, value in figures.items():
            log[name].append(value.item())
        return loss, float(approx_kl)


def relative_advantages(rewards: NDArray[np.floating], *, normalize: bool) -> Tensor:
    """(B,) float32: rewards less their mean, over their standard deviation if `normalize`; 0 for one alone."""
    rewards_B = torch.from_numpy(np.asarray(rewards, dtype=np.float64))
    advantages_B = rewards_B - rewards_B.mean()
    if normalize and len(rewards_B) > 1:
        advantages_B = advantages_B / (rewards_B.std() + 1e-8)
    return advantages_B.float()


def clipped_group_loss(log_ratio_BG: Tensor, advantages_B: Tensor, clip_range: float) -> Tensor:
    """PPO's clipped surrogate (Schulman et al. 2017, equation 7), each group's ratio by itself, as a loss."""
    ratio_BG, advantages_B1 = log_ratio_BG.exp(), advantages_B[:, None]
    return -torch.min(advantages_B1 * ratio_BG, advantages_B1 * ratio_BG.clamp(1 - clip_range, 1 + clip_range)).mean()


Score = Callable[[NDArray[np.int32]], NDArray[np.floating]]
"""From placements (B, G) of groups to their rewards (B,)."""


def learn_many(
    policies: Sequence[GroupPolicy],
    scores: Sequence[Score],
    config: PPOConfig | None = None,
    *,
    num_rounds: int,
    num_samples: int = 16,
    seed: int = 0,
    on_update: Callable[[int, Mapping[str, float]], None] | None = None,
) -> list[GroupPPO]:
    """A learner for each policy, after `num_rounds` updates on each problem in turn, with one optimizer for all.

    GDP's batch training (Zhou et al. 2019, section 3.3): the network is shared, everything else is by problem. Rewards
    are compared within a problem, since a step of one says nothing of a step of another; so are the best placements.

    Args:
        policies: of one network, each made for a problem (`GnnPolicy(other, network=first.network)`).
        scores: the scorer of each policy's placements.
        config: of PPO.
        num_rounds: updates on each problem.
        num_samples: placements an update.
        seed: of the order of problems within a round, and of minibatches.
        on_update: told the index of the policy and the figures of its update.

    Raises:
        InvalidValue: no policies, another number of scores, or networks that are not shared.
    """
    config = config or PPOConfig()
    refuse_if(
        not policies or len(scores) != len(policies),
        "scores",
        len(scores),
        f"one for each of {len(policies)} policies",
        where="learn_many",
    )
    shared = list(policies[0].parameters())
    refuse_if(
        any([id(one) for one in policy.parameters()] != [id(one) for one in shared] for policy in policies[1:]),
        "policies",
        "networks of their own",
        "one network",
        where="learn_many",
        hint="Give the network of the first policy to the others.",
    )
    optimizer = Adam(shared, lr=config.learning_rate)
    learners = [
        GroupPPO(policy, config, seed=seed + index, optimizer=optimizer) for index, policy in enumerate(policies)
    ]
    generator = np.random.default_rng(seed)
    for turn in range(num_rounds):
        for index in generator.permutation(len(policies)).tolist():
            rows = policies[index].sample(num_samples)
            figures = learners[index].update(rows, scores[index](rows), progress=turn / num_rounds)
            if on_update is not None:
                on_update(index, figures)
    return learners
