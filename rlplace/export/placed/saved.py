"""What a placed step goes on from: one safetensors file, which runs no code when it is loaded."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from rlplace.errors import FileProblem
from rlplace.export.placed.optimizer import CapturedOptimizer, named_state
from rlplace.export.placed.state import PlacedState
from rlplace.files import parse_json, write_bytes_atomic

SCHEMA = 1


def save_state(
    path: str | os.PathLike[str], state: PlacedState, optimizer: CapturedOptimizer | None, about: Mapping[str, int]
) -> None:
    """Writes parameters, buffers and optimizer state, and what else a run needs to go on.

    Args:
        path: of the file.
        state: of the model.
        optimizer: of the step; None where it was captured without one.
        about: `num_steps`, `num_evaluations` and `seed`.

    Raises:
        FileProblem: the file cannot be written.
    """
    spec = None if optimizer is None else dataclasses.asdict(optimizer.spec)
    told = {"schema": SCHEMA, "optimizer": spec, **about}
    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in _tensors(state).items()}
    write_bytes_atomic(path, save(tensors, metadata={"rlplace": json.dumps(told)}))


def load_state(
    path: str | os.PathLike[str], state: PlacedState, optimizer: CapturedOptimizer | None, *, seed: int
) -> tuple[int, int]:
    """Overwrites what `save_state` kept; the numbers of steps and of evaluations until then come back.

    Args:
        path: of the file.
        state: of the same model.
        optimizer: of the step.
        seed: of the step.

    Raises:
        FileProblem: no such file, or of another model, optimizer or seed. Nothing is overwritten then.
    """
    told, found = _read(Path(path))
    own = _tensors(state)
    spec: dict[str, Any] | None = told.get("optimizer")
    name = None if optimizer is None else optimizer.spec.name
    if (spec or {}).get("name") != name:
        raise FileProblem(path, f"of a step with optimizer {(spec or {}).get('name')}, this one has {name}.")
    if told.get("seed") != seed:
        raise FileProblem(
            path, f"of a step with seed {told.get('seed')}, this one has {seed}: random ops would differ."
        )
    if optimizer is not None and spec is not None and (lacking := set(optimizer.options) - spec.keys()):
        raise FileProblem(path, f"its optimizer lacks {min(lacking)!r}.")
    for key in (*own.keys() - found.keys(), *found.keys() - own.keys()):
        where = "this step lacks it" if key in found else "the file lacks it"
        raise FileProblem(path, f"of another model: {key}, {where}.")
    for key, tensor in own.items():
        if found[key].shape != tensor.shape or found[key].dtype != tensor.dtype:
            looks = f"{found[key].dtype} {tuple(found[key].shape)}"
            raise FileProblem(path, f"of another model: {key} is {looks}, here {tensor.dtype} {tuple(tensor.shape)}.")
    with torch.no_grad():
        for key, tensor in own.items():
            tensor.copy_(found[key])
    if optimizer is not None and spec is not None:
        for option in optimizer.options:
            optimizer.set_option(option, spec[option])
    return int(told["num_steps"]), int(told["num_evaluations"])


def _tensors(state: PlacedState) -> dict[str, torch.Tensor]:
    """All tensors of a model and its optimizer, by what the file calls them."""
    model = {f"model.{name}": state.tensor(name) for name in (*state.parameters, *state.buffers)}
    moments = {
        f"optimizer.{key}.{name}": tensor
        for name, update in state.updates.items()
        for key, tensor in named_state(update).items()
    }
    return {**model, **moments}


def _read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            told = parse_json((file.metadata() or {}).get("rlplace", "{}"), path)
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
    except SafetensorError as error:
        raise FileProblem(
            path,
            f"cannot be read as a file of `step.save(path)` ({error}): a `state_dict` of `torch.save` is loaded by "
            f"`step.load_state_dict(torch.load(path))`.",
        ) from error
    except (OSError, ValueError) as error:
        raise FileProblem(path, f"cannot be read: {error}.") from error
    is_ours = isinstance(told, dict) and told.get("schema") == SCHEMA
    if is_ours:
        told.setdefault("num_evaluations", 0)  # older files lack it
        is_ours = all(isinstance(told.get(count), int) for count in ("num_steps", "num_evaluations"))
    if not is_ours or not isinstance(told.get("optimizer"), dict | None):
        raise FileProblem(path, f"no state of a placed step of schema {SCHEMA}: `step.save(path)` writes one.")
    return told, tensors
