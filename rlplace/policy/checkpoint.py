"""Checkpoints of policies: weights as safetensors, everything else as JSON beside them; loading runs no code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from rlplace.errors import FileProblem
from rlplace.files import read_json, write_bytes_atomic, write_json_atomic

SCHEMA = 1


def save_checkpoint(path: str | os.PathLike[str], about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Writes `tensors` to `path` (`policy.safetensors`) and `about`, with its `schema` and `kind`, beside it (`.json`).

    Raises:
        FileProblem: a file cannot be written.
    """
    path = Path(path)
    write_bytes_atomic(path, save({name: tensor.detach().contiguous() for name, tensor in tensors.items()}))
    write_json_atomic(path.with_suffix(".json"), dict(about))


def load_checkpoint(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `save_checkpoint` was given for a policy of that kind.

    Raises:
        FileProblem: a file is missing, malformed, or of another kind.
    """
    path = Path(path)
    about_path = path.with_suffix(".json")
    if not path.is_file():
        raise FileProblem(path, "no such file.")
    if not about_path.is_file():
        raise FileProblem(
            about_path, f"no such file. It describes the weights of {path.name} and has to be beside them."
        )
    about = read_json(about_path)
    if not isinstance(about, dict) or about.get("schema") != SCHEMA or about.get("kind") != kind:
        raise FileProblem(about_path, _another(about, kind))
    try:
        return about, load(path.read_bytes())
    except OSError as error:
        raise FileProblem(path, f"cannot be read: {error.strerror or error}.") from error
    except SafetensorError as error:
        raise FileProblem(path, f"not the weights of {about_path.name}: {error}.") from error


def set_parameters(module: nn.Module, tensors: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Sets the parameters of `module` to those of a checkpoint; its buffers, what it knows of its problem, stay.

    Args:
        module: a policy.
        tensors: by name, as `load_checkpoint` gave them; others than parameters do not matter.
        path: where they are from, for messages.

    Raises:
        FileProblem: one is missing or of another shape.
    """
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        found = tuple(tensors[name].shape) if name in tensors else "missing"
        if found != tuple(parameter.shape):
            expected = f"expected {tuple(parameter.shape)}"
            raise FileProblem(path, f"weights of a policy of another size: {name} is {found}, {expected}.")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def _another(about: object, kind: str) -> str:
    wrong = f"not a policy of schema {SCHEMA} and kind {kind!r}"
    actual = about.get("kind") if isinstance(about, dict) else None
    if not isinstance(actual, str) or actual == kind:
        return f"{wrong}."
    reader = f"`load_checkpoint(path, {actual!r})` reads what its `save` kept"
    return f"{wrong}, but of kind {actual!r}: {reader}. If that is a policy, `--policy {actual}` takes it."
