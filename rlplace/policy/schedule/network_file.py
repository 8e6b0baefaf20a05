"""Files of `ScheduleNetwork`: weights as safetensors, and what their numbers are as JSON beside them."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from rlplace.decode import decode_record
from rlplace.env.list_schedules import ESTIMATES, FEATURES, GROUPINGS
from rlplace.env.sequential import DECISION_FEATURES
from rlplace.errors import FileProblem
from rlplace.policy.checkpoint import SCHEMA, check_weights, load_checkpoint, save_checkpoint
from rlplace.policy.schedule.components import Components
from rlplace.policy.schedule.config import ScheduleConfig
from rlplace.policy.schedule.group_features import GROUP_FEATURES
from rlplace.policy.schedule.network import ScheduleNetwork
from rlplace.policy.schedule.summary import SUMMARY

KIND: Literal["schedule"] = "schedule"
"""What its checkpoints say they are of."""


@dataclass(frozen=True)
class ScheduleFile:
    """What `policy.json` says of the weights beside it."""

    schema: int
    kind: Literal["schedule"]
    hidden: int
    num_components: int
    num_scenarios: int
    groupings: tuple[str, ...] = GROUPINGS
    """Names of groupings, ..."""
    features: tuple[str, ...] = DECISION_FEATURES
    """... of what is seen of a device, ..."""
    group_features: tuple[str, ...] = GROUP_FEATURES
    """... of a group, ..."""
    summary: tuple[str, ...] = SUMMARY
    """... of a problem ..."""
    estimates: tuple[str, ...] = ESTIMATES
    """... and of a placement."""
    about: str = ""
    """How it was trained."""


def new_network(config: ScheduleConfig | None = None, *, seed: int = 0) -> ScheduleNetwork:
    """A network that knows nothing but the weights that searches begin with."""
    config = config or ScheduleConfig()
    return ScheduleNetwork(Components.listed(), config.hidden, seed=seed)


def save_network(network: ScheduleNetwork, path: str | os.PathLike[str], about: str = "") -> None:
    """Writes a network to `path` (`.safetensors`), and what its numbers are beside it (`.json`).

    Raises:
        FileProblem: a file cannot be written.
    """
    sizes = (network.hidden, len(network.grouping), len(network.scenarios))
    save_checkpoint(path, asdict(ScheduleFile(SCHEMA, KIND, *sizes, about=about)), network.state_dict())


def load_network(path: str | os.PathLike[str]) -> ScheduleNetwork:
    """The network that `save_network`, or a policy's `save`, wrote to `path`.

    Raises:
        FileProblem: a file is missing, not what it should be, or of a version that saw other features.
        InvalidValue, UnknownName: a field of the description is missing or wrong.
    """
    about, tensors = load_checkpoint(path, KIND)
    described = decode_record(ScheduleFile, about, str(Path(path).with_suffix(".json")))
    ours = ScheduleFile(SCHEMA, KIND, 0, 0, 0)
    for name in ("groupings", "features", "group_features", "summary", "estimates"):
        if getattr(described, name) != getattr(ours, name):
            raise FileProblem(path, f"its {name} are not those of this version: train it again.")
    path, count = Path(path), described.num_components
    sizes = {
        "grouping": (count,),
        "gate.0.weight": (described.hidden, len(SUMMARY)),
        "gate.2.weight": (count, described.hidden),
        "scenarios": (described.num_scenarios, count),
    }
    for name, shape in sizes.items():  # before anything of that size is made
        found = tuple(tensors[name].shape) if name in tensors else "missing"
        if found != shape:
            expected = f"expected {shape} by {path.with_suffix('.json').name}"
            raise FileProblem(path, f"weights of another network: {name} is {found}, {expected}.")
    check_weights({name: tensor for name, tensor in tensors.items() if name != "grouping"}, path)
    grouping = tensors["grouping"]
    if grouping.dtype != torch.int64 or not bool(((grouping >= 0) & (grouping < len(GROUPINGS))).all()):
        raise FileProblem(path, f"grouping holds what is no place among the {len(GROUPINGS)} groupings.")
    components = Components(np.zeros(count, dtype=np.int64), np.zeros((count, len(FEATURES))))
    network = ScheduleNetwork(components, described.hidden, num_scenarios=described.num_scenarios)
    try:
        network.load_state_dict(tensors)
    except RuntimeError as error:  # names or shapes of other weights
        raise FileProblem(path, f"not the weights of {path.with_suffix('.json').name}: {error}.") from error
    return network
