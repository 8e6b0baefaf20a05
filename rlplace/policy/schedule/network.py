"""`ScheduleNetwork`: what the policy `schedule` learns; no weight of it depends on a problem's groups or devices."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlplace.env.list_schedules import ESTIMATES, FEATURES
from rlplace.env.sequential import DECISION_FEATURES
from rlplace.policy.module import seeded_weights
from rlplace.policy.schedule.components import Components
from rlplace.policy.schedule.group_features import GROUP_FEATURES
from rlplace.policy.schedule.summary import SUMMARY

ALLOWED = DECISION_FEATURES.index("allowed")
RELATED = len(ESTIMATES)
"""Estimates of a placement as the ranker sees them, see `related`."""

GAIN = 10.0
"""What the correction is multiplied by: the smaller weights are for what they do, the faster they learn to do it."""
TAIL = 2.0
"""Exponent of the tail of the first distribution: devices that the weights think little of stay possible."""
MARKS = 4
"""Numbers that tell equal devices apart."""


class ScheduleNetwork(nn.Module):
    """Four small networks over what is the same for all problems.

    - `gate`: which components (a grouping and weights of the list scheduler) suit a problem: from its summary the log
      of the step time that each leads to, up to a constant.
    - `ranker`: what the simulator will say of a placement whose list schedule is known, as the log of the step time
      over the schedule's end: queues on links, launches and memory make the difference.
    - `scorer`: the value of a device for the group that is decided: the weights of a component, moved by `hyper` as the
      problem's summary suggests, times the features of the partial schedule, and a correction that is no linear one
      (which tells equal devices apart by random marks: Sato et al. 2021, arXiv:2002.03155).
    - `priority`: how much earlier than by the list order a group is decided; no learner here moves it from 0.

    All but the components are 0 at first: a new network is the list scheduler with known weights.

    Attributes:
        grouping, weights: (C,) int64 and (C, 9) float64, the components.
        scenarios: (S, C) float32, how the log step times of components missed the ranker's guess on S problems: which
            of them fail together. Empty where nothing is known.

    Args:
        components: C guesses.
        hidden: width of the networks.
        seed: of the first weights.
        num_scenarios: S.
    """

    grouping: Tensor
    weights: Tensor
    scenarios: Tensor
    summary_mean: Tensor
    summary_scale: Tensor

    def __init__(self, components: Components, hidden: int = 32, *, seed: int = 0, num_scenarios: int = 0) -> None:
        super().__init__()
        num_summary, num_components = len(SUMMARY), len(components)
        self.hidden = hidden
        with seeded_weights(seed):
            self.gate = _mlp(num_summary, hidden, num_components)
            self.ranker = _mlp(RELATED + num_summary, hidden, 1)
            self.hyper = _zero(nn.Linear(num_summary, len(FEATURES)))
            self.correction = _mlp(len(DECISION_FEATURES) + MARKS + len(GROUP_FEATURES) + num_summary, hidden, 1)
            self.priority = _mlp(len(GROUP_FEATURES) + num_summary, hidden, 1)
        self.register_buffer("grouping", torch.from_numpy(components.grouping.copy()))
        self.register_buffer("weights", torch.from_numpy(components.weights.copy()))
        self.register_buffer("scenarios", torch.zeros(num_scenarios, num_components))
        self.register_buffer("summary_mean", torch.zeros(num_summary))
        self.register_buffer("summary_scale", torch.ones(num_summary))

    @property
    def components(self) -> Components:
        """The C guesses."""
        return Components(self.grouping.numpy(), self.weights.numpy())

    def normalised(self, summary: Tensor) -> Tensor:
        """(..., P) summaries of problems, moved and scaled as those that the network was trained on."""
        return ((summary - self.summary_mean) / self.summary_scale).clamp(-4.0, 4.0)

    def component_scores(self, summary: Tensor) -> Tensor:
        """(..., C) expected log step times of the components for summaries (..., P), up to a constant."""
        scores: Tensor = self.gate(self.normalised(summary))
        return scores

    def log_times(self, estimates: Tensor, summary: Tensor) -> Tensor:
        """(...,) expected log step times of placements with `ESTIMATES` (..., 6), on problems of summaries (..., P)."""
        correction: Tensor = self.ranker(torch.cat((related(estimates), self.normalised(summary)), dim=-1))
        return correction[..., 0] + estimates[..., 0].clamp(min=1e-12).log().float()

    def device_scores(
        self, features: Tensor, marks: Tensor, groups: Tensor, summary: Tensor, component: int, scale: Tensor
    ) -> Tensor:
        """(..., D) logits of devices; the same network for every device.

        Args:
            features: (..., D, F) of the partial schedule.
            marks: (D, 4) of the devices.
            groups: (..., 16) `GROUP_FEATURES` of the group that is decided.
            summary: (P,) of the problem.
            component: whose weights are the first guess.
            scale: what the weighted sum of features is divided by.
        """
        seen = self.normalised(summary)
        linear = heavy_tailed(self.margins(features, summary, component) / scale)
        context = torch.cat((groups, seen.expand(*groups.shape[:-1], -1)), dim=-1)
        context = context[..., None, :].expand(*features.shape[:-1], -1)
        squeezed = features.sign() * features.abs().log1p()
        marks = marks.expand(*features.shape[:-1], -1)
        correction: Tensor = self.correction(torch.cat((squeezed, marks, context), dim=-1))
        return linear + GAIN * correction[..., 0]

    def margins(self, features: Tensor, summary: Tensor, component: int) -> Tensor:
        """(..., D) by how much a component's weights, moved by `hyper`, think less of devices than of the best one.

        Args:
            features: (..., D, F) of the partial schedule.
            summary: (P,) of the problem.
            component: whose weights.
        """
        weights = self.weights[component].float() + self.hyper(self.normalised(summary))
        costs: Tensor = (features[..., : len(FEATURES)] * weights).sum(dim=-1)
        least = costs.masked_fill(features[..., ALLOWED] == 0, torch.inf).amin(dim=-1, keepdim=True)
        return (costs - least).clamp(min=0.0)

    def priorities(self, groups: Tensor, summary: Tensor) -> Tensor:
        """(G,) how much earlier than by the list order groups of features (G, 16) are decided, in shares of all."""
        seen = self.normalised(summary).expand(len(groups), -1)
        earlier: Tensor = self.priority(torch.cat((groups, seen), dim=-1))
        return earlier[..., 0]


def heavy_tailed(margins: Tensor) -> Tensor:
    """(...,) logits of margins (...,) in units of the scale: the best has 0, and far ones fall as a power."""
    return -TAIL * (margins / TAIL).log1p()


def related(estimates: Tensor) -> Tensor:
    """(..., 6) float32: `ESTIMATES` (..., 6), without units: over the end of the list schedule where they are seconds.

    Each but the number of copies is cut where more would make no difference.
    """
    finish = estimates[..., :1].clamp(min=1e-12)
    shares = estimates[..., 1:4] / finish
    memory = estimates[..., 5:]
    parts = (
        shares[..., :1].clamp(max=4.0),
        shares[..., 1:2].clamp(max=4.0),
        (shares[..., 2:3] + 1e-3).log().clamp(max=4.0),
        estimates[..., 4:5].log1p() / 5.0,
        memory.clamp(max=3.0),
        (8.0 * (memory - 0.9)).sigmoid(),
    )
    return torch.cat(parts, dim=-1).float()


def _mlp(num_in: int, hidden: int, num_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_in, hidden), nn.Tanh(), _zero(nn.Linear(hidden, num_out)))


def _zero(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
