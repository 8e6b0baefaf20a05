"""What an op is going to return, before it runs: memory without values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fake_gpus.fake_tensors import map_tensors, poison, tensors_in

_layouts: dict[Any, Any] = {}


def empty_outputs(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func` is going to return, its memory worthless; None if that shares memory with an argument.

    It is found by running each op once on zeros of the same layout.
    """
    key = (func, _key(args), _key(kwargs))
    if key not in _layouts:
        before = torch.get_rng_state()
        zeros = map_tensors(_zeros, (args, kwargs))
        out = func(*zeros[0], **zeros[1])
        torch.set_rng_state(before)
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in(zeros)}
        is_view = any(tensor.untyped_storage()._cdata in given for tensor in tensors_in(out))
        _layouts[key] = None if is_view else map_tensors(_Layout, out)
    return _made(_layouts[key])


class _Layout:
    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.strides, self.dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype

    def empty(self) -> Tensor:
        tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype)
        poison(tensor)
        return tensor


def _made(value: Any) -> Any:
    if isinstance(value, _Layout):
        return value.empty()
    if isinstance(value, (list, tuple)):
        return type(value)([_made(item) for item in value])
    return value


def _zeros(tensor: Tensor) -> Tensor:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    length = last + 1 if tensor.numel() else 0
    return torch.zeros(length, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(_key(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in value.items())
    return type(value), repr(value)
