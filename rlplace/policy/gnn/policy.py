"""`GnnPolicy`: a distribution over placements of one problem, from a network that fits any."""

from __future__ import annotations

import os
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlplace.env.problem_features import problem_features
from rlplace.measure.problem import Problem
from rlplace.policy.checkpoint import kept
from rlplace.policy.gnn.config import GnnConfig
from rlplace.policy.gnn.network import AssignmentNetwork
from rlplace.policy.module import PolicyModule, seeded_weights
from rlplace.policy.network_file import load_network, save_network
from rlplace.policy.placer.distribution import GroupCategorical
from rlplace.policy.problem_tensors import ProblemTensors
from rlplace.policy.temperature import temperature_for


class GnnPolicy(PolicyModule):
    """All groups at once, independent given the graph network's logits.

    After GDP (Zhou et al. 2019, arXiv:1910.01578): a graph network over the groups and a placer that fits any graph,
    trained on one graph or, with one network for several policies (`learn_many`), on many. GDP's placer names its
    devices; this one compares each group with each device by their features: the same weights place on any host.

    Devices that look alike would get the same logits, and every group would be as likely on each of them. So the policy
    marks them: the n-th of several equal devices gets the n-th of a list of random vectors, drawn once from the seed
    (random node features, Sato et al. 2021, arXiv:2002.03155). The log-probability stays a function of the placement.
    Permuting devices of different looks permutes the answer; permuting equal ones permutes it if their marks go along.

    Attributes:
        kind: what its files say they are of.
        network: the weights, which several policies may share.
        problem: the features of what is placed.
        marks: (D, marks) float32.
        temperature: what logits are divided by; `set_flips` sets it.
        generator: draws the samples.
    """

    kind: Literal["gnn"] = "gnn"
    temperature: Tensor
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
        self.register_buffer("temperature", torch.ones(()))

    def logits(self) -> Tensor:
        """(G, D) logits at temperature 1; minus infinity where a group may not be."""
        logits_GD: Tensor = self.network(self.problem, self.marks)
        return logits_GD.masked_fill(~self.problem.allowed, -torch.inf)

    def sample(self, num_samples: int, rng: np.random.Generator | None = None) -> NDArray[np.int32]:
        """(num_samples, G) devices of groups, drawn at the policy's temperature; by `rng` or by its own generator."""
        generator = self.drawing(rng)
        with torch.no_grad():
            return self._distribution(num_samples, generator).sample().numpy().astype(np.int32)

    def mode(self) -> NDArray[np.int32]:
        """(G,) the likeliest device of each group."""
        with torch.no_grad():
            return self.logits().argmax(dim=-1).numpy().astype(np.int32)

    def evaluate(self, group_devices: NDArray[np.integer]) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, G) of devices (B, G) of groups, and entropies (B, G), at the policy's temperature."""
        devices_BG = torch.from_numpy(np.asarray(group_devices, dtype=np.int64))
        distribution = self._distribution(1)
        return distribution.group_log_prob(devices_BG), distribution.group_entropy().expand(len(devices_BG), -1)

    def set_flips(self, flips: float) -> None:
        """Sets the temperature at which a sample differs from the mode in `flips` groups, on average."""
        with torch.no_grad():
            self.temperature = torch.tensor(temperature_for(self.logits(), flips))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the network to `path` (`policy.safetensors`), with its options beside it (`.json`).

        Raises:
            FileProblem: a file cannot be written.
        """
        save_network(path, self.kind, self.config, self)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Takes over the network that a policy of this or of another problem saved, and its marks where they fit.

        Raises:
            FileProblem: a file is missing, malformed, or of another policy.
            InvalidValue: the options there are not those of this policy.
        """
        tensors = load_network(path, self.kind, self.config, self)
        self.temperature.copy_(kept(tensors, "temperature", self.temperature, path))
        if "marks" in tensors and tensors["marks"].shape == self.marks.shape:
            self.marks.copy_(kept(tensors, "marks", self.marks, path))

    def _distribution(self, batch_size: int, generator: torch.Generator | None = None) -> GroupCategorical:
        logits_BGD = (self.logits() / self.temperature).expand(batch_size, -1, -1)
        return GroupCategorical(generator).proba_distribution(logits_BGD)
