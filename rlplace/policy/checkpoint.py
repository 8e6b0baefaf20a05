"""Checkpoints of policies: weights as safetensors, everything else as JSON beside them; loading runs no code.

Files of policies whose networks fit any problem: their options beside their weights.

Weights that a policy begins with: what `--init pretrained` and `--init FILE` stand for.

Weights that come with the package, trained by `rlplace pretrain`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from rlplace.decode import decode_record
from rlplace.errors import FileProblem, InvalidValue, UnknownName
from rlplace.files import read_json, read_plain, write_bytes_atomic, write_json_atomic
from rlplace.policy.base import Loadable, Policy
from rlplace.policy.options import WEIGHTS_ENDING

SCHEMA = 1
LARGEST_BYTES = 256 << 20
"""Of a file of weights; those of policies have a few megabytes."""
_MALFORMED = (SafetensorError, LookupError, TypeError, RuntimeError, ValueError, AssertionError)
"""What safetensors raises: its own, of a header; what Python and PyTorch say of a dtype or a shape that they lack."""


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
    if not os.path.isfile(path):
        raise FileProblem(path, "no such file.")
    if not os.path.isfile(about_path):
        raise FileProblem(
            about_path, f"no such file. It describes the weights of {path.name} and has to be beside them."
        )
    about = read_json(about_path)
    if not isinstance(about, dict) or about.get("schema") != SCHEMA or about.get("kind") != kind:
        raise FileProblem(about_path, _another(about, kind))
    data = read_plain(path, largest_bytes=LARGEST_BYTES, holds="weights", follows_links=True)
    try:
        return about, load(data)
    except _MALFORMED as error:
        raise FileProblem(path, f"not the weights of {about_path.name}: {error}.") from error


def set_parameters(module: nn.Module, tensors: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Sets the parameters of `module` to those of a checkpoint; its buffers, what it knows of its problem, stay.

    Args:
        module: a policy.
        tensors: by name, as `load_checkpoint` gave them; others than parameters do not matter.
        path: where they are from, for messages.

    Raises:
        FileProblem: one is missing, of another shape, or holds what is no weight.
    """
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        found = tuple(tensors[name].shape) if name in tensors else "missing"
        if found != tuple(parameter.shape):
            expected = f"expected {tuple(parameter.shape)}"
            raise FileProblem(path, f"weights of a policy of another size: {name} is {found}, {expected}.")
    check_weights({name: tensors[name] for name in parameters}, path)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def check_weights(tensors: Mapping[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Refuses weights that a network cannot use.

    Args:
        tensors: by name.
        path: where they are from, for messages.

    Raises:
        FileProblem: one is no tensor of real numbers, or a number in it is not finite.
    """
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise FileProblem(path, f"{name} is of {tensor.dtype}, expected floating-point numbers.")
        if not bool(torch.isfinite(tensor.float()).all()):
            raise FileProblem(path, f"{name} holds numbers that are not finite.")


def kept(tensors: Mapping[str, Tensor], name: str, like: Tensor, path: str | os.PathLike[str]) -> Tensor:
    """The tensor called `name` of a checkpoint.

    Args:
        tensors: by name, as `load_checkpoint` gave them.
        name: of one of them.
        like: of its shape, and of its type where that is not floating-point.
        path: where they are from, for messages.

    Raises:
        FileProblem: it is missing, of another shape or type, or holds what is not finite.
    """
    found = tensors.get(name)
    if found is None or found.shape != like.shape:
        looks = "missing" if found is None else tuple(found.shape)
        raise FileProblem(path, f"{name} is {looks}, expected {tuple(like.shape)}.")
    if like.is_floating_point():
        check_weights({name: found}, path)
    elif found.dtype != like.dtype:
        raise FileProblem(path, f"{name} is of {found.dtype}, expected {like.dtype}.")
    return found


def _another(about: object, kind: str) -> str:
    wrong = f"not a policy of schema {SCHEMA} and kind {kind!r}"
    actual = about.get("kind") if isinstance(about, dict) else None
    if not isinstance(actual, str) or actual == kind:
        return f"{wrong}."
    reader = f"`load_checkpoint(path, {actual!r})` reads what its `save` kept"
    return f"{wrong}, but of kind {actual!r}: {reader}. If that is a policy, `--policy {actual}` takes it."


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


PRETRAINED = "pretrained"


def load_initial_weights(policy: Policy, init: str) -> None:
    """Gives the policy the weights that `init` names; those of `starts` and `none` are the ones that it has.

    Raises:
        InvalidValue: the policy takes no weights.
        UnknownName: there are no pretrained ones for it.
        FileProblem: the file is missing, malformed, or not for this policy.
    """
    if _names_weights(init):
        loadable = _loadable(policy, init)
        loadable.load(_path(loadable, init))


def check_initial_weights(policy: Policy, init: str) -> None:
    """Refuses weights that `policy` cannot begin with, whatever the problem; the policy stays as it is.

    Raises:
        InvalidValue, UnknownName, FileProblem: as `load_initial_weights`.
    """
    if _names_weights(init):
        loadable = _loadable(policy, init)
        load_checkpoint(_path(loadable, init), loadable.kind)


def _names_weights(init: str) -> bool:
    return init == PRETRAINED or init.endswith(WEIGHTS_ENDING)


def _loadable(policy: Policy, init: str) -> Loadable:
    if not isinstance(policy, Loadable):
        hint = "It has no `kind` and no `load`."
        raise InvalidValue("init", init, "starts or none", where=f"policy {type(policy).__name__}", hint=hint)
    return policy


def _path(policy: Loadable, init: str) -> Path:
    return pretrained_path(policy.kind) if init == PRETRAINED else Path(init)


def pretrained_kinds() -> tuple[str, ...]:
    """Names of the policies that there are weights for."""
    folder = files("rlplace.policy.weights")
    return tuple(sorted(Path(one.name).stem for one in folder.iterdir() if one.name.endswith(".safetensors")))


def pretrained_path(kind: str) -> Path:
    """The file of the weights of a policy; what they are is beside it (`.json`).

    Raises:
        UnknownName: there are none for that policy.
    """
    if kind not in pretrained_kinds():
        raise UnknownName(
            "pretrained policy", kind, pretrained_kinds(), hint="Others begin with what a run kept: FILE.safetensors."
        )
    with as_file(files("rlplace.policy.weights") / f"{kind}.safetensors") as path:
        return path
