"""`untouched`: a model and its loss are after a trace what they were before, and what would be lost is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from rlplace.errors import CaptureError
from rlplace.graphs.capturing.references import referenced


@contextlib.contextmanager
def untouched(model: nn.Module, loss_fn: Callable[..., Any] | None = None) -> Iterator[None]:
    """Afterwards attributes that `forward` or the loss set (a cache, a counter) are what they were: they hold traces.

    The model's buffers are none of them: what `forward` writes there is part of the step.

    Raises:
        CaptureError: a plain tensor attribute was written in place, or the loss changed a buffer of its own, which the
            graph would take for constants.
    """
    of_model = list(model.named_modules())
    of_loss = _modules_of(loss_fn, {id(module) for _, module in of_model})
    before = [(module, dict(vars(module))) for _, module in (*of_model, *of_loss)]
    buffers = [(module, dict(module._buffers)) for _, module in of_loss]
    plain = [
        (_joined(path, name), value, value._version, value.detach().clone())
        for path, module in (*of_model, *of_loss)
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and not value.is_inference()
    ]
    held = [
        (_joined(path, name), module, name, value, value._version, value.detach().clone())
        for path, module in of_loss
        for name, value in module._buffers.items()
        if value is not None and not value.is_inference()
    ]
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    finally:
        written = [(name, value, was) for name, value, version, was in plain if value._version != version]
        changed = [
            (path, value, was)
            for path, module, name, value, version, was in held
            if value._version != version or module._buffers.get(name) is not value
        ]
        for module, attributes in before:
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
        for module, values in buffers:
            module._buffers.clear()
            module._buffers.update(values)
        with torch.no_grad():
            for _, tensor, was in (*written, *changed):
                tensor.copy_(was)
    if changed:
        raise CaptureError(
            f"the loss changes its buffer {changed[0][0]!r}, which every placed step would take for a constant. Hint: "
            "change a buffer of the model in its `forward` and return it, or pass the value as a target; a network "
            "with batch norm that the loss reads is to be in `eval()` mode."
        ) from failure
    if failure is not None:
        raise failure
    if written:
        raise CaptureError(
            f"`forward` writes to {written[0][0]!r} in place, a tensor in a plain attribute, which the graph would "
            f"hold as a constant; make it a buffer (`register_buffer`)."
        )


def _modules_of(loss_fn: Callable[..., Any] | None, others: set[int]) -> list[tuple[str, nn.Module]]:
    """The modules that a loss is or reaches, with their paths, but for those of the model."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, value in referenced([] if loss_fn is None else [loss_fn]):
        if isinstance(value, nn.Module):
            for path, module in value.named_modules():
                if id(module) not in others:
                    found.setdefault(id(module), (_joined(name, path), module))
    return list(found.values())


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}".strip(".")
