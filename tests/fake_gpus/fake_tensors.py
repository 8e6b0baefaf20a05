"""Tensors that say that they are on a GPU, in front of real ones of the host that hold their values."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fake_gpus.vector_clocks import Memory

if TYPE_CHECKING:
    from fake_gpus.late_queues import FakeStream
    from fake_gpus.machine import Machine

HOST = -1
"""Stands for the host where a GPU has its number."""
POISON = 113
"""What memory without a value holds if its type has no NaN."""


class Block:
    """Memory that some tensors show; tells the machine when the last of them is gone."""

    def __init__(self, machine: Machine, gpu: int, stream: FakeStream | None, inner: Tensor, memory: Memory) -> None:
        self.machine, self.gpu, self.stream, self.memory = machine, gpu, stream, memory
        self.inner = inner  # a tensor in front of all of it
        self.num_bytes = inner.untyped_storage().nbytes()
        self.kept_for: list[FakeStream] = []
        self.is_pinned = False

    def __del__(self) -> None:
        self.machine.freed(self)


class FakeTensor(Tensor):
    """`inner`, on another device."""

    inner: Tensor
    block: Block

    @staticmethod
    def __new__(cls, inner: Tensor, block: Block) -> FakeTensor:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[no-any-return]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device("cpu") if block.gpu == HOST else torch.device("cuda", block.gpu),
        )

    def __init__(self, inner: Tensor, block: Block) -> None:
        self.inner, self.block = inner, block

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        machine = next(fakes_in((args, kwargs or {}))).block.machine
        return machine.dispatch(func, args, kwargs or {})

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: FakeTensor) -> None:
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.inner, self.block = other.inner, other.block

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Past PyTorch's own, which asks CUDA for the current device."""
        return torch.ops.aten.copy_.default(self, source, non_blocking)  # type: ignore[no-any-return]

    def __repr__(self, **_: Any) -> str:
        return f"{self.block.memory.name} {tuple(self.shape)}"


class Mode(TorchDispatchMode):
    """While active, what the calling thread makes anew also belongs to the machine."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._machine.dispatch(func, args, kwargs or {})


def fakes_in(value: Any) -> Iterator[FakeTensor]:
    return (tensor for tensor in tensors_in(value) if isinstance(tensor, FakeTensor))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def map_tensors(function: Any, value: Any) -> Any:
    """Nested arguments with `function` of every tensor in its place."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)([map_tensors(function, item) for item in value])
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    return value


def inner_of(tensor: Tensor) -> Tensor:
    return tensor.inner if isinstance(tensor, FakeTensor) else tensor


def gpu_of(tensor: Tensor) -> int:
    return tensor.block.gpu if isinstance(tensor, FakeTensor) else HOST


def poison(tensor: Tensor) -> None:
    """Makes all of the memory behind a tensor of the host worthless."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())  # type: ignore[call-overload]
    whole.fill_(float("nan") if tensor.dtype.is_floating_point else True if tensor.dtype is torch.bool else POISON)


@dataclass(frozen=True)
class Effects:
    """What an ATen op does to memory, as its schema says.

    Attributes:
        written: names and positions of arguments that it writes to.
        returns_written: whether it returns these instead of new tensors.
        is_view: whether it only looks at memory in another way.
        is_random: whether it draws random numbers.
        needs_values: whether the host must know values before it can tell the shape of what comes back.
        is_composite: whether it is made of other ops.
    """

    written: tuple[tuple[int, str], ...]
    returns_written: bool
    is_view: bool
    is_random: bool
    needs_values: bool
    is_composite: bool

    def tensors_written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        values = [args[at] if at < len(args) else kwargs.get(name) for at, name in self.written]
        return list(tensors_in(values))


@functools.cache
def effects(func: Any) -> Effects:
    """Of an `OpOverload`."""
    schema = func._schema
    marked = [
        (at, each.name) for at, each in enumerate(schema.arguments) if each.alias_info and each.alias_info.is_write
    ]
    returned = [each.alias_info for each in schema.returns]
    return Effects(
        written=tuple(marked),
        returns_written=bool(marked) and all(info is not None and info.is_write for info in returned),
        is_view=any(info is not None and not info.is_write for info in returned),
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        needs_values=bool({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags)),
        is_composite=torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"),
    )


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """While active, ops are PyTorch's own on plain tensors, neither of inference mode nor with gradients."""
    with torch._C._DisableTorchDispatch(), torch.inference_mode(False), torch.no_grad():
        yield
