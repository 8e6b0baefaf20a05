"""What is refused before, around or after a trace: models, tensors and draws that no graph can hold."""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from rlplace.errors import CaptureError
from rlplace.graphs.capturing.failures import user_line
from rlplace.graphs.program import Autocast

MOST_NAMED = 8
"""Hooks that a warning names."""


def check_model(model: nn.Module, *, is_training: bool) -> None:
    """Refuses modules that no trace goes through, or that have no shape yet.

    Raises:
        CaptureError: names the module and what to pass instead.
    """
    for path, module in model.named_modules():
        place = f"module {path}" if path else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            wrong, instead = "is a ScriptModule", "pass the module that it was scripted from"
        elif isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            wrong, instead = f"is a {type(module).__name__}", "pass what it wraps, its `module`"
        elif any(map(nn.parameter.is_lazy, (*module.parameters(recurse=False), *module.buffers(recurse=False)))):
            wrong, instead = "has lazy parameters without a shape", "call the model once with its inputs first"
        elif is_training and any(
            parameter._post_accumulate_grad_hooks for parameter in module.parameters(recurse=False)
        ):
            wrong = "has parameters with post-accumulate hooks, which would not run"
            instead = "use `register_hook` for what changes a gradient, and an update of ours (`optimizer=...`)"
        else:
            continue
        raise CaptureError(f"cannot capture the model: {place} ({type(module).__name__}) {wrong}; {instead}.")


def warn_of_hooks(model: nn.Module) -> None:
    """Warns of hooks of modules, but for PyTorch's own: they run in captures, and never in a placed step."""
    kinds = ("forward_pre", "forward", "backward_pre", "backward")
    found = [
        f"{path or 'the root'}: {kind} hook {getattr(hook, '__qualname__', type(hook).__name__)}"
        for path, module in model.named_modules()
        for kind in kinds
        for hook in getattr(module, f"_{kind}_hooks").values()
        if not (getattr(hook, "__module__", None) or "").startswith("torch.")
    ]
    if found:
        warnings.warn(
            "hooks of modules run while a step is captured, with tensors that have no values, and never in a placed "
            "step: what they compute is part of the graph, what they record or print is not. "
            f"{'; '.join(found[:MOST_NAMED])}{f'; and {len(found) - MOST_NAMED} more' * (len(found) > MOST_NAMED)}",
            RuntimeWarning,
            stacklevel=3,
        )


def check_devices(
    state: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor] = ()
) -> None:
    """Refuses models that are spread over devices, on `meta`, or elsewhere than their inputs and targets.

    Raises:
        CaptureError: names one tensor of each device.
    """
    named = {**state, **{f"input {k}": tensor for k, tensor in enumerate(inputs)}}
    named |= {f"target {k}": tensor for k, tensor in enumerate(targets)}
    first: dict[torch.device, str] = {}
    for name, tensor in named.items():
        if tensor.layout is not torch.strided:
            raise CaptureError(
                f"{name} is a sparse tensor ({tensor.layout}), expected dense ones; densify it before (`.to_dense()`)."
            )
        if tensor.dim() or tensor.device.type != "cpu":  # a scalar on the CPU goes with any device
            first.setdefault(tensor.device, name)
    for device, name in first.items():
        if device.type == "meta":
            raise CaptureError(
                f"{name} is on device meta, expected tensors of a real device; build the model and its inputs under "
                f"`torch._subclasses.fake_tensor.FakeTensorMode()` to capture without allocating."
            )
    if len(first) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in first.items())
        raise CaptureError(
            f"the model and its inputs are on {len(first)} devices ({places}), expected one; move them to one device, "
            f"placing them is our part."
        )


def active_autocast(tensors: Sequence[torch.Tensor]) -> Autocast | None:
    """The autocast that is active for the device of `tensors`, None without one.

    Raises:
        CaptureError: one is active for another device, where it changes nothing.
    """
    place = next((tensor.device.type for tensor in tensors), "cpu")
    for kind in ("cpu", "cuda"):
        if kind != place and torch.is_autocast_enabled(kind):
            raise CaptureError(
                f'`torch.autocast("{kind}")` is active around the capture of a model on device {place}, where it casts '
                f'nothing; use `torch.autocast("{place}", dtype=...)`, whose casts are captured and run wherever they '
                f"are placed, or make the model one of low precision (`.to(torch.bfloat16)`)."
            )
    return Autocast(torch.get_autocast_dtype(place)) if torch.is_autocast_enabled(place) else None


def check_apart(named: Mapping[str, torch.Tensor], written: Set[str]) -> None:
    """Refuses tensors that share memory with one that the step writes to: on two devices they would come apart.

    Args:
        named: parameters, buffers, inputs and constants.
        written: names of those that change in place.

    Raises:
        CaptureError: names both.
    """
    by_storage: dict[int, list[str]] = {}
    for name, tensor in named.items():
        by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    for sharing in by_storage.values():
        for name in filter(written.__contains__, sharing) if len(sharing) > 1 else ():
            low, high = _span(named[name])
            for other in sharing:
                if other != name and _span(named[other])[0] < high and low < _span(named[other])[1]:
                    raise CaptureError(
                        f"the step writes to {name}, which shares memory with {other}, and they may be placed apart; "
                        f"give one of them memory of its own (`.clone()`), or tie them by one name."
                    )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of its storage that a tensor shows, and the one behind the last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    num_items = 1 + reach if tensor.numel() else 0
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + num_items * tensor.element_size()


def check_dense(names: Sequence[str], gradients: Sequence[torch.Tensor | None]) -> None:
    """Refuses sparse gradients.

    Raises:
        CaptureError: names the parameter.
    """
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is not None and gradient.layout is not torch.strided:
            raise CaptureError(
                f"the gradient of parameter {name!r} is sparse ({gradient.layout}), expected a dense one: updates and "
                f"transfers are of dense tensors; pass `sparse=False` to its embedding."
            )


@contextlib.contextmanager
def no_numbers_drawn(again: Callable[[], object]) -> Iterator[None]:
    """Refuses what draws from Python's or NumPy's own generator: the graph would hold the same draw for ever.

    Args:
        again: repeats what is watched, to find the line that draws.

    Raises:
        CaptureError: something was drawn; both generators are as they were before.
    """
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
        drawn = _drawn(python, numpy)
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
    if not drawn:
        return
    source, profile = "", sys.getprofile()
    try:
        sys.setprofile(_raise_on_draw)
        again()
    except _Drew as error:
        source = user_line(error)
    finally:
        sys.setprofile(profile)
        random.setstate(python)
        np.random.set_state(numpy)
    raise CaptureError(
        f"cannot capture the model: it draws from {drawn}'s random generator, at {source or 'an unknown line'}. Every "
        f"step would repeat that one draw. Hint: draw with torch (`torch.rand`), which is part of the graph and seeded "
        f"for every step, or draw outside and pass the number as an argument.",
        source=source,
    )


def _drawn(python: Any, numpy: Any) -> str:
    if random.getstate() != python:
        return "Python"
    now: Any = np.random.get_state()
    return "NumPy" if now[2] != numpy[2] or not np.array_equal(now[1], numpy[1]) else ""


class _Drew(BaseException):
    """Raised where a number is drawn."""


def _raise_on_draw(_: FrameType, event: str, called: Any) -> None:
    if event == "c_call" and getattr(called, "__self__", None) is random._inst:
        sys.setprofile(None)
        raise _Drew
