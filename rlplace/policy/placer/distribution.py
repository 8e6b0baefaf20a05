"""`GroupCategorical`: a device for each of G groups, as one batched distribution."""

from __future__ import annotations

from typing import Any

import torch
from stable_baselines3.common.distributions import Distribution
from torch import Tensor

LEAST_LOG_PROB = -1e30
"""Below it a log-probability is taken for minus infinity: a finite stand-in keeps gradients finite."""


class GroupCategorical(Distribution):
    """Independent categorical distributions over D devices, for B samples of G groups.

    Stable-Baselines3's `MultiCategoricalDistribution` holds one `Categorical` a group in a list, which at 256 groups
    costs fifteen times as much. Log-probabilities and entropies stay apart by group, (B, G): a ratio of sums over
    hundreds of groups explodes where ratios of single groups do not. A logit of minus infinity bars its device: it has
    no probability, adds nothing to the entropy, and is never drawn.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        """An empty distribution; `generator` draws the samples (torch's own by default)."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = generator
        self.log_probs_BGD: Tensor = torch.zeros(0, 0, 0)

    def proba_distribution_net(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """The layer that makes logits: none, as the policy gives logits itself."""
        return torch.nn.Identity()

    def proba_distribution(self, logits_BGD: Tensor) -> GroupCategorical:
        """This distribution, with the given logits (B, G, D)."""
        self.log_probs_BGD = torch.log_softmax(logits_BGD, dim=-1)
        return self

    def group_log_prob(self, actions_BG: Tensor) -> Tensor:
        """(B, G) log-probability of the device of each group."""
        log_probs_BGD = self.log_probs_BGD.expand(len(actions_BG), -1, -1)
        return log_probs_BGD.gather(-1, actions_BG.long()[..., None])[..., 0]

    def group_entropy(self) -> Tensor:
        """(B, G) entropy of each group, in nats."""
        return -(self.log_probs_BGD.exp() * self.log_probs_BGD.clamp(min=LEAST_LOG_PROB)).sum(-1)

    def log_prob(self, actions_BG: Tensor) -> Tensor:
        """(B,) log-probability of whole placements."""
        return self.group_log_prob(actions_BG).sum(-1)

    def entropy(self) -> Tensor:
        """(B,) entropy of whole placements, in nats."""
        return self.group_entropy().sum(-1)

    def sample(self) -> Tensor:
        """(B, G) int64 devices, drawn (by Gumbel-max, so that one draw serves any D)."""
        uniform_BGD = torch.rand(self.log_probs_BGD.shape, generator=self.generator, dtype=torch.float64)
        return (self.log_probs_BGD.detach().double() - (-uniform_BGD.log()).log()).argmax(-1)

    def mode(self) -> Tensor:
        """(B, G) int64, the likeliest device of each group; the lower index where two are equal."""
        return self.log_probs_BGD.argmax(-1)

    def actions_from_params(self, logits_BGD: Tensor, deterministic: bool = False) -> Tensor:
        """(B, G) devices, drawn or likeliest, for the given logits."""
        return self.proba_distribution(logits_BGD).get_actions(deterministic=deterministic)

    def log_prob_from_params(self, logits_BGD: Tensor) -> tuple[Tensor, Tensor]:
        """(B, G) drawn devices and (B,) their log-probability, for the given logits."""
        actions_BG = self.actions_from_params(logits_BGD)
        return actions_BG, self.log_prob(actions_BG)
