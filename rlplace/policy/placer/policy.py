"""`PlacerPolicy`: a graph encoder and a device for each group, as a Stable-Baselines3 policy."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import CombinedExtractor
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import Tensor, nn

from rlplace.decode import decode_record
from rlplace.env.features import GraphFeatures, graph_features
from rlplace.env.graph_observation import index_space
from rlplace.env.one_shot import action_space
from rlplace.errors import FileProblem
from rlplace.measure.problem import Problem
from rlplace.policy.checkpoint import SCHEMA, load_checkpoint, save_checkpoint, set_parameters
from rlplace.policy.config import PlacerArchitecture
from rlplace.policy.module import seeded_weights
from rlplace.policy.one_line import one_line
from rlplace.policy.placer.distribution import GroupCategorical
from rlplace.policy.placer.gnn import GraphEncoder
from rlplace.policy.placer.kept import KIND, PlacerFile, kept_features
from rlplace.policy.temperature import temperature_for


class PlacerPolicy(ActorCriticPolicy):
    """Devices for G groups, independent given a message-passing encoding of the group graph.

    The graph never changes, so its features are buffers of the policy, encoded once per batch and not once per sample,
    and there is one state, so no value is learned.

    Attributes:
        kind: what its checkpoints say they are of.
        temperature: what logits are divided by, in sampling as in log-probabilities; `set_flips` sets it.
        generator: draws the samples.
        feature_names: names of the F features of a group.
    """

    kind = KIND
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
        for name in ("node_features", "edge_features", "edge_source", "edge_target", "group_cost", "allowed"):
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
