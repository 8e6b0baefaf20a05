"""`PlacerPolicy`: a graph encoder and a device for each group, as a Stable-Baselines3 policy.

What a file of a placer's weights says of its problem, checked before anything of that size is made.

`GroupCategorical`: a device for each of G groups, as one batched distribution.

`GraphEncoder`: message passing over the group graph.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import CombinedExtractor
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import Tensor, nn

from rlplace.decode import decode_record
from rlplace.env.one_shot import action_space
from rlplace.env.problem_features import GraphFeatures, graph_features, index_space
from rlplace.errors import FileProblem
from rlplace.measure.problem import Problem
from rlplace.policy.base import one_line, seeded_weights, temperature_for
from rlplace.policy.checkpoint import SCHEMA, check_weights, load_checkpoint, save_checkpoint, set_parameters
from rlplace.policy.options import PlacerArchitecture

KIND: Literal["placer"] = "placer"
"""What its checkpoints say they are of."""


@dataclass(frozen=True)
class PlacerFile:
    """What `policy.json` says of the weights beside it."""

    schema: int
    kind: Literal["placer"]
    num_groups: int
    num_devices: int
    features: tuple[str, ...]
    """Names of the features of groups."""
    architecture: PlacerArchitecture


def kept_features(tensors: Mapping[str, Tensor], file: PlacerFile, path: Path) -> GraphFeatures:
    """The features of the problem that a placer was made for.

    Args:
        tensors: of the file, by name.
        file: what is said of them.
        path: where they are from, for messages.

    Raises:
        FileProblem: one is missing, of another shape or type than is said, or holds what a graph cannot have; or the
            network is of another size than is said.
    """
    groups, devices, num_features = file.num_groups, file.num_devices, len(file.features)
    hidden, num_layers = file.architecture.hidden, file.architecture.num_layers
    if groups < 1 or devices < 1:
        raise FileProblem(path, f"a policy for {groups} groups and {devices} devices, expected one of each at least.")
    num_edges = len(tensors["edge_source"]) if "edge_source" in tensors and tensors["edge_source"].dim() else 0
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "node_features": (torch.float32, (groups, num_features)),
        "edge_features": (torch.float32, (num_edges, 2)),
        "edge_source": (torch.int64, (num_edges,)),
        "edge_target": (torch.int64, (num_edges,)),
        "group_cost": (torch.float32, (groups, devices)),
        "allowed": (torch.bool, (groups, devices)),
        "encoder.embed.2.weight": (torch.float32, (hidden, hidden)),
    }
    for name, (dtype, shape) in expected.items():
        found = tensors.get(name)
        if found is None or (found.dtype, tuple(found.shape)) != (dtype, shape):
            looks = "missing" if found is None else f"{found.dtype} {tuple(found.shape)}"
            raise FileProblem(path, f"not the weights of its .json: {name} is {looks}, expected {dtype} {shape}.")
    found_layers = sum(name.startswith("encoder.layers.") and name.endswith(".norm.weight") for name in tensors)
    if found_layers != num_layers:
        raise FileProblem(path, f"not the weights of its .json: {found_layers} layers, expected {num_layers}.")
    check_weights({name: each for name, each in tensors.items() if each.is_floating_point()}, path)
    for name in ("edge_source", "edge_target"):
        if num_edges and not 0 <= int(tensors[name].min()) <= int(tensors[name].max()) < groups:
            raise FileProblem(path, f"{name} names groups that are not there, expected 0..{groups - 1}.")
    if not bool(tensors["allowed"].any(dim=1).all()):
        raise FileProblem(path, "allowed leaves a group no device.")
    names = [field.name for field in dataclasses.fields(GraphFeatures) if field.name != "names"]
    return GraphFeatures(**{name: tensors[name].numpy() for name in names}, names=file.features)


class PlacerPolicy(ActorCriticPolicy):
    """Devices for G groups, independent given a message-passing encoding of the group graph.

    The graph never changes, so its features are buffers of the policy, encoded once per batch and not once per sample,
    and there is one state, so no value is learned.

    Attributes:
        kind: what its checkpoints say they are of.
        temperature: what logits are divided by, in sampling as in log-probabilities; `set_flips` sets it.
        generator: draws the samples.
        feature_names: names of the F features of a group.
        problem_buffers: names of the buffers that describe the problem; a state of a learner does not change them.
    """

    kind = KIND
    problem_buffers = ("node_features", "edge_features", "edge_source", "edge_target", "group_cost", "allowed")
    temperature: Tensor
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
        """A policy that knows nothing: every device is as likely, whatever the seed."""
        self._graph_features = features
        self.architecture = architecture or PlacerArchitecture()
        with seeded_weights(seed):
            super().__init__(
                observation_space, action_space, lr_schedule, features_extractor_class=CombinedExtractor, **kwargs
            )
        self.generator = torch.Generator().manual_seed(seed)
        self.feature_names = features.names

    def __repr__(self) -> str:
        return one_line(self)

    @property
    def num_groups(self) -> int:
        """Groups that the policy places, G."""
        return int(self.group_cost.shape[0])

    @property
    def num_devices(self) -> int:
        """Devices that it places them on, D."""
        return int(self.group_cost.shape[1])

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
        distribution = self.distribution(self.logits(), 1)
        return (
            self.predict_values(obs),
            distribution.log_prob(actions_BG),
            distribution.entropy().expand(len(actions_BG)),
        )

    def predict_values(self, obs: PyTorchObs) -> Tensor:
        """(B, 1) zeros: every episode starts in the same state, so nothing is learned from its value."""
        return torch.zeros(_batch_size(obs), 1)

    def get_distribution(self, obs: PyTorchObs) -> GroupCategorical:
        """The distribution over the devices of all groups."""
        return self.distribution(self.logits(), _batch_size(obs))

    def distribution(self, logits_GD: Tensor, batch_size: int) -> GroupCategorical:
        """The distribution of `batch_size` samples with these logits, at the policy's temperature."""
        logits_BGD = (logits_GD / self.temperature).expand(batch_size, -1, -1)
        return GroupCategorical(self.generator).proba_distribution(logits_BGD)

    def sample(self, num_samples: int, rng: np.random.Generator | None = None) -> NDArray[np.int32]:
        """(num_samples, G) devices of groups, drawn at the policy's temperature.

        Args:
            num_samples: placements to draw.
            rng: draws them; by default the policy's own generator, which goes on.
        """
        with torch.no_grad():
            distribution = self.distribution(self.logits(), num_samples)
        if rng is not None:
            distribution.generator = torch.Generator().manual_seed(int(rng.integers(2**63)))
        return distribution.sample().numpy().astype(np.int32)

    def mode(self) -> NDArray[np.int32]:
        """(G,) the likeliest device of each group."""
        with torch.no_grad():
            return self.logits().argmax(dim=-1).numpy().astype(np.int32)

    def log_prob(self, group_devices: NDArray[np.integer]) -> Tensor:
        """(B,) log-probabilities of placements (B, G), at the policy's temperature."""
        actions_BG = torch.from_numpy(np.asarray(group_devices, dtype=np.int64))
        return self.distribution(self.logits(), 1).log_prob(actions_BG)

    def evaluate(self, group_devices: NDArray[np.integer]) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies by group (B, G) of placements (B, G), at the policy's temperature."""
        actions_BG = torch.from_numpy(np.asarray(group_devices, dtype=np.int64))
        distribution = self.distribution(self.logits(), 1)
        return distribution.group_log_prob(actions_BG), distribution.group_entropy().expand(len(actions_BG), -1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes weights and graph features to `path` (`policy.safetensors`), the architecture beside it (`.json`).

        Raises:
            FileProblem: a file cannot be written.
        """
        about = PlacerFile(
            SCHEMA, KIND, self.num_groups, self.num_devices, tuple(self.feature_names), self.architecture
        )
        save_checkpoint(path, dataclasses.asdict(about), self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:  # type: ignore[override]  # SB3's would unpickle
        """Takes the weights that `save` wrote for a problem of as many groups and devices.

        Raises:
            FileProblem: a file is missing, malformed, of another kind, or of a policy of another size.
        """
        _, tensors = load_checkpoint(path, KIND)
        set_parameters(self, tensors, path)

    def set_flips(self, flips: float) -> None:
        """Sets the temperature at which a sample differs from the mode in `flips` groups, on average."""
        with torch.no_grad():
            self.temperature = torch.tensor(temperature_for(self.logits(), flips))

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> Tensor:
        actions_BG: Tensor = self.get_distribution(observation).get_actions(deterministic=deterministic)
        return actions_BG


def make_policy(problem: Problem, architecture: PlacerArchitecture | None = None, *, seed: int = 0) -> PlacerPolicy:
    """A new policy for a problem."""
    return PlacerPolicy(
        index_space(), action_space(problem), lambda _: 0.0, graph_features(problem), architecture, seed
    )


def load_policy(path: str | os.PathLike[str]) -> PlacerPolicy:
    """The policy that `PlacerPolicy.save` wrote to `path`; its random generator starts anew.

    Raises:
        FileProblem: a file is missing or not what it should be.
        InvalidValue, UnknownName: a field of the description is missing or wrong.
    """
    about, tensors = load_checkpoint(path, KIND)
    path = Path(path)
    described = decode_record(PlacerFile, about, str(path.with_suffix(".json")))
    features = kept_features(tensors, described, path)
    actions = spaces.MultiDiscrete(np.full(described.num_groups, described.num_devices))
    policy = PlacerPolicy(index_space(), actions, lambda _: 0.0, features, described.architecture)
    try:
        policy.load_state_dict(tensors)
    except RuntimeError as error:  # names or shapes of other weights
        raise FileProblem(path, f"not the weights of {path.with_suffix('.json').name}: {error}.") from error
    return policy


def _batch_size(obs: PyTorchObs) -> int:
    return len(next(iter(obs.values()))) if isinstance(obs, dict) else len(obs)


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
