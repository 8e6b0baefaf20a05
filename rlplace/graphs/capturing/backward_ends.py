"""Where the backward of a traced step begins: at its loss, or at outputs whose gradients are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch.utils import _pytree as pytree

from rlplace.errors import CaptureError
from rlplace.graphs.program import loss_of


@dataclass(frozen=True)
class AsModule:
    """How the step of a module differs from one with a loss: the gradients of its outputs are given, as targets.

    Attributes:
        outputs: positions, among the tensors that the model returns, of those whose gradients are given.
        inputs: positions, among the input tensors, of those whose gradients are wanted.
    """

    outputs: tuple[int, ...]
    inputs: tuple[int, ...] = ()


@dataclass(frozen=True)
class AsSlice:
    """How the step of one micro-batch differs from a whole one; its batch norms hand out their statistics.

    Attributes:
        weight: the gradient of its loss: a constant, so that no backward waits for a loss. None where it has no loss
            of its own.
        outputs: the tensors among the model's outputs that have a gradient, which is given in place of targets; of a
            training step without a loss of its own.
    """

    weight: float | None = None
    outputs: tuple[int, ...] = ()


def backward_ends(
    result: Any, given: list[torch.Tensor], part: AsSlice | AsModule | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Where the backward of a traced step begins, and with which gradients.

    Args:
        result: what the model (or the loss) returned.
        given: the gradients of outputs that `part` takes as given.
        part: of a micro-batch or a module; None for a whole step with a loss.

    Raises:
        CaptureError: the loss is no scalar, or depends on no parameter; or that of a micro-batch is more than the loss.
    """
    if part is None:
        loss = _check_loss(loss_of(result))
        with fx_traceback.annotate({"seed": True}):
            return [loss], [torch.ones_like(loss, memory_format=torch.preserve_format)]
    if isinstance(part, AsSlice) and part.weight is not None:
        loss = _check_loss(check_alone(result))
        with fx_traceback.annotate({"seed": True}):
            return [loss], [torch.full(loss.shape, part.weight, dtype=loss.dtype, device=loss.device)]
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return [tensors[position] for position in part.outputs], given


def check_alone(returned: Any) -> Any:
    """What a loss function returned for micro-batches, if it is not more than the loss.

    Raises:
        CaptureError: it is.
    """
    if isinstance(returned, (list, tuple)):
        raise CaptureError(
            f"the loss function returned a {type(returned).__name__}, expected the loss alone: what else it returns "
            f"belongs to the whole batch, which micro-batches do not see. Return the loss alone, or capture with "
            f"micro_batches=1."
        )
    return returned


def _check_loss(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise CaptureError(
            f"the loss is {shape}, expected a scalar tensor, or a tuple that begins with one; reduce it (`.mean()`) in "
            f"`loss_fn`."
        )
    if loss.grad_fn is None:
        raise CaptureError(
            "the loss does not depend on any parameter that requires a gradient; unfreeze one, or capture inference "
            "(leave `loss_fn` out)."
        )
    return loss
