"""`capture`: any `nn.Module` as an `OpGraph`."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rlplace.errors import InvalidValue
from rlplace.graphs.capturing.lower import lower
from rlplace.graphs.capturing.trace import LossFn, trace_step
from rlplace.graphs.opgraph import OpGraph
from rlplace.graphs.optimizers import resolve_optimizer
from rlplace.graphs.program import OptimizerSpec, Origin


def capture(
    model: nn.Module,
    inputs: Any,
    loss_fn: LossFn | None = None,
    optimizer: str | OptimizerSpec | None = None,
) -> OpGraph:
    """The ATen-level graph of one step of `model`, its executable `program` attached.

    With a loss it is a training step: forward, loss, gradients of every parameter that requires one, and, with an
    optimizer, their in-place updates. Without, it is inference: the forward alone, under `no_grad`.

    The model is traced with fake tensors: nothing is computed, and its parameters and buffers stay as they are.

    Args:
        model: in the mode (`train` or `eval`) that the step is to run in.
        inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments.
        loss_fn: takes the model's output, returns a scalar tensor.
        optimizer: `sgd`, `momentum`, `adam`, `adamw` or an `OptimizerSpec`; needs a loss.

    Raises:
        CaptureError: the model cannot be captured (control flow that depends on data).
        InvalidValue: a model, inputs, loss or optimizer of another type, or an optimizer without a loss.
        UnknownName: an unknown optimizer.

    >>> import torch
    >>> graph = capture(torch.nn.Linear(2, 1), torch.ones(3, 2), lambda y: y.sum(), "sgd")
    >>> [name for name in graph.names if name.startswith("update")]
    ['update_weight', 'update_bias']
    """
    _check_types(model, loss_fn)
    spec = resolve_optimizer(optimizer)
    if spec is not None and loss_fn is None:
        raise InvalidValue(
            "loss_fn", None, "a function of the output", where="capture", hint="An optimizer needs a loss."
        )
    args, kwargs = as_call(inputs)
    is_training = loss_fn is not None
    with _uncollected():
        trace = trace_step(model, args, kwargs, loss_fn, is_training=is_training)
        return lower(trace, spec, Origin(model, args, kwargs, loss_fn), is_training=is_training)


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs as (args, kwargs): a tensor is one argument, a tuple or list several, a dict keyword arguments.

    Raises:
        InvalidValue: anything else.
    """
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    if isinstance(inputs, dict):
        return (), dict(inputs)
    raise InvalidValue("inputs", type(inputs).__name__, "a tensor, a tuple or a dict", where="capture")


def _check_types(model: object, loss_fn: object) -> None:
    if not isinstance(model, nn.Module):
        found = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise InvalidValue("model", found, "a torch.nn.Module", where="capture")
    if loss_fn is not None and not callable(loss_fn):
        expected = "a function of the model's output that returns a scalar"
        raise InvalidValue("loss_fn", type(loss_fn).__name__, expected, where="capture")


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """While active, Python looks for no cycles among the objects of the trace: all of them stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
