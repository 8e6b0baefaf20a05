"""`Machine`: GPUs that are made up, their streams and memory, and what an ATen op on one of their tensors does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fake_gpus.fake_tensors import (
    HOST,
    Block,
    Effects,
    FakeTensor,
    Mode,
    effects,
    fakes_in,
    gpu_of,
    inner_of,
    map_tensors,
    poison,
    tensors_in,
)
from fake_gpus.late_queues import FakeStream, Policy, Position, Queues
from fake_gpus.output_shapes import empty_outputs
from fake_gpus.vector_clocks import Actor, EventActor, Memory, Order

BOOLS = (torch.bool, torch.uint8)


class FakeEvent:
    """An event: what it proves, and where in its stream's queue it stands."""

    def __init__(self, name: str, *, is_timed: bool) -> None:
        self.actor = EventActor(name, is_timed)
        self.position: Position | None = None


class _Thread(threading.local):
    """What PyTorch keeps for each thread, and whether its tensors belong to the machine."""

    def __init__(self) -> None:
        self.host: Actor | None = None
        self.streams: dict[int, FakeStream] = {}
        self.depth = 0


class Machine:
    """Some GPUs.

    Args:
        num_gpus: how many.
        policy: when what is launched runs.
        seed: of the policy.

    Attributes:
        mutex: of everything here; ops run under it.
        order: what was proven wrong.
        queues: what was launched and has not run.
        live_bytes: by GPU.
        peak_bytes: likewise, the most since it was set.
        limit_bytes: by GPU: beyond it there is no memory left.
        fails_at: the allocation, counted from 1, at which no memory is left.
        num_allocations: so far.
    """

    def __init__(self, num_gpus: int = 8, policy: Policy = "now", seed: int = 0) -> None:
        self.num_gpus = num_gpus
        self.mutex = threading.RLock()
        self.order = Order()
        self.queues = Queues(policy, seed)
        self.live_bytes, self.peak_bytes = [0] * num_gpus, [0] * num_gpus
        self.limit_bytes: dict[int, int] = {}
        self.fails_at: int | None = None
        self.num_allocations = 0
        self.generators = {gpu: torch.Generator() for gpu in (HOST, *range(num_gpus))}
        self._thread = _Thread()
        self._default_streams: dict[int, FakeStream] = {}
        self._num_made = 0
        self._dying: list[tuple[Block, list[Position]]] = []
        self._is_closed = False

    # threads, streams and events

    @property
    def host(self) -> Actor:
        """The calling thread."""
        if self._thread.host is None:
            self._thread.host = self.order.host_thread(threading.current_thread().name)
        return self._thread.host

    @contextlib.contextmanager
    def attached(self, name: str = "") -> Iterator[None]:
        """While active, all tensors that the calling thread makes belong to the machine, also those of the host."""
        if name:
            self._thread.host = self.order.host_thread(name)
        self._thread.depth += 1
        try:
            with Mode(self) if self._thread.depth == 1 else contextlib.nullcontext():
                yield
        finally:
            self._thread.depth -= 1

    def new_stream(self, gpu: int, *, is_urgent: bool, name: str = "") -> FakeStream:
        kind = name or ("copies" if is_urgent else "stream")
        with self.mutex:
            self._num_made += 1
            return FakeStream(self.order.stream(f"{kind} {self._num_made} of cuda:{gpu}"), gpu, is_urgent=is_urgent)

    def new_event(self, *, is_timed: bool) -> FakeEvent:
        with self.mutex:
            self._num_made += 1
            return FakeEvent(f"event {self._num_made}", is_timed=is_timed)

    def current_stream(self, gpu: int) -> FakeStream:
        with self.mutex:
            if gpu not in self._default_streams:
                self._default_streams[gpu] = self.new_stream(gpu, is_urgent=False, name="default stream")
            return self._thread.streams.get(gpu, self._default_streams[gpu])

    @contextlib.contextmanager
    def using(self, stream: FakeStream) -> Iterator[None]:
        before = self._thread.streams.get(stream.gpu)
        self._thread.streams[stream.gpu] = stream
        try:
            with self.attached():
                yield
        finally:
            if before is None:
                del self._thread.streams[stream.gpu]
            else:
                self._thread.streams[stream.gpu] = before

    def record(self, event: FakeEvent, stream: FakeStream) -> None:
        with self.mutex:
            self.order.record(self.host, event.actor, stream.actor)
            event.position = Position(stream)

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        with self.mutex, plainly():
            self.order.wait(self.host, stream.actor, event.actor)
            self.queues.wait(stream, event.position)

    def await_event(self, event: FakeEvent) -> None:
        with self.mutex, plainly():
            self.order.await_event(self.host, event.actor)
            if event.position is not None:
                self.queues.complete(event.position)

    def await_stream(self, stream: FakeStream) -> None:
        with self.mutex, plainly():
            self.order.await_stream(self.host, stream.actor)
            self.queues.complete(Position(stream))

    # memory

    def freed(self, block: Block) -> None:
        """Nobody refers to `block` any more."""
        with self.mutex, plainly():
            if self._is_closed or block.stream is None:
                return
            self.order.free(self.host, block.memory)
            self.live_bytes[block.gpu] -= block.num_bytes
            if self.queues.is_late:
                self._dying.append((block, [Position(stream) for stream in block.kept_for]))
                self._reuse()

    def _reuse(self) -> None:
        """The allocator may give away what died, once all that it was kept for has run: to its stream's next op."""
        for dead in [each for each in self._dying if all(position.is_done for position in each[1])]:
            self._dying.remove(dead)
            block = dead[0]
            assert block.stream is not None
            self.queues.launch(block.stream, lambda inner=block.inner: poison(inner))  # type: ignore[misc]

    def _allocate(self, gpu: int, inner: Tensor, stream: FakeStream | None, what: str) -> Block:
        if stream is not None:
            if self.queues.is_late:
                self._reuse()
            self.num_allocations += 1
            num_bytes = inner.untyped_storage().nbytes()
            is_full = self.live_bytes[gpu] + num_bytes > self.limit_bytes.get(gpu, 1 << 60)
            if is_full or self.num_allocations == self.fails_at:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes on GPU {gpu}.")
            self.live_bytes[gpu] += num_bytes
            self.peak_bytes[gpu] = max(self.peak_bytes[gpu], self.live_bytes[gpu])
        return Block(self, gpu, stream, inner, Memory(what, None if stream is None else stream.actor))

    def pinned_like(self, tensor: Tensor) -> FakeTensor:
        with self.mutex, plainly():
            inner = torch.empty_like(inner_of(tensor))
            poison(inner)
            made = FakeTensor(inner, self._allocate(HOST, inner, None, "pinned memory"))
            made.block.is_pinned = True
            self.host.tick()
            self.order.access(self.host, [], [made.block.memory], "allocation")
            return made

    def keep_for(self, tensor: Tensor, stream: FakeStream) -> None:
        with self.mutex:
            assert isinstance(tensor, FakeTensor)
            tensor.block.memory.kept.add(stream.actor.number)
            tensor.block.kept_for.append(stream)

    def close(self) -> None:
        """Runs what was launched; what is freed from now on is of no interest."""
        with self.mutex, plainly():
            self.queues.complete_all()
            self._is_closed = True

    # ops

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an ATen op does here: on the host at once, on a GPU when its stream comes to it."""
        does = effects(func)
        if does.is_composite:  # in inference mode they come whole
            with Mode(self) if self._thread.depth else contextlib.nullcontext():
                return func.decompose(*args, **kwargs)
        with self.mutex, plainly():
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
                self.order.blame(
                    "place", f"{func} on tensors of {[(gpu_of(t), t) for t in tensors_in((args, kwargs))]}"
                )
                raise RuntimeError(f"Expected all tensors to be on the same device, but found {sorted(gpus)}")
            gpu = gpus.pop() if gpus else HOST
            if gpu != HOST and device is None and func is not torch.ops.aten._to_copy.default:
                kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
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
        self.host.tick()
        self.order.access(self.host, reads, writes, what)
        inner_args, inner_kwargs = map_tensors(inner_of, (args, kwargs))
        if not self._thread.depth:
            return self._wrap(func(*inner_args, **inner_kwargs), args, HOST, None, what, is_tracked=False)
        if does.is_random:
            generator = self.generators[HOST]
            with _drawing(generator.get_state()):
                return self._wrap(func(*inner_args, **inner_kwargs), args, HOST, None, what)
        return self._wrap(func(*inner_args, **inner_kwargs), args, HOST, None, what)

    def _run_on_gpu(self, gpu: int, func: Any, does: Effects, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stream, what = self.current_stream(gpu), str(func)
        reads, writes = _accesses(does, args, kwargs)
        inner_args, inner_kwargs = map_tensors(inner_of, (args, kwargs))
        state = self.generators[gpu].get_state() if does.is_random else None

        def run() -> Any:
            with _drawing(state) if state is not None else contextlib.nullcontext():
                return func(*inner_args, **inner_kwargs)

        is_awaited = does.needs_values and not (
            func is torch.ops.aten.index.Tensor and all(t.dtype not in BOOLS for t in tensors_in(args[1]))
        )
        if is_awaited:
            self.order.launch(self.host, stream.actor, reads, writes, what)
            self.await_stream(stream)
        if is_awaited or not self.queues.is_late:
            out = self._wrap(run(), args, gpu, stream, what)
        elif does.returns_written:
            self.queues.launch(stream, run)
            written = does.tensors_written(args, kwargs)
            out = written[0] if len(func._schema.returns) == 1 else tuple(written)[: len(func._schema.returns)] or None
        else:
            empty = empty_outputs(func, inner_args, inner_kwargs)
            if empty is None:
                return self._view(func, args, kwargs)
            out = self._wrap(empty, args, gpu, stream, what)
            self.queues.launch(stream, lambda: _fill(empty, run()))
        if not is_awaited:
            fresh = [each.block.memory for each in fakes_in(out) if not each.block.memory.used]
            self.order.launch(self.host, stream.actor, reads, [*writes, *fresh], what)
        return out

    def _copy_to(self, gpu: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source = args[0]
        is_async, kwargs = bool(kwargs.get("non_blocking")), {**kwargs, "device": torch.device("cpu")}
        empty = empty_outputs(func, (inner_of(source),), kwargs)
        stream = None if gpu == HOST else self.current_stream(gpu)
        target = self._wrap(empty, (), gpu, stream, "copy", is_tracked=gpu != HOST or self._thread.depth > 0)
        if stream is not None:
            self.order.launch(self.host, stream.actor, [], [target.block.memory], "allocation")
        self._move(target, source, is_async=is_async)
        return target

    def _move(self, target: Tensor, source: Tensor, *, is_async: bool) -> None:
        """Copies as PyTorch does: between GPUs on the source's stream, both streams waiting for each other."""
        reads = [source.block.memory] if isinstance(source, FakeTensor) else []
        writes = [target.block.memory] if isinstance(target, FakeTensor) else []
        here, there, run = gpu_of(source), gpu_of(target), _Copy(inner_of(target), inner_of(source))
        if here == there == HOST:
            self.host.tick()
            self.order.access(self.host, reads, writes, "copy")
            run()
            return
        stream = self.current_stream(here if here != HOST else there)
        receiving = self.current_stream(there) if HOST not in (here, there) and here != there else None
        if receiving is not None:
            self._barrier(receiving, stream)
        self.order.launch(self.host, stream.actor, reads, writes, "copy")
        self.queues.launch(stream, run)
        if receiving is not None:
            self._barrier(stream, receiving)
        elif here != there:
            ours = source if here == HOST else target
            is_pinned = isinstance(ours, FakeTensor) and ours.block.is_pinned
            if not (is_async and is_pinned):
                self.await_stream(stream)

    def _barrier(self, first: FakeStream, then: FakeStream) -> None:
        event = FakeEvent("PyTorch's own event", is_timed=False)
        self.record(event, first)
        self.wait(then, event)

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
            self._num_made += 1
            block = self._allocate(gpu, tensor, stream, f"memory {self._num_made} of {what}")
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
def plainly() -> Iterator[None]:
    """While active, ops are PyTorch's own on plain tensors, neither of inference mode nor with gradients."""
    with torch._C._DisableTorchDispatch(), torch.inference_mode(False), torch.no_grad():
        yield


@contextlib.contextmanager
def _drawing(state: Tensor) -> Iterator[None]:
    """While active, the process draws random numbers from `state` on; nobody else does, under the machine's mutex."""
    before = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(before)
