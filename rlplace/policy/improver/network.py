"""`ImproverNetwork`: logits of a group on every device, from the graph and from where everything is just then."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlplace.env.problem_features import DEVICE_FEATURES, EDGE_FEATURES, NODE_FEATURES, PAIR_FEATURES, SUMMARY
from rlplace.policy.improver.config import ImproverConfig
from rlplace.policy.improver.state import STATE_FEATURES
from rlplace.policy.placer.gnn import GraphEncoder
from rlplace.policy.problem_tensors import ProblemTensors


class ImproverNetwork(nn.Module):
    """A score of a group on a device; its weights know nothing of how many there are of either.

    The graph is encoded once: `encode` gives what depends on the problem alone. A step of a pass then adds what depends
    on the placement so far, `STATE_FEATURES`, and takes one hidden layer to a score: small enough for a step of each of
    256 groups.
    """

    def __init__(self, config: ImproverConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.groups = GraphEncoder(len(NODE_FEATURES), len(EDGE_FEATURES), hidden, config.num_layers)
        self.of_group = nn.Linear(hidden, hidden)
        self.of_device = nn.Linear(len(DEVICE_FEATURES) + len(SUMMARY), hidden, bias=False)
        self.of_pair = nn.Linear(len(PAIR_FEATURES), hidden, bias=False)
        self.of_state = nn.Linear(len(STATE_FEATURES), hidden, bias=False)
        self.score = nn.Linear(hidden, 1, bias=False)
        nn.init.zeros_(self.score.weight)

    def encode(self, problem: ProblemTensors) -> Tensor:
        """(G, D, H): what a group and a device are to each other, wherever everything else is."""
        h_GH = self.groups(problem.nodes, problem.edges, problem.edge_source, problem.edge_target)
        device_DH = self.of_device(problem.devices)
        pairs_GDH: Tensor = self.of_group(h_GH)[:, None] + device_DH[None] + self.of_pair(problem.pairs)
        return pairs_GDH

    def forward(self, pairs_GDH: Tensor, state_GDS: Tensor) -> Tensor:
        """(..., D) scores, of `encode` for some groups (..., D, H) and their state features (..., D, S)."""
        scores_GD: Tensor = self.score(torch.relu(pairs_GDH + self.of_state(state_GDS)))[..., 0]
        return scores_GD
