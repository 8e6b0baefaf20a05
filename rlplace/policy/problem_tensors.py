"""`ProblemTensors`: the features of a problem as networks take them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlplace.env.problem_features import ProblemFeatures

LEAST_WEIGHT = 0.01
"""Weight of an edge that carries next to nothing, in mean costs of a group."""


@dataclass(frozen=True, eq=False)
class ProblemTensors:
    """A problem of G groups, K edges and D devices.

    Attributes:
        nodes: (G, F) float32.
        edges: (K, Fe) float32.
        edge_source, edge_target: (K,) int64.
        edge_weight: (K,) float32, seconds of each edge in mean costs of a group.
        devices: (D, Fd) float32: features of each device, and the summary of the problem.
        pairs: (G, D, Fp) float32.
        links: (D, D, Fl) float32.
        load: (G, D) float32, what each group adds to each device, in even shares of the step.
        held: (G, D) float32, what it adds to each device's fullness.
        allowed: (G, D) bool.
        twins: (D,) int64, how many devices before each one look the same.
    """

    nodes: Tensor
    edges: Tensor
    edge_source: Tensor
    edge_target: Tensor
    edge_weight: Tensor
    devices: Tensor
    pairs: Tensor
    links: Tensor
    load: Tensor
    held: Tensor
    allowed: Tensor
    twins: Tensor

    @classmethod
    def of(cls, features: ProblemFeatures) -> ProblemTensors:
        """Those of `features`."""
        arrays = features.arrays
        summary = torch.from_numpy(features.summary).expand(features.num_devices, -1)
        weight_K = torch.from_numpy(arrays.edge_s() / arrays.unit_s) + LEAST_WEIGHT
        return cls(
            nodes=torch.from_numpy(features.nodes),
            edges=torch.from_numpy(features.edges),
            edge_source=torch.from_numpy(features.edge_source),
            edge_target=torch.from_numpy(features.edge_target),
            edge_weight=weight_K.float(),
            devices=torch.cat([torch.from_numpy(features.devices), summary], dim=-1),
            pairs=torch.from_numpy(features.pairs),
            links=torch.from_numpy(features.links),
            load=torch.from_numpy(arrays.cost_s / arrays.share_s).float(),
            held=torch.from_numpy(arrays.held_bytes[:, None] / arrays.room_bytes).float(),
            allowed=torch.from_numpy(features.allowed.copy()),
            twins=torch.from_numpy(features.twins()),
        )

    @property
    def num_groups(self) -> int:
        return len(self.nodes)

    @property
    def num_devices(self) -> int:
        return len(self.devices)
