"""`PlacerPolicy`: a graph encoder and a device for each group, as a Stable-Baselines3 policy.

`GroupCategorical`: a device for each of G groups, as one batched distribution. `GraphEncoder`: message passing over the
group graph.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from pydantic import Field
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import CombinedExtractor
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import Tensor, nn

from rlplace.env.one_shot import action_space
from rlplace.env.problem_features import GraphFeatures, graph_features, index_space
from rlplace.errors import FileProblem
from rlplace.measure.problem import Problem
from rlplace.policy.base import IndependentPolicy, entropy_of, gumbel, log_prob_of, seeded_weights
from rlplace.policy.checkpoint import SCHEMA, check_tensors, load_checkpoint, save_checkpoint, set_all, set_tensors
from rlplace.policy.options import PlacerArchitecture
from rlplace.records import Whole, read_record, record

KIND: Literal["placer"] = "placer"
"""Names the policy in its checkpoints."""
Size = Annotated[Whole, Field(ge=1, le=1 << 24)]


@record(frozen=True)
class PlacerFile:
    """`policy.json`, the description of the weights beside it."""

    schema: int
    kind: Literal["placer"]
    num_groups: Size
    num_devices: Size
    features: tuple[str, ...]
    """Names of the features of groups."""
    architecture: PlacerArchitecture


def kept_features(tensors: Mapping[str, Tensor], file: PlacerFile, path: Path) -> GraphFeatures:
    """The features of the problem that a placer was made for, checked before anything of their size is made.

    Args:
        tensors: of the file, by name.
        file: the description of them.
        path: of the tensors, for messages.

    Raises:
        FileProblem: tensors and description differ, or the graph is impossible.
    """
    groups, devices, architecture = file.num_groups, file.num_devices, file.architecture
    num_edges = len(tensors["edge_source"]) if "edge_source" in tensors and tensors["edge_source"].dim() else 0
    whole, real = torch.int64, torch.float32
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "node_features": (real, (groups, len(file.features))),
        "edge_features": (real, (num_edges, 2)),
        "edge_source": (whole, (num_edges,)),
        "edge_target": (whole, (num_edges,)),
        "group_cost": (real, (groups, devices)),
        "allowed": (torch.bool, (groups, devices)),
        "encoder.embed.2.weight": (real, (architecture.hidden, architecture.hidden)),
    }
    every = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    check_tensors(tensors, every | expected, path, "not the weights of its .json")
    found_layers = sum(name.startswith("encoder.layers.") and name.endswith(".norm.weight") for name in tensors)
    if found_layers != architecture.num_layers:
        told = f"{found_layers} layers, expected {architecture.num_layers}"
        raise FileProblem(path, f"not the weights of its .json: {told}.")
    for name in ("edge_source", "edge_target"):
        if num_edges and not 0 <= int(tensors[name].min()) <= int(tensors[name].max()) < groups:
            raise FileProblem(path, f"{name} names groups that are not there, expected 0..{groups - 1}.")
    if not bool(tensors["allowed"].any(dim=1).all()):
        raise FileProblem(path, "allowed leaves a group no device.")
    names = [field.name for field in dataclasses.fields(GraphFeatures) if field.name != "names"]
    return GraphFeatures(**{name: tensors[name].numpy() for name in names}, names=file.features)


class PlacerPolicy(IndependentPolicy, ActorCriticPolicy):
    """Devices for G groups, independent given a message-passing encoding of the group graph.

    The graph never changes, so its features are buffers of the policy, encoded once per batch and not once per sample,
    and there is one state, so no value is learned.

    Attributes:
        temperature: divides logits, in samples as in log-probabilities; `set_flips` sets it.
        generator: draws the samples.
        feature_names: names of the F features of a group.
    """

    kind = KIND
    problem_buffers = ("node_features", "edge_features", "edge_source", "edge_target", "group_cost", "allowed")
    node_features: Tensor
    edge_features: Tensor
    edge_source: Tensor
    edge_target: Tensor
    group_cost: Tensor
    allowed: Tensor

    def __init__(
        self,
        observation_space: spaces.Dict,
        action_space: spaces.MultiDiscrete,
        lr_schedule: Schedule,
        features: GraphFeatures,
        architecture: PlacerArchitecture | None = None,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        """An untrained policy: every device is as likely, whatever the seed."""
        self._graph_features, self.feature_names = features, features.names
        self.num_groups, self.num_devices = features.allowed.shape
        self.architecture = architecture or PlacerArchitecture()
        kwargs["features_extractor_class"] = CombinedExtractor
        with seeded_weights(seed):
            ActorCriticPolicy.__init__(self, observation_space, action_space, lr_schedule, **kwargs)
        self.generator = torch.Generator().manual_seed(seed)

    def _build(self, lr_schedule: Schedule) -> None:
        features, architecture = self._graph_features, self.architecture
        for name in self.problem_buffers:
            self.register_buffer(name, torch.from_numpy(np.array(getattr(features, name))))
        self.register_buffer("temperature", torch.ones(()))
        num_node_features, num_edge_features = features.node_features.shape[1], features.edge_features.shape[1]
        self.encoder = GraphEncoder(num_node_features, num_edge_features, architecture.hidden, architecture.num_layers)
        self.device_net = nn.Linear(architecture.hidden, self.num_devices)
        nn.init.zeros_(self.device_net.weight)
        nn.init.zeros_(self.device_net.bias)
        self.table_GD = nn.Parameter(torch.zeros(self.num_groups, self.num_devices))
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)  # type: ignore[call-arg]

    def logits(self) -> Tensor:
        """(G, D) logits at temperature 1; minus infinity where a group may not be."""
        h_GH = self.encoder(self.node_features, self.edge_features, self.edge_source, self.edge_target)
        logits_GD: Tensor = self.device_net(h_GH) + self.architecture.table_scale * self.table_GD
        return logits_GD.masked_fill(~self.allowed, -torch.inf)

    def forward(self, obs: PyTorchObs, deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Devices (B, G), values (B, 1) and log-probabilities (B,)."""
        distribution = self.get_distribution(obs)
        actions_BG = distribution.get_actions(deterministic=deterministic)
        return actions_BG, self.predict_values(obs), distribution.log_prob(actions_BG)

    def evaluate_actions(self, obs: PyTorchObs, actions_BG: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values (B, 1), log-probabilities and entropies (B,) of given devices (B, G)."""
        log_prob_BG, entropy_BG = self.evaluate(actions_BG.numpy())
        return self.predict_values(obs), log_prob_BG.sum(-1), entropy_BG.sum(-1)

    def predict_values(self, obs: PyTorchObs) -> Tensor:
        """(B, 1) zeros: every episode starts in the same state, so nothing is learned from its value."""
        return torch.zeros(_batch_size(obs), 1)

    def get_distribution(self, obs: PyTorchObs) -> GroupCategorical:
        """The distribution over the devices of all groups, at the policy's temperature."""
        logits_BGD = (self.logits() / self.temperature).expand(_batch_size(obs), -1, -1)
        return GroupCategorical(self.generator).proba_distribution(logits_BGD)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes weights and graph features to `path` (`policy.safetensors`), the architecture beside it (`.json`).

        Raises:
            FileProblem: a file cannot be written.
        """
        sizes = self.num_groups, self.num_devices
        about = PlacerFile(SCHEMA, KIND, *sizes, tuple(self.feature_names), self.architecture)
        save_checkpoint(path, dataclasses.asdict(about), self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:  # type: ignore[override]  # SB3's would unpickle
        """Takes the weights that `save` wrote for a problem of as many groups and devices.

        Raises:
            FileProblem: a file is missing, malformed, of another kind, or of a policy of another size.
        """
        set_tensors(dict(self.named_parameters()), load_checkpoint(path, KIND)[1], path)

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> Tensor:
        actions_BG: Tensor = self.get_distribution(observation).get_actions(deterministic=deterministic)
        return actions_BG


def make_policy(problem: Problem, architecture: PlacerArchitecture | None = None, *, seed: int = 0) -> PlacerPolicy:
    """A new policy for a problem."""
    return _untrained(graph_features(problem), action_space(problem), architecture, seed)


def load_policy(path: str | os.PathLike[str]) -> PlacerPolicy:
    """The policy that `PlacerPolicy.save` wrote to `path`; its random generator starts anew.

    Raises:
        FileProblem: a file is missing or not what it should be.
        InvalidValue, UnknownName: a field of the description is missing or wrong.
    """
    path = Path(path)
    about, tensors = load_checkpoint(path, KIND)
    described = read_record(PlacerFile, about, str(path.with_suffix(".json")))
    actions = spaces.MultiDiscrete(np.full(described.num_groups, described.num_devices))
    policy = _untrained(kept_features(tensors, described, path), actions, described.architecture, 0)
    set_all(policy, tensors, path)
    return policy


def _untrained(
    features: GraphFeatures, actions: spaces.MultiDiscrete, architecture: PlacerArchitecture | None, seed: int
) -> PlacerPolicy:
    return PlacerPolicy(index_space(), actions, lambda _: 0.0, features, architecture, seed)


def _batch_size(obs: PyTorchObs) -> int:
    return len(next(iter(obs.values()))) if isinstance(obs, dict) else len(obs)


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
        return log_prob_of(self.log_probs_BGD, actions_BG)

    def group_entropy(self) -> Tensor:
        """(B, G) entropy of each group, in nats."""
        return entropy_of(self.log_probs_BGD)

    def log_prob(self, actions_BG: Tensor) -> Tensor:
        """(B,) log-probability of whole placements."""
        return self.group_log_prob(actions_BG).sum(-1)

    def entropy(self) -> Tensor:
        """(B,) entropy of whole placements, in nats."""
        return self.group_entropy().sum(-1)

    def sample(self) -> Tensor:
        """(B, G) int64 devices, drawn (by Gumbel-max, so that one draw serves any D)."""
        log_probs_BGD = self.log_probs_BGD.detach().double()
        return (log_probs_BGD + gumbel(log_probs_BGD.shape, self.generator)).argmax(-1)

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


class GraphEncoder(nn.Module):
    """Encodes the G groups of a graph by rounds of messages along its edges, in both directions.

    A round: every edge makes a message of its own features and of the group it comes from; every group takes the mean
    of what comes from the groups it reads, and from those that read it, and adds what a layer makes of the three
    (residual, layer norm; cf. Gilmer et al. 2017, "Neural Message Passing for Quantum Chemistry").
    """

    def __init__(self, num_node_features: int, num_edge_features: int, hidden: int, num_layers: int) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(num_node_features, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.layers = nn.ModuleList(MessageLayer(num_edge_features, hidden) for _ in range(num_layers))

    def forward(self, nodes_GF: Tensor, edges_KF: Tensor, source_K: Tensor, target_K: Tensor) -> Tensor:
        """(G, H) encodings; computed once per graph, whatever the size of the batch."""
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
    counts_G = torch.bincount(ends_K, minlength=num_groups).clamp(min=1)
    return total_GH / counts_G[:, None]
