"""Files of policies whose networks fit any problem: their options beside their weights."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rlplace.decode import decode_record
from rlplace.errors import InvalidValue
from rlplace.policy.checkpoint import SCHEMA, load_checkpoint, save_checkpoint, set_parameters


def save_network(path: str | os.PathLike[str], kind: str, config: Any, policy: nn.Module) -> None:
    """Writes weights and buffers of `policy` to `path`, its kind and its options, a dataclass, beside it (`.json`).

    Raises:
        FileProblem: a file cannot be written.
    """
    about = {"schema": SCHEMA, "kind": kind, "options": dataclasses.asdict(config)}
    save_checkpoint(path, about, policy.state_dict())


def load_network(path: str | os.PathLike[str], kind: str, config: Any, policy: nn.Module) -> dict[str, Tensor]:
    """Sets the weights of `policy`, and returns all that was saved, for what fits a policy of the same problem alone.

    Raises:
        FileProblem: a file is missing, malformed, of another kind, or has weights of other shapes.
        InvalidValue: the policy there has other options.
    """
    about, tensors = load_checkpoint(path, kind)
    about_path = Path(path).with_suffix(".json")
    saved = decode_record(type(config), about.get("options"), str(about_path))
    if saved != config:
        hint = f"Give the policy the options of {about_path}."
        raise InvalidValue("options", str(config), str(saved), where=f"policy {kind}", hint=hint)
    set_parameters(policy, tensors, path)
    return tensors
