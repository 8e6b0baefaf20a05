"""`join`: several models on one host as one workload."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlplace.workloads.workload import Parts


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

    return Parts(Multi(models), inputs, loss_fn)
