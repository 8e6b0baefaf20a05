"""Policies that place every group by itself, from a graph network over the groups.

`PlacerPolicy`: for one problem. `GnnPolicy`: for any problem, from `AssignmentNetwork`, which has logits of every group
on every device after rounds of soft assignment. `GraphEncoder`: message passing over the group graph.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from rlplace.env import graph_features
from rlplace.env.problem_features import (
    DEVICE_FEATURES,
    EDGE_FEATURES,
    LINK_FEATURES,
    NODE_FEATURES,
    PAIR_FEATURES,
    SUMMARY,
    problem_features,
)
from rlplace.measure import Problem
from rlplace.policy.base import (
    IndependentPolicy,
    ProblemTensors,
    device_marks,
    seeded_weights,
    set_tensors,
)
from rlplace.policy.options import GnnConfig, PlacerArchitecture


class PlacerPolicy(IndependentPolicy):
    """Places G groups of one problem; given a message-passing encoding of the group graph, they are independent.

    Attributes:
        features: the graph that is encoded, once for all samples.
        group_cost: (G, D) float32, seconds of each group on each device, in mean costs of a group.
        allowed: (G, D) bool, devices where each group may be.
    """

    kind = "placer"
    config: PlacerArchitecture

    def __init__(self, problem: Problem, config: PlacerArchitecture | None = None, *, seed: int = 0) -> None:
        """An untrained policy, in which every device is equally likely, for any seed."""
        super().__init__(problem.group_allowed, seed)
        self.config, features = config or PlacerArchitecture(), graph_features(problem)
        self.suits = {"features": features.names}
        arrays = features.node_features, features.edge_features, features.edge_source, features.edge_target
        self.features = tuple(map(torch.from_numpy, arrays))
        self.group_cost, self.allowed = torch.from_numpy(features.group_cost), torch.from_numpy(features.allowed.copy())
        widths = features.node_features.shape[1], features.edge_features.shape[1]
        with seeded_weights(seed):
            self.encoder = GraphEncoder(*widths, self.config.hidden, self.config.num_layers)
            self.device_net = nn.Linear(self.config.hidden, self.num_devices)
        nn.init.zeros_(self.device_net.weight)
        nn.init.zeros_(self.device_net.bias)
        self.table_GD = nn.Parameter(torch.zeros(self.num_groups, self.num_devices))

    def logits(self) -> Tensor:
        """(G, D) logits at temperature 1; minus infinity for forbidden devices."""
        logits_GD = self.device_net(self.encoder(*self.features)) + self.config.table_scale * self.table_GD
        return torch.masked_fill(logits_GD, ~self.allowed, -torch.inf)


def make_policy(problem: Problem, architecture: PlacerArchitecture | None = None, *, seed: int = 0) -> PlacerPolicy:
    """A new policy for a problem."""
    return PlacerPolicy(problem, architecture, seed=seed)


class GraphEncoder(nn.Module):
    """Encodes the G groups of a graph by rounds of messages along its edges, in both directions.

    A round: every edge makes a message of its own features and of the group it comes from; every group takes the mean
        of messages from the groups that it reads, and from those that read it, and adds the output of a layer on the
        three (residual, layer norm; cf. Gilmer et al. 2017, "Neural Message Passing for Quantum Chemistry").
    """

    def __init__(self, num_node_features: int, num_edge_features: int, hidden: int, num_layers: int) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(num_node_features, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.layers = nn.ModuleList(MessageLayer(num_edge_features, hidden) for _ in range(num_layers))

    def forward(self, nodes_GF: Tensor, edges_KF: Tensor, source_K: Tensor, target_K: Tensor) -> Tensor:
        """(G, H) encodings; computed once per graph, for any size of the batch."""
        h_GH: Tensor = self.embed(nodes_GF)
        for layer in self.layers:
            h_GH = layer(h_GH, edges_KF, source_K, target_K)
        return h_GH


class MessageLayer(nn.Module):
    """One round of messages, forward and backward along the edges."""

    def __init__(self, num_edge_features: int, hidden: int) -> None:
        super().__init__()
        self.send = nn.Linear(hidden, 2 * hidden)
        self.edge = nn.Linear(num_edge_features, 2 * hidden, bias=False)
        self.update = nn.Sequential(nn.Linear(3 * hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, h_GH: Tensor, edges_KF: Tensor, source_K: Tensor, target_K: Tensor) -> Tensor:
        """(G, H) encodings after the round."""
        down_GH, up_GH = self.send(h_GH).chunk(2, dim=-1)
        down_edge_KH, up_edge_KH = self.edge(edges_KF).chunk(2, dim=-1)
        read_GH = _mean_of(torch.relu(down_GH.index_select(0, source_K) + down_edge_KH), target_K, len(h_GH))
        readers_GH = _mean_of(torch.relu(up_GH.index_select(0, target_K) + up_edge_KH), source_K, len(h_GH))
        updated_GH: Tensor = self.norm(h_GH + self.update(torch.cat([h_GH, read_GH, readers_GH], dim=-1)))
        return updated_GH


def _mean_of(messages_KH: Tensor, ends_K: Tensor, num_groups: int) -> Tensor:
    total_GH = messages_KH.new_zeros(num_groups, messages_KH.shape[1]).index_add(0, ends_K, messages_KH)
    return total_GH / torch.bincount(ends_K, minlength=num_groups).clamp(min=1)[:, None]


class GnnPolicy(IndependentPolicy):
    """Places all groups at once; given the logits of the graph network, groups are independent.

    After GDP (Zhou et al. 2019, arXiv:1910.01578): a graph network over the groups and a placer that fits any graph,
    trained on one graph or, with one network for several policies (`learn_many`), on many. GDP's placer has named
    devices. This policy compares the features of each group with those of each device, so the same weights work for any
    host.

    Devices with equal features would get equal logits, and every group would have the same probability on each of them.
    So the policy marks devices: the n-th of several equal devices gets the n-th of a list of random vectors, drawn once
    from the seed (random node features, Sato et al. 2021, arXiv:2002.03155). The log-probability is still a function of
    the placement. A permutation of devices permutes the answer; for devices with equal features, the marks must be
    permuted, too.

    Attributes:
        network: the weights, which several policies may share.
        problem: the features of the problem to place.
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
        """A policy for `problem`. Without training every device is equally likely, for any seed.

        Args:
            problem: the problem to place.
            config: the size of the network.
            seed: of its weights, of the marks and of the samples.
            network: shared with another policy of the same options; a new network by default.
        """
        super().__init__(problem.group_allowed, seed)
        self.config = config or GnnConfig()
        features = problem_features(problem)
        self.problem = ProblemTensors.of(features)
        with seeded_weights(seed):
            self.network = network or AssignmentNetwork(self.config)
        self.register_buffer("marks", device_marks(features, self.config.marks, seed))

    def logits(self) -> Tensor:
        """(G, D) logits at temperature 1; minus infinity for forbidden devices."""
        return torch.masked_fill(self.network(self.problem, self.marks), ~self.problem.allowed, -torch.inf)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Loads the network of a saved policy of this or another problem, and its marks if they fit.

        Raises:
            FileProblem: a file is missing, malformed, or of another policy.
            InvalidValue: the saved options differ from those of this policy.
        """
        tensors = self.load_weights(path)
        if "marks" in tensors and tensors["marks"].shape == self.marks.shape:
            set_tensors({"marks": self.marks}, tensors, path)


FIELD_FEATURES = ("reads", "readers", "load", "fullness")
"""Features of a device for a group while all groups have probabilities: the shares of its inputs and of its readers
that are there, and the device's load and memory."""


class AssignmentNetwork(nn.Module):
    """A graph network over groups and devices; its weights know nothing of how many there are of either.

    Groups first hear from each other (`GraphEncoder`). Then come rounds: each group has a probability for every device,
    even at first; from it each device gets the groups that are likely there, their sums, and the states of the devices
    beside it; each group learns where its neighbours are likely to be; and new probabilities follow. The last round's
    logits are the answer. Unrolled, this is a mean-field approximation whose updates are learned.

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
            marks_DM: (D, marks) marks that tell equal devices apart.
        """
        h_GH = self.groups(problem.nodes, problem.edges, problem.edge_source, problem.edge_target)
        u_DH = self.devices(torch.cat([problem.devices, marks_DM], dim=-1))
        logits_GD = torch.zeros_like(problem.load)
        for step in self.rounds:
            share_GD = torch.softmax(logits_GD.masked_fill(~problem.allowed, -torch.inf), dim=-1)
            h_GH, u_DH, logits_GD = step(problem, h_GH, u_DH, share_GD)
        return logits_GD


class Round(nn.Module):
    """Devices look at their likely groups, groups at the likely devices of others, and choose anew."""

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
        seen_DH = torch.cat([u_DH, there_DH, self._beside(problem, u_DH), field_GDF[0, :, 2:]], dim=-1)
        u_DH = self.device_norm(u_DH + self.device(seen_DH))
        h_GH = self.messages(h_GH + share_GD @ self.home(u_DH), problem.edges, problem.edge_source, problem.edge_target)
        pair_GDH = self.of_pair(torch.cat([problem.pairs, field_GDF], dim=-1))
        hidden_GDH = torch.relu(self.of_group(h_GH)[:, None] + self.of_device(u_DH)[None] + pair_GDH)
        match_GD = self.query(h_GH) @ self.key(u_DH).T / h_GH.shape[1] ** 0.5
        return h_GH, u_DH, self.score(hidden_GDH)[..., 0] + match_GD

    def _beside(self, problem: ProblemTensors, u_DH: Tensor) -> Tensor:
        """(D, H): the mean of the states of other devices over the routes from them; zeros for a device alone."""
        count = len(problem.devices)
        told_DDH = torch.relu(self.route(torch.cat([u_DH[:, None].expand(-1, count, -1), problem.links], dim=-1)))
        return (told_DDH * (~torch.eye(count, dtype=torch.bool))[..., None]).sum(dim=0) / max(count - 1, 1)


def fields(problem: ProblemTensors, share_GD: Tensor) -> Tensor:
    """(G, D, 4) `FIELD_FEATURES`, with (G, D) the share of each group on each device."""
    reads_GD = _share_of(share_GD, problem.edge_source, problem.edge_target, problem.edge_weight)
    readers_GD = _share_of(share_GD, problem.edge_target, problem.edge_source, problem.edge_weight)
    load_GD = (share_GD * problem.load).sum(dim=0).expand_as(share_GD)
    fullness_GD = (share_GD * problem.held).sum(dim=0).expand_as(share_GD)
    return torch.stack([reads_GD, readers_GD, torch.log1p(load_GD), fullness_GD], dim=-1)


def _share_of(share_GD: Tensor, from_K: Tensor, to_K: Tensor, weight_K: Tensor) -> Tensor:
    """(G, D): the share of each group's incoming bytes that comes from each device."""
    total_GD = torch.zeros_like(share_GD).index_add(0, to_K, share_GD[from_K] * weight_K[:, None])
    return total_GD / torch.zeros(len(share_GD)).index_add(0, to_K, weight_K).clamp(min=1e-9)[:, None]
