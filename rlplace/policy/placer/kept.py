"""What a file of a placer's weights says of its problem, checked before anything of that size is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rlplace.env.features import GraphFeatures
from rlplace.errors import FileProblem
from rlplace.policy.checkpoint import check_weights
from rlplace.policy.config import PlacerArchitecture

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
