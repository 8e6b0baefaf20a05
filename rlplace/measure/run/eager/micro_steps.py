"""`run_in_micro_batches`: what a step in micro-batches computes, eagerly, one slice of the batch after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rlplace.graphs.program import MicroBatches


def run_in_micro_batches(
    model: Callable[..., Any],
    call: tuple[tuple[Any, ...], dict[str, Any]],
    loss_fn: Callable[..., torch.Tensor] | None,
    targets: tuple[torch.Tensor, ...],
    micro: MicroBatches,
) -> Any:
    """The loss, its gradients added to those of the parameters; without a loss the joined output.

    Args:
        model: takes a slice of the inputs.
        call: (args, kwargs) of the whole batch.
        loss_fn: of the output and the targets; None for inference.
        targets: of the whole batch.
        micro: how the batch is cut.
    """
    leaves, spec = pytree.tree_flatten(call)
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    parts = [micro.slicing.cut([*inputs, *targets], index) for index in range(micro.slicing.num_micro_batches)]

    def output(index: int) -> Any:
        given = iter(parts[index])
        args, kwargs = pytree.tree_unflatten(
            [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
        )
        return model(*args, **kwargs)

    if loss_fn is None:
        return _joined([output(index) for index in range(len(parts))], micro.output_dims)
    if micro.loss == "joined":
        whole = loss_fn(_joined([output(index) for index in range(len(parts))], micro.output_dims), *targets)
        whole.backward()  # type: ignore[no-untyped-call]
        return whole.detach()
    total: torch.Tensor | None = None
    for index, weight in enumerate(micro.weights):
        loss = loss_fn(output(index), *parts[index][len(inputs) :]) * weight
        loss.backward()  # type: ignore[no-untyped-call]
        total = loss.detach() if total is None else total + loss.detach()
    return total


def _joined(outputs: Sequence[Any], dims: Sequence[int | None]) -> Any:
    """The outputs of micro-batches as one: tensors joined where they grow with the batch, else those of the first."""
    leaves, spec = pytree.tree_flatten(outputs[0])
    others = [pytree.tree_leaves(each) for each in outputs]
    places = [position for position, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    for position, dim in zip(places, dims, strict=True):
        if dim is not None:
            leaves[position] = torch.cat([each[position] for each in others], dim)
    return pytree.tree_unflatten(leaves, spec)
