"""`join`: several models on one host as one workload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlplace.workloads.workload import BatchDims, Loss, Parts


class Multi(nn.Module):
    """Models side by side, each a child under its own name; the output is every model's own, by that name."""

    def __init__(self, models: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, model in models.items():
            self.add_module(name, model)

    def forward(self, **inputs: Tensor) -> dict[str, Any]:
        """Outputs by model; `inputs` are `NAME.0`, `NAME.1`, ... or `NAME.key` of every model."""
        outputs = {}
        for name, model in self.named_children():
            own = {key.removeprefix(f"{name}."): x for key, x in inputs.items() if key.startswith(f"{name}.")}
            args = [own.pop(str(index)) for index in range(len(own)) if str(index) in own]
            outputs[name] = model(*args, **own)
        return outputs


def join(members: Sequence[tuple[str, float, Parts]]) -> Parts:
    """One model of all members, whose loss is the sum of theirs.

    Args:
        members: for each its name (a second `gpt2` becomes `gpt2_2`), the weight of its loss, and what it was built to.
    """
    models: dict[str, nn.Module] = {}
    inputs: dict[str, Tensor] = {}
    losses: dict[str, tuple[float, Any]] = {}
    for position, (plain, weight, parts) in enumerate(members):
        count = 1 + sum(other == plain for other, _, _ in members[:position])
        name = plain if count == 1 else f"{plain}_{count}"
        models[name] = parts.model
        losses[name] = (weight, parts.loss_fn)
        named = parts.inputs.items() if isinstance(parts.inputs, dict) else enumerate(parts.inputs)
        inputs |= {f"{name}.{key}": tensor for key, tensor in named}

    def loss_fn(outputs: dict[str, Any]) -> Tensor:
        return torch.stack([weight * loss(outputs[name]) for name, (weight, loss) in losses.items()]).sum()

    every = [parts for _, _, parts in members]
    dims = tuple(dim for parts in every for dim in _batch_dims(parts))
    return Parts(Multi(models), inputs, loss_fn, dims, _loss([parts.loss for parts in every]))


def _batch_dims(parts: Parts) -> BatchDims:
    """What is cut of one member: as it says, else dimension 0 of tensors as long there as the first."""
    if parts.batch_dims is not None:
        return parts.batch_dims
    tensors = list(parts.inputs.values() if isinstance(parts.inputs, dict) else parts.inputs)
    return tuple(0 if tensor.shape[:1] == tensors[0].shape[:1] else None for tensor in tensors)


def _loss(kinds: Sequence[Loss]) -> Loss:
    """The kind of a sum of losses: accumulated with any that is, one that all have, else to be found."""
    if "accumulated" in kinds:
        return "accumulated"
    return kinds[0] if len(set(kinds)) == 1 else "auto"
