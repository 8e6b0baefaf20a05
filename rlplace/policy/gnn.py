"""`GnnPolicy`: a distribution over placements of one problem, from a network that fits any.

`AssignmentNetwork`: logits of every group on every device, from rounds of soft assignment.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor, nn

from rlplace.env.problem_features import (
    DEVICE_FEATURES,
    EDGE_FEATURES,
    LINK_FEATURES,
    NODE_FEATURES,
    PAIR_FEATURES,
    SUMMARY,
    problem_features,
)
from rlplace.measure.problem import Problem
from rlplace.policy.base import IndependentPolicy, ProblemTensors, seeded_weights
from rlplace.policy.checkpoint import set_tensors
from rlplace.policy.options import GnnConfig
from rlplace.policy.placer import GraphEncoder, MessageLayer


class GnnPolicy(IndependentPolicy):
    """All groups at once, independent given the graph network's logits.

    After GDP (Zhou et al. 2019, arXiv:1910.01578): a graph network over the groups and a placer that fits any graph,
    trained on one graph or, with one network for several policies (`learn_many`), on many. GDP's placer names its
    devices; this one compares each group with each device by their features: the same weights place on any host.

    Devices that look alike would get the same logits, and every group would be as likely on each of them. So the policy
    marks them: the n-th of several equal devices gets the n-th of a list of random vectors, drawn once from the seed
    (random node features, Sato et al. 2021, arXiv:2002.03155). The log-probability stays a function of the placement.
    Permuting devices of different looks permutes the answer; permuting equal ones permutes it if their marks go along.

    Attributes:
        network: the weights, which several policies may share.
        problem: the features of what is placed.
        marks: (D, marks) float32.
    """

    kind = "gnn"
    config: GnnConfig
    marks: Tensor

    def __init__(
        self,
        problem: Problem,
        config: GnnConfig | None = None,
        *,
        seed: int = 0,
        network: AssignmentNetwork | None = None,
    ) -> None:
        """A policy for `problem`; before it has learned anything every device is as likely, whatever the seed.

        Args:
            problem: what is placed.
            config: the size of the network.
            seed: of its weights, of the marks and of the samples.
            network: to be shared with another policy of the same options; a new one by default.
        """
        super().__init__(problem.group_allowed, seed)
        self.config = config or GnnConfig()
        self.problem = ProblemTensors.of(problem_features(problem))
        if network is None:
            with seeded_weights(seed):
                network = AssignmentNetwork(self.config)
        self.network = network
        most = int(self.problem.twins.max()) + 1
        table = np.random.default_rng(seed).standard_normal((most, self.config.marks))
        self.register_buffer("marks", torch.from_numpy(table).float()[self.problem.twins])

    def logits(self) -> Tensor:
        """(G, D) logits at temperature 1; minus infinity where a group may not be."""
        logits_GD: Tensor = self.network(self.problem, self.marks)
        return logits_GD.masked_fill(~self.problem.allowed, -torch.inf)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Takes over the network that a policy of this or of another problem saved, and its marks where they fit.

        Raises:
            FileProblem: a file is missing, malformed, or of another policy.
            InvalidValue: the options there are not those of this policy.
        """
        tensors, own = self.load_weights(path), {"temperature": self.temperature}
        if "marks" in tensors and tensors["marks"].shape == self.marks.shape:
            own["marks"] = self.marks
        set_tensors(own, tensors, path)


FIELD_FEATURES = ("reads", "readers", "load", "fullness")
"""What a group sees of a device while all groups are likely to be here or there: which shares of what it reads, and of
what reads it, are there, and the device's load and memory."""


class AssignmentNetwork(nn.Module):
    """A graph network over groups and devices; its weights know nothing of how many there are of either.

    Groups first hear from each other (`GraphEncoder`). Then come rounds: each group has a probability for every device,
    even at first; from it each device learns what is likely to be there, what it adds up to, and what the devices
    beside it look like; each group learns where its neighbours are likely to be; and new probabilities follow. The last
    round's logits are the answer. Unrolled, this is a mean-field approximation whose updates are learned.

    GDP (Zhou et al. 2019) has a transformer over the groups instead, whose attention takes the place of these rounds,
    and a softmax over D named devices.
    """

    def __init__(self, config: GnnConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.groups = GraphEncoder(len(NODE_FEATURES), len(EDGE_FEATURES), hidden, config.num_layers)
        width = len(DEVICE_FEATURES) + len(SUMMARY) + config.marks
        self.devices = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.rounds = nn.ModuleList(Round(hidden) for _ in range(config.num_rounds))
        nn.init.zeros_(self.rounds[-1].score.weight)  # type: ignore[union-attr, arg-type]
        nn.init.zeros_(self.rounds[-1].query.weight)  # type: ignore[union-attr, arg-type]

    def forward(self, problem: ProblemTensors, marks_DM: Tensor) -> Tensor:
        """(G, D) logits, barred devices not yet masked; zeros before anything was learned.

        Args:
            problem: G groups on D devices.
            marks_DM: (D, marks) what tells equal devices apart.
        """
        h_GH = self.groups(problem.nodes, problem.edges, problem.edge_source, problem.edge_target)
        u_DH = self.devices(torch.cat([problem.devices, marks_DM], dim=-1))
        logits_GD = torch.zeros(problem.num_groups, problem.num_devices)
        for step in self.rounds:
            share_GD = torch.softmax(logits_GD.masked_fill(~problem.allowed, -torch.inf), dim=-1)
            h_GH, u_DH, logits_GD = step(problem, h_GH, u_DH, share_GD)
        return logits_GD


class Round(nn.Module):
    """Devices look at what is likely on them, groups at where others are likely to be, and choose anew."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.here = nn.Linear(hidden, hidden)
        self.route = nn.Linear(hidden + len(LINK_FEATURES), hidden)
        self.device = nn.Sequential(nn.Linear(3 * hidden + 2, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.device_norm = nn.LayerNorm(hidden)
        self.home = nn.Linear(hidden, hidden)
        self.messages = MessageLayer(len(EDGE_FEATURES), hidden)
        self.query, self.key = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.of_group, self.of_device = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden, bias=False)
        self.of_pair = nn.Linear(len(PAIR_FEATURES) + len(FIELD_FEATURES), hidden, bias=False)
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(
        self, problem: ProblemTensors, h_GH: Tensor, u_DH: Tensor, share_GD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Groups (G, H), devices (D, H) and logits (G, D), given the share of each group on each device."""
        field_GDF = fields(problem, share_GD)
        weight_GD = share_GD * problem.load
        there_DH = weight_GD.T @ self.here(h_GH) / weight_GD.sum(dim=0).clamp(min=1e-6)[:, None]
        beside_DH = self._beside(problem, u_DH)
        seen_DH = torch.cat([u_DH, there_DH, beside_DH, field_GDF[0, :, 2:]], dim=-1)
        u_DH = self.device_norm(u_DH + self.device(seen_DH))
        h_GH = self.messages(h_GH + share_GD @ self.home(u_DH), problem.edges, problem.edge_source, problem.edge_target)
        pair_GDH = self.of_pair(torch.cat([problem.pairs, field_GDF], dim=-1))
        hidden_GDH = torch.relu(self.of_group(h_GH)[:, None] + self.of_device(u_DH)[None] + pair_GDH)
        match_GD = self.query(h_GH) @ self.key(u_DH).T / h_GH.shape[1] ** 0.5
        return h_GH, u_DH, self.score(hidden_GDH)[..., 0] + match_GD

    def _beside(self, problem: ProblemTensors, u_DH: Tensor) -> Tensor:
        """(D, H): the mean of what other devices look like over the routes from them; zeros for a device alone."""
        count = problem.num_devices
        from_DDH = u_DH[:, None].expand(-1, count, -1)
        told_DDH = torch.relu(self.route(torch.cat([from_DDH, problem.links], dim=-1)))
        others_DD1 = (~torch.eye(count, dtype=torch.bool))[..., None]
        return (told_DDH * others_DD1).sum(dim=0) / max(count - 1, 1)


def fields(problem: ProblemTensors, share_GD: Tensor) -> Tensor:
    """(G, D, 4) `FIELD_FEATURES`, with (G, D) the share of each group on each device."""
    reads_GD = _share_of(share_GD, problem.edge_source, problem.edge_target, problem.edge_weight)
    readers_GD = _share_of(share_GD, problem.edge_target, problem.edge_source, problem.edge_weight)
    load_GD = (share_GD * problem.load).sum(dim=0).expand_as(share_GD)
    fullness_GD = (share_GD * problem.held).sum(dim=0).expand_as(share_GD)
    return torch.stack([reads_GD, readers_GD, torch.log1p(load_GD), fullness_GD], dim=-1)


def _share_of(share_GD: Tensor, from_K: Tensor, to_K: Tensor, weight_K: Tensor) -> Tensor:
    """(G, D): of what comes to each group over its edges, the share that comes from each device."""
    total_GD = torch.zeros_like(share_GD).index_add(0, to_K, share_GD[from_K] * weight_K[:, None])
    weight_G = torch.zeros(len(share_GD)).index_add(0, to_K, weight_K)
    return total_GD / weight_G.clamp(min=1e-9)[:, None]
