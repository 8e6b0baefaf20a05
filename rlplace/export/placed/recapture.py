"""Captures a model again as it was captured before: for other shapes, or for its forward alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlplace.graphs.capturing.capture import capture, capture_step
from rlplace.graphs.interpreter import require_program
from rlplace.graphs.micro_batching.loss_verdict import LossVerdict
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.program import Autocast, Origin

Call = tuple[tuple[Any, ...], dict[str, Any], tuple[torch.Tensor, ...]]
"""Positional arguments, keyword arguments and targets."""


@dataclass(frozen=True, slots=True)
class Flags:
    """What a model is set to, which a capture looks at.

    Attributes:
        modes: whether each module, by dotted name, is training.
        trained: whether each parameter, by dotted name, requires a gradient.
    """

    modes: dict[str, bool]
    trained: dict[str, bool]


def flags_of(model: nn.Module) -> Flags:
    """How the model is set now."""
    return Flags(modes_of(model), {name: each.requires_grad for name, each in model.named_parameters()})


def modes_of(model: nn.Module) -> dict[str, bool]:
    """Whether each module, by dotted name, is training."""
    return {name: module.training for name, module in model.named_modules()}


@contextlib.contextmanager
def in_modes(model: nn.Module, modes: Mapping[str, bool]) -> Iterator[None]:
    """While active, modules train or evaluate as `modes` says."""
    before = modes_of(model)
    modules = dict(model.named_modules())
    try:
        for name, is_training in modes.items():
            modules[name].training = is_training
        yield
    finally:
        for name, is_training in before.items():
            modules[name].training = is_training


@contextlib.contextmanager
def with_flags(model: nn.Module, flags: Flags) -> Iterator[None]:
    """While active, modules and parameters of `model` are set as `flags` says."""
    parameters = dict(model.named_parameters())
    before = {name: parameter.requires_grad for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.requires_grad_(flags.trained[name])
        with in_modes(model, flags.modes):
            yield
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(before[name])


def captured_again(graph: OpGraph, call: Call, flags: Flags) -> OpGraph:
    """The step of `graph` for other inputs and targets.

    Args:
        graph: with its program.
        call: alike but for shapes.
        flags: of the model, as they were.

    Raises:
        CaptureError: the model cannot be captured for these.
        InvalidValue: the batch cannot be cut so.
    """
    program = require_program(graph)
    origin, (args, kwargs, targets) = program.origin, call
    with with_flags(origin.model, flags), as_cast(origin.model, origin.autocast):
        if origin.micro is None:
            again = Origin(origin.model, args, kwargs, origin.loss_fn, targets, frozen=origin.frozen)
            return capture_step(again, program.optimizer)
        slicing = origin.micro.slicing
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        lengths = (
            tensor.shape[dim] for tensor, dim in zip([*tensors, *targets], slicing.dims, strict=True) if dim is not None
        )
        inputs: Any = {**kwargs} if kwargs and not args else args
        return capture(
            origin.model,
            inputs,
            origin.loss_fn,
            program.optimizer,
            targets=targets or None,
            micro_batches=min([slicing.num_micro_batches, *lengths]),
            batch_dims=slicing.dims,
            loss=LossVerdict.of(origin.micro),
            frozen=origin.frozen,
        )


def captured_evaluation(graph: OpGraph, call: Call) -> OpGraph:
    """The forward alone of the model of `graph`, all of its modules evaluating.

    Args:
        graph: with its program.
        call: its targets are not used.

    Raises:
        CaptureError: the model cannot be captured so.
    """
    origin, (args, kwargs, _) = require_program(graph).origin, call
    model = origin.model
    with in_modes(model, dict.fromkeys(modes_of(model), False)), as_cast(model, origin.autocast):
        return capture_step(Origin(model, args, kwargs, None, frozen=origin.frozen), None)


def as_cast(model: nn.Module, autocast: Autocast | None) -> AbstractContextManager[object]:
    """Autocast as it was around a capture, also where it was off."""
    kind = next((tensor.device.type for tensor in model.parameters()), "cpu")
    return torch.autocast(kind, enabled=False) if autocast is None else autocast.entered(kind)
