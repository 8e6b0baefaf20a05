"""`Ops`: what an ATen op on tensors of a machine does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fake_gpus.fake_tensors import (
    HOST,
    Effects,
    FakeTensor,
    Mode,
    effects,
    fakes_in,
    gpu_of,
    inner_of,
    map_tensors,
    plainly,
    tensors_in,
)
from fake_gpus.late_queues import FakeEvent, FakeStream
from fake_gpus.output_shapes import empty_outputs
from fake_gpus.vector_clocks import Memory

if TYPE_CHECKING:
    from fake_gpus.machine import Machine

BOOLS = (torch.bool, torch.uint8)
"""Types of masks: what they select is known from their values alone."""


class Ops:
    """Runs ops on the host at once, on a GPU when its stream comes to them, and tells the machine's order."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an ATen op does here: on the host at once, on a GPU when its stream comes to it."""
        does = effects(func)
        if does.is_composite:  # in inference mode they come whole
            with Mode(self._machine) if self._machine.is_attached else contextlib.nullcontext():
                return func.decompose(*args, **kwargs)
        with self._machine.mutex, plainly():
            if func is torch.ops.aten.copy_.default:
                self._move(args[0], args[1], is_async=len(args) > 2 and bool(args[2]))
                return args[0]
            gpus = {gpu_of(tensor) for tensor in tensors_in((args, kwargs)) if tensor.dim() or gpu_of(tensor) != HOST}
            device = kwargs.get("device")
            if device is not None:
                there = device.index if device.type == "cuda" else HOST
                if func is torch.ops.aten._to_copy.default and there != gpu_of(args[0]):
                    return self._copy_to(there, func, args, kwargs)
                gpus, kwargs = {there}, {**kwargs, "device": torch.device("cpu")}
            if len(gpus) > 1:
                tensors = [(gpu_of(tensor), tensor) for tensor in tensors_in((args, kwargs))]
                self._machine.order.blame("place", f"{func} on tensors of {tensors}")
                raise RuntimeError(f"Expected all tensors to be on the same device, but found {sorted(gpus)}")
            gpu = gpus.pop() if gpus else HOST
            if does.is_view:
                return self._view(func, args, kwargs)
            if gpu == HOST:
                return self._run_on_host(func, does, args, kwargs)
            return self._run_on_gpu(gpu, func, does, args, kwargs)

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._wrap(func(*map_tensors(inner_of, args), **map_tensors(inner_of, kwargs)), args, HOST, None, "view")

    def _run_on_host(self, func: Any, does: Effects, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reads, writes = _accesses(does, args, kwargs)
        what = str(func)
        self._machine.host.tick()
        self._machine.order.access(self._machine.host, reads, writes, what)
        inner_args, inner_kwargs = map_tensors(inner_of, (args, kwargs))
        if not self._machine.is_attached:
            return self._wrap(func(*inner_args, **inner_kwargs), args, HOST, None, what, is_tracked=False)
        if does.is_random:
            generator = self._machine.generators[HOST]
            with _drawing(generator.get_state()):
                return self._wrap(func(*inner_args, **inner_kwargs), args, HOST, None, what)
        return self._wrap(func(*inner_args, **inner_kwargs), args, HOST, None, what)

    def _run_on_gpu(self, gpu: int, func: Any, does: Effects, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stream, what = self._machine.current_stream(gpu), str(func)
        reads, writes = _accesses(does, args, kwargs)
        inner_args, inner_kwargs = map_tensors(inner_of, (args, kwargs))
        state = self._machine.generators[gpu].get_state() if does.is_random else None

        def run() -> Any:
            with _drawing(state) if state is not None else contextlib.nullcontext():
                return func(*inner_args, **inner_kwargs)

        is_awaited = does.needs_values and not (
            func is torch.ops.aten.index.Tensor and all(t.dtype not in BOOLS for t in tensors_in(args[1]))
        )
        if is_awaited:
            self._machine.order.launch(self._machine.host, stream.actor, reads, writes, what)
            self._wait_for(stream, what)
        if is_awaited or not self._machine.queues.is_late:
            out = self._wrap(run(), args, gpu, stream, what)
        elif does.returns_written:
            self._machine.queues.launch(stream, run)
            written = does.tensors_written(args, kwargs)
            out = written[0] if len(func._schema.returns) == 1 else tuple(written)[: len(func._schema.returns)] or None
        else:
            empty = empty_outputs(func, inner_args, inner_kwargs)
            if empty is None:
                return self._view(func, args, kwargs)
            out = self._wrap(empty, args, gpu, stream, what)
            self._machine.queues.launch(stream, lambda: _fill(empty, run()))
        if not is_awaited:
            fresh = [each.block.memory for each in fakes_in(out) if not each.block.memory.used]
            self._machine.order.launch(self._machine.host, stream.actor, reads, [*writes, *fresh], what)
        return out

    def _copy_to(self, gpu: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source = args[0]
        is_async, kwargs = bool(kwargs.get("non_blocking")), {**kwargs, "device": torch.device("cpu")}
        empty = empty_outputs(func, (inner_of(source),), kwargs)
        stream = None if gpu == HOST else self._machine.current_stream(gpu)
        target = self._wrap(empty, (), gpu, stream, "copy", is_tracked=gpu != HOST or self._machine.is_attached)
        if stream is not None:
            self._machine.order.launch(self._machine.host, stream.actor, [], [target.block.memory], "allocation")
        self._move(target, source, is_async=is_async)
        return target

    def _move(self, target: Tensor, source: Tensor, *, is_async: bool) -> None:
        """Copies as PyTorch does: between GPUs on the source's stream, both streams waiting for each other."""
        reads = [source.block.memory] if isinstance(source, FakeTensor) else []
        writes = [target.block.memory] if isinstance(target, FakeTensor) else []
        here, there, run = gpu_of(source), gpu_of(target), _Copy(inner_of(target), inner_of(source))
        if here == there == HOST:
            self._machine.host.tick()
            self._machine.order.access(self._machine.host, reads, writes, "copy")
            run()
            return
        stream = self._machine.current_stream(here if here != HOST else there)
        receiving = self._machine.current_stream(there) if HOST not in (here, there) and here != there else None
        if receiving is not None:
            self._barrier(receiving, stream)
        self._machine.order.launch(self._machine.host, stream.actor, reads, writes, "copy")
        self._machine.queues.launch(stream, run)
        if receiving is not None:
            self._barrier(stream, receiving)
        elif here != there:
            ours = source if here == HOST else target
            is_pinned = isinstance(ours, FakeTensor) and ours.block.is_pinned
            if not (is_async and is_pinned):
                self._wait_for(stream, "a copy of memory that is not pinned")

    def _wait_for(self, stream: FakeStream, what: str) -> None:
        """What an op does that needs to know values."""
        if self._machine.forbids_waits:
            raise RuntimeError(f"called a synchronizing CUDA operation: {what}")
        self._machine.await_stream(stream)

    def _barrier(self, first: FakeStream, then: FakeStream) -> None:
        event = FakeEvent("PyTorch's own event", is_timed=False)
        self._machine.record(event, first)
        self._machine.wait(then, event)

    def _wrap(
        self, out: Any, args: Any, gpu: int, stream: FakeStream | None, what: str, *, is_tracked: bool = True
    ) -> Any:
        """What an op returned, as tensors of the machine: its arguments themselves, views of them, or new memory."""
        given = list(fakes_in(args))

        def wrap(tensor: Tensor) -> Tensor:
            for each in given:
                if each.inner is tensor:
                    return each
            for each in given:
                if each.inner.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
                    return FakeTensor(tensor, each.block)
            if not is_tracked or isinstance(tensor, FakeTensor):
                return tensor
            block = self._machine.allocate(gpu, tensor, stream, f"memory {self._machine.number()} of {what}")
            return FakeTensor(tensor, block)

        return map_tensors(wrap, out)


class _Copy:
    """From one real tensor to another."""

    def __init__(self, target: Tensor, source: Tensor) -> None:
        self._target, self._source = target, source

    def __call__(self) -> None:
        self._target.copy_(self._source)


def _accesses(does: Effects, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Memory], list[Memory]]:
    writes = {id(each.block): each.block.memory for each in fakes_in(does.tensors_written(args, kwargs))}
    reads = {id(each.block): each.block.memory for each in fakes_in((args, kwargs)) if id(each.block) not in writes}
    return list(reads.values()), list(writes.values())


def _fill(empty: Any, values: Any) -> None:
    for target, value in zip(tensors_in(empty), tensors_in(values), strict=True):
        target.copy_(value)


@contextlib.contextmanager
def _drawing(state: Tensor) -> Iterator[None]:
    """While active, the process draws random numbers from `state` on; nobody else does, under the machine's mutex."""
    before = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(before)
