"""`GroupPPO`: proximal policy optimisation with a ratio for each group, and with self-imitation.

`learn_many`: one network learns on several problems at once.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Adam, Optimizer

from rlplace.errors import InvalidValue
from rlplace.policy.config import PPOConfig
from rlplace.policy.learn.clone import cloning_loss, imitate
from rlplace.policy.learn.elites import Elites, settle
from rlplace.policy.learn.state import LearnerState, learner_state, load_learner_state
from rlplace.policy.protocols import GroupPolicy


class GroupPPO:
    """Proximal policy optimisation (Schulman et al. 2017) for placements of many groups at once.

    - Every episode is one placement and all start in the same state, so the advantage is the reward less the mean of
      the batch, over its spread: a better baseline than any learned value.
    - The surrogate is clipped for each group and averaged over groups, since the ratio of a whole placement, a product
      over hundreds of groups, explodes.
    - Besides, the policy clones the best placements that it has seen (self-imitation, Oh et al. 2018; with only this
      term it would be a cross-entropy method).
    - Where the policy lets itself be told, its samples stay within about `flips` groups of its mode, and it starts from
      the best placement seen.

    Attributes:
        policy: what learns, in place.
        elites: the best placements seen, which the policy clones.
    """

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
            policy: learns, in place.
            config: how.
            seed: of the order of minibatches.
            optimizer: of the policy's parameters, where several learners share them; an Adam of its own by default.
        """
        self.policy, self.config = policy, config or PPOConfig()
        self.elites = Elites(self.config.num_elites)
        self._optimizer = optimizer or Adam(policy.parameters(), lr=self.config.learning_rate)
        self._rng = np.random.default_rng(seed)
        self._num_updates = 0

    def imitate(self, group_devices: NDArray[np.integer]) -> None:
        """Clones placements of groups, (G,) or (M, G), before learning from rewards."""
        imitate(self.policy, group_devices)
        settle(self.policy, self.config.flips)

    def forget(self) -> None:
        """Forgets the best placements seen, as when rewards come to mean something else."""
        self.elites.clear()

    def update(
        self, group_devices: NDArray[np.integer], rewards: NDArray[np.floating], *, progress: float = 0.0
    ) -> dict[str, float]:
        """One update on placements (B, G) with their rewards (B,); its losses, entropy and so on by name.

        They need not come from this policy: the ratio is to the policy as it is now.
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
        settle(self.policy, self.config.flips, self.elites)
        figures = {name: float(np.mean(values)) for name, values in log.items()}
        return figures | {"best_reward": float(self.elites.rewards[0]), "n_updates": float(self._num_updates)}

    def state(self) -> LearnerState:
        """All that it and its policy need to go on."""
        facts = {"shuffling": self._rng.bit_generator.state, "n_updates": self._num_updates}
        return learner_state(self.policy, self._optimizer, self.elites, facts)

    def load_state(self, state: LearnerState) -> None:
        """Goes on from the state of another one, made for the same problem with the same options.

        Raises:
            KeyError, RuntimeError, ValueError: it is of another policy.
        """
        load_learner_state(state, self.policy, self._optimizer, self.elites)
        self._rng.bit_generator.state = state.facts["shuffling"]
        self._num_updates = operator.index(state.facts["n_updates"])

    def _minibatches(self, num_rows: int) -> Iterator[NDArray[np.int64]]:
        size = self.config.batch_size
        if size is None or size >= num_rows:
            yield np.arange(num_rows)
            return
        order = self._rng.permutation(num_rows)
        for first in range(0, num_rows, size):
            yield order[first : first + size]

    def _step(
        self, rows_BG: NDArray[np.int64], advantages_B: Tensor, old_BG: Tensor, log: dict[str, list[float]]
    ) -> bool:
        """Takes a gradient step; False, and no step, where the policy has gone too far from the one that sampled."""
        loss, approx_kl = self._loss(rows_BG, advantages_B, old_BG, log)
        if self.config.target_kl is not None and approx_kl > 1.5 * self.config.target_kl:
            return False
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.config.max_grad_norm)
        self._optimizer.step()
        return True

    def _loss(
        self, rows_BG: NDArray[np.int64], advantages_B: Tensor, old_BG: Tensor, log: dict[str, list[float]]
    ) -> tuple[Tensor, float]:
        """The loss of a minibatch, and the mean divergence of a group from the policy that it started from."""
        config = self.config
        log_prob_BG, entropy_BG = self.policy.evaluate(rows_BG)
        log_ratio_BG = log_prob_BG - old_BG
        policy_loss = clipped_group_loss(log_ratio_BG, advantages_B, config.clip_range)
        entropy = entropy_BG.mean()
        elite_loss = cloning_loss(self.policy, self.elites.group_devices, config.elite_smoothing).mean()
        loss = policy_loss - config.ent_coef * entropy + config.elite_coef * elite_loss
        with torch.no_grad():
            approx_kl = float((log_ratio_BG.exp() - 1 - log_ratio_BG).mean())
            clip_fraction = float(((log_ratio_BG.exp() - 1).abs() > config.clip_range).float().mean())
        for name, value in (
            ("policy_gradient_loss", policy_loss.item()),
            ("entropy", entropy.item()),
            ("elite_loss", elite_loss.item()),
            ("approx_kl", approx_kl),
            ("clip_fraction", clip_fraction),
            ("loss", loss.item()),
        ):
            log[name].append(value)
        return loss, approx_kl


def relative_advantages(rewards: NDArray[np.floating], *, normalize: bool) -> Tensor:
    """(B,) float32: rewards less their mean, over their standard deviation if `normalize`; 0 for one alone."""
    rewards_B = torch.from_numpy(np.asarray(rewards, dtype=np.float64))
    advantages_B = rewards_B - rewards_B.mean()
    if normalize and len(rewards_B) > 1:
        advantages_B = advantages_B / (rewards_B.std() + 1e-8)
    return advantages_B.float()


def clipped_group_loss(log_ratio_BG: Tensor, advantages_B: Tensor, clip_range: float) -> Tensor:
    """PPO's clipped surrogate (Schulman et al. 2017, equation 7), each group's ratio by itself, as a loss."""
    ratio_BG = log_ratio_BG.exp()
    advantages_B1 = advantages_B[:, None]
    clipped_BG = ratio_BG.clamp(1 - clip_range, 1 + clip_range)
    return -torch.min(advantages_B1 * ratio_BG, advantages_B1 * clipped_BG).mean()


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
        scores: what rewards the placements of each policy.
        config: of PPO.
        num_rounds: updates on each problem.
        num_samples: placements an update.
        seed: of the order of problems within a round, and of minibatches.
        on_update: told the index of the policy and the figures of its update.

    Raises:
        InvalidValue: no policies, another number of scores, or networks that are not shared.
    """
    config = config or PPOConfig()
    if not policies or len(scores) != len(policies):
        raise InvalidValue("scores", len(scores), f"one for each of {len(policies)} policies", where="learn_many")
    shared = list(policies[0].parameters())
    if any([id(one) for one in policy.parameters()] != [id(one) for one in shared] for policy in policies[1:]):
        hint = "Give the network of the first policy to the others."
        raise InvalidValue("policies", "networks of their own", "one network", where="learn_many", hint=hint)
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
