"""`untouched`: a model and its loss are after a trace what they were before, and what would be lost is refused."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from rlplace.errors import CaptureError
from rlplace.graphs.capturing.python_state import PythonState
from rlplace.graphs.capturing.references import forwards, referenced


@contextlib.contextmanager
def untouched(model: nn.Module, loss_fn: Callable[..., Any] | None = None) -> Iterator[None]:
    """Afterwards all that `forward` or the loss set (attributes, collections in them, caches) is what it was.

    While active it would hold traces. What `forward` writes to the model's buffers is part of the step.

    Raises:
        CaptureError: a plain tensor attribute was written in place, or the loss changed a buffer of its own, which the
            graph would take for constants.
    """
    of_model = list(model.named_modules())
    of_loss = modules_of_loss(model, loss_fn)
    state = PythonState((*of_model, *of_loss))
    caches = [(cache, cache.cache_info().misses) for cache in _caches(model, loss_fn)]
    shared, parametrize._cache = parametrize._cache, {}  # of `parametrize.cached()` around the capture
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
        state.restore()
        parametrize._cache = shared
        for cache, misses in caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()
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


def call_with(model: nn.Module, state: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `model` returns with other parameters and buffers, which are its own again afterwards.

    `torch.func.functional_call` does the same, but for modules with two names (`self.b = self.a`): there it takes the
    tensors of the call for those of the module, and leaves them in it.

    Args:
        model: called.
        state: every parameter and buffer, by its first dotted name; buffers that `forward` replaces are replaced in it.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    first: dict[int, str] = {}
    names: dict[str, str] = {}  # of every place of a tensor, the first of its tensor
    for path, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            for name, value in held.items():
                if value is not None:
                    place = _joined(path, name)
                    names[place] = first.setdefault(id(value), place)
    given = {place: state[name] for place, name in names.items()}
    try:
        return torch.func.functional_call(model, given, args, kwargs, tie_weights=False)
    finally:
        state.update({name: given[name] for name in state})


def modules_of_loss(model: nn.Module, loss_fn: Callable[..., Any] | None) -> list[tuple[str, nn.Module]]:
    """The modules that a loss is or reaches, with their paths, but for those of the model."""
    others = {id(module) for module in model.modules()}
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, value in referenced([] if loss_fn is None else [loss_fn]):
        if isinstance(value, nn.Module):
            for path, module in value.named_modules():
                if id(module) not in others:
                    found.setdefault(id(module), (_joined(name, path), module))
    return list(found.values())


def _caches(model: nn.Module, loss_fn: Callable[..., Any] | None) -> list[Any]:
    """Functions under `functools.lru_cache` that a model or its loss calls: what they keep are traces afterwards."""
    found = referenced([*forwards(model), loss_fn])
    return [value for _, value in found if isinstance(value, functools._lru_cache_wrapper)]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}".strip(".")
