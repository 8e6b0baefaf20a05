"""Policies as files: weights as safetensors, the architecture as JSON; loading runs no code."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from safetensors import SafetensorError
from safetensors.torch import load, save

from rlplace.env.features import GraphFeatures
from rlplace.env.one_shot import observation_space
from rlplace.errors import FileProblem, InvalidValue
from rlplace.files import read_json, write_bytes_atomic, write_json_atomic
from rlplace.policy.placer.policy import PlacerArchitecture, PlacerPolicy

SCHEMA = 1


def save_policy(policy: PlacerPolicy, path: str | os.PathLike[str]) -> None:
    """Writes weights and graph features to `path` (`policy.safetensors`), and the architecture beside it (`.json`).

    Raises:
        FileProblem: a file cannot be written.
    """
    path = Path(path)
    tensors = {name: tensor.contiguous() for name, tensor in policy.state_dict().items()}
    about = {
        "schema": SCHEMA,
        "kind": "placer",
        "num_groups": policy.num_groups,
        "num_devices": policy.num_devices,
        "features": list(policy.feature_names),
        "architecture": dataclasses.asdict(policy.architecture),
    }
    write_bytes_atomic(path, save(tensors))
    write_json_atomic(path.with_suffix(".json"), about)


def load_policy(path: str | os.PathLike[str]) -> PlacerPolicy:
    """The policy that `save_policy` wrote to `path`; its random generator starts anew.

    Raises:
        FileProblem: a file is missing or not what it should be.
    """
    path = Path(path)
    about_path = path.with_suffix(".json")
    about = read_json(about_path)
    try:
        if about["schema"] != SCHEMA or about["kind"] != "placer":
            raise FileProblem(about_path, f"not a policy of schema {SCHEMA}.")
        architecture = PlacerArchitecture(**about["architecture"])
        names = tuple(str(name) for name in about["features"])
        num_groups, num_devices = int(about["num_groups"]), int(about["num_devices"])
    except (KeyError, TypeError, ValueError, InvalidValue) as error:
        raise FileProblem(about_path, f"not a policy: {error}.") from error
    try:
        tensors = load(path.read_bytes())
        features = _features(tensors, names)
        if features.group_cost.shape != (num_groups, num_devices):
            raise FileProblem(path, f"{features.group_cost.shape} groups and devices, not those of {about_path.name}.")
        policy = PlacerPolicy(
            observation_space(),
            spaces.MultiDiscrete(np.full(num_groups, num_devices)),
            lambda _: 0.0,
            features,
            architecture,
        )
        policy.load_state_dict(tensors)
    except OSError as error:
        raise FileProblem(path, f"cannot be read: {error.strerror or error}.") from error
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise FileProblem(path, f"not the weights of {about_path.name}: {error}.") from error
    return policy


def _features(tensors: dict[str, Any], names: tuple[str, ...]) -> GraphFeatures:
    fields = {
        field.name: tensors[field.name].numpy() for field in dataclasses.fields(GraphFeatures) if field.name != "names"
    }
    return GraphFeatures(**fields, names=names)
