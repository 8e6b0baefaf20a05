"""`run_eagerly`: one step of a placed model by plain PyTorch, for shapes that are not worth a capture."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from rlplace.export.placed.optimizer import CapturedOptimizer
from rlplace.export.placed.recapture import Call, Flags, as_cast, with_flags
from rlplace.export.placed.state import PlacedState
from rlplace.graphs.capturing.portable import uncompiled
from rlplace.graphs.capturing.untouched import call_with
from rlplace.graphs.program import Program, loss_of


def run_eagerly(
    program: Program,
    state: PlacedState,
    call: Call,
    flags: Flags,
    optimizer: CapturedOptimizer | None,
    loss_scale: float | None,
) -> Any:
    """What the step returns, the whole batch at once, on the device of the first parameter.

    Random ops draw from PyTorch's own generator.

    Args:
        program: of the captured step.
        state: of the model; it is read and changed as by a placed step.
        call: inputs and targets.
        flags: of the model.
        optimizer: updates the parameters, unless gradients are asked for.
        loss_scale: if given, gradients of the loss times this are added to `grad` instead.
    """
    origin = program.origin
    place = next((parameter.device for parameter in state.parameters.values()), torch.device("cpu"))
    held = {name: tensor.to(place) for name, tensor in (*state.parameters.items(), *state.buffers.items())}
    args, kwargs, targets = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(place), call)
    has_backward = program.is_training and (optimizer is not None or loss_scale is not None)
    flagged, cast = with_flags(origin.model, flags), as_cast(origin.model, origin.autocast)
    with flagged, cast, uncompiled(), torch.set_grad_enabled(has_backward):
        returned = call_with(origin.model, held, args, kwargs)
        if origin.loss_fn is not None:
            returned = origin.loss_fn(returned, *targets)
    if has_backward and loss_scale is not None:
        (loss_of(returned) * loss_scale).backward()
    elif has_backward and optimizer is not None:
        _update(loss_of(returned), state, optimizer)
    with torch.no_grad():
        for name, buffer in state.buffers.items():
            if held[name] is not buffer:  # it was moved, or `forward` replaced it
                buffer.copy_(held[name])
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, returned)


def _update(loss: torch.Tensor, state: PlacedState, optimizer: CapturedOptimizer) -> None:
    """Updates the parameters by the gradients of the loss alone; what `grad` holds stays."""
    before = {name: parameter.grad for name, parameter in state.parameters.items()}
    try:
        for parameter in state.parameters.values():
            parameter.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.as_torch.step()
    finally:
        for name, parameter in state.parameters.items():
            parameter.grad = before[name]
