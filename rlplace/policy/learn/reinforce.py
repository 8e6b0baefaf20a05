"""`Reinforce`: the learner of Mirhoseini et al. 2017, for any policy with log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlplace.errors import InvalidValue
from rlplace.policy.base import GroupPolicy, LearnedPolicy, Policy, StartsSomewhere
from rlplace.policy.learn.imitation import EliteLearner, cloning_loss, descend, settle
from rlplace.policy.learn.state import finite
from rlplace.policy.options import ReinforceConfig

IMITATION_STEPS, IMITATION_RATE = 100, 1e-2
"""Most gradient steps (Adam) of an imitation, and their learning rate."""
IMITATED = 0.05
"""Cross-entropy of a group, in nats, at which a placement is known well enough."""
ELITE_SMOOTHING = 0.02
"""Probability that cloning the best placement leaves to other devices."""


@runtime_checkable
class Noisy(Protocol):
    """A policy whose samples can be drawn with noise on the logits."""

    logit_noise: float


class Reinforce(EliteLearner):
    """REINFORCE (Williams 1992) as Mirhoseini et al. 2017 (section 3.1) use it.

    The gradient is that of the mean over a batch of (reward - baseline) log-probability, with a moving average of
    rewards for a baseline, scaled down to a norm of 1, in steps of Adam. A placement that fails has a reward too, the
    failing signal of the reward; after a share of learning (5,000 steps in the paper) such placements teach nothing any
    more, so that luck cannot unlearn what runs. At first samples are drawn with noise on the logits, of half their size
    as in the program that the authors released later: without it the policy is soon sure of one device for everything.

    What differs from the paper: the baseline begins with the mean of the first batch, not with the failing signal,
    which would make the first samples look good, whatever they are; and one process samples, not twenty.

    Where every group is drawn by itself, the expected reward has as many local optima as there are placements that no
    single move improves (20 of 729 on a problem of six groups and three devices). The gradient ends in one of them, and
    a policy that has become sure samples nothing else. `flips` keeps it trying, `elite_coef` pulls it towards the best
    placement seen as well (self-imitation, Oh et al. 2018); `GroupPPO` has both by default, the paper neither.

    Attributes:
        baseline: moving average of the rewards so far; None before the first.
    """

    policy: LearnedPolicy

    def __init__(self, policy: Policy, config: ReinforceConfig | None = None) -> None:
        """A learner for `policy`, which learns in place.

        Args:
            policy: anything with log-probabilities and parameters; one with `logit_noise` is told how much to use.
            config: how.

        Raises:
            InvalidValue: the policy has no parameters, or no log-probabilities by group where `config` needs them.
        """
        if not isinstance(policy, LearnedPolicy):
            raise InvalidValue("policy", type(policy).__name__, "one with `parameters()`", where="learner reinforce")
        self.config = config or ReinforceConfig()
        if not isinstance(policy, GroupPolicy):
            for name in ("ent_coef", "elite_coef"):
                if value := getattr(self.config, name):
                    raise InvalidValue(name, value, "0 for a policy without `evaluate`", where="learner reinforce")
        super().__init__(policy, learning_rate=self.config.learning_rate, num_elites=1)
        self.baseline: float | None = None
        self._set_noise(0.0)

    def imitate(self, group_devices: NDArray[np.integer]) -> None:
        """Makes placements (G,) or (M, G) likely, by their cross-entropy; a policy that starts somewhere starts there.

        Raises:
            InvalidValue: one that the policy gives no probability, as where pins bar it.
        """
        rows = np.atleast_2d(group_devices)
        if isinstance(self.policy, StartsSomewhere):
            self.policy.start_from(rows[0])
            return
        optimizer = torch.optim.Adam(self.policy.parameters(), lr=IMITATION_RATE)
        for _ in range(IMITATION_STEPS):
            loss = -self.policy.log_prob(rows).mean() / max(rows.shape[1], 1)
            if not torch.isfinite(loss):
                expected = "placements that the policy gives a probability"
                raise InvalidValue("group_devices", "one that is impossible", expected, where="imitate")
            if loss.item() < IMITATED:
                break
            descend(optimizer, loss)

    def update(
        self,
        group_devices: NDArray[np.integer],
        rewards: NDArray[np.floating],
        *,
        progress: float = 0.0,
        ran: NDArray[np.bool_] | None = None,
    ) -> dict[str, float]:
        """One gradient step on placements (B, G), sampled from the policy, and their rewards (B,).

        Args:
            group_devices: devices of groups.
            rewards: of each placement, that of a failed one the failing signal.
            progress: share of learning that is done, 0 to 1.
            ran: (B,) which placements did not fail; all by default.
        """
        self._set_noise(progress)
        rewards_B = np.asarray(rewards, dtype=np.float64)
        ran_B = np.ones(len(rewards_B), dtype=np.bool_) if ran is None else np.asarray(ran)
        self.elites.add(group_devices, rewards_B)
        figures = {"mean_reward": float(rewards_B.mean()), "failed": float(1.0 - ran_B.mean())}
        if progress >= self.config.failing_until:
            group_devices, rewards_B = np.asarray(group_devices)[ran_B], rewards_B[ran_B]
        if not len(rewards_B):
            return figures
        mean = float(rewards_B.mean())
        baseline = mean if self.baseline is None else self.baseline
        loss, parts = self._loss(group_devices, torch.from_numpy(rewards_B - baseline))
        norm = descend(self._optimizer, loss, self.config.max_grad_norm)
        settle(self.policy, self.config.flips, self.elites)
        self.baseline = self.config.baseline_decay * baseline + (1.0 - self.config.baseline_decay) * mean
        return figures | parts | {"loss": loss.item(), "baseline": self.baseline, "gradient_norm": norm}

    def forget(self) -> None:
        """Forgets the baseline and the best placement, as when rewards come to mean something else."""
        super().forget()
        self.baseline = None

    def facts(self) -> dict[str, Any]:
        """The baseline, and the noise of the policy's samples."""
        return {"baseline": self.baseline, "logit_noise": getattr(self.policy, "logit_noise", None)}

    def load_facts(self, facts: Mapping[str, Any]) -> None:
        """Takes the `facts` of another one."""
        self.baseline = None if facts["baseline"] is None else finite(facts["baseline"])
        if isinstance(self.policy, Noisy):
            self.policy.logit_noise = finite(facts["logit_noise"])

    def _loss(self, group_devices: NDArray[np.integer], advantages_B: Tensor) -> tuple[Tensor, dict[str, float]]:
        """-(R - b) log p, the mean over the batch, with an entropy bonus and self-imitation, and what these are."""
        config, figures = self.config, dict[str, float]()
        if not isinstance(self.policy, GroupPolicy) or not (config.ent_coef or config.elite_coef):
            return -(advantages_B * self.policy.log_prob(group_devices)).mean(), figures
        log_prob_BG, entropy_BG = self.policy.evaluate(group_devices)
        loss = -(advantages_B * log_prob_BG.sum(dim=-1)).mean()
        if config.ent_coef:
            entropy = entropy_BG.mean()
            loss = loss - config.ent_coef * entropy
            figures["entropy"] = entropy.item()
        if config.elite_coef:
            elite_loss = cloning_loss(self.policy, self.elites.group_devices, ELITE_SMOOTHING).mean()
            loss = loss + config.elite_coef * elite_loss
            figures["elite_loss"] = elite_loss.item()
        return loss, figures

    def _set_noise(self, progress: float) -> None:
        if isinstance(self.policy, Noisy):
            self.policy.logit_noise = self.config.logit_noise if progress < self.config.noise_until else 0.0
