"""`Machine`: GPUs that are made up, their streams, events and memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fake_gpus.fake_ops import Ops
from fake_gpus.fake_tensors import HOST, Block, FakeTensor, Mode, inner_of, plainly, poison
from fake_gpus.late_queues import FakeEvent, FakeStream, Policy, Position, Queues
from fake_gpus.vector_clocks import Actor, Memory, Order


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
        forbids_waits: whether an op must not make the host wait for a GPU.
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
        self.forbids_waits = False
        self.generators = {gpu: torch.Generator() for gpu in (HOST, *range(num_gpus))}
        self._thread = _Thread()
        self._default_streams: dict[int, FakeStream] = {}
        self._num_made = 0
        self._dying: list[tuple[Block, list[Position]]] = []
        self._is_closed = False
        self._ops = Ops(self)

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

    def allocate(self, gpu: int, inner: Tensor, stream: FakeStream | None, what: str) -> Block:
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

    @property
    def is_attached(self) -> bool:
        """Whether what the calling thread makes on the host is the machine's too."""
        return self._thread.depth > 0

    def number(self) -> int:
        """One that nothing else has."""
        self._num_made += 1
        return self._num_made

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an ATen op does here, wherever its tensors are."""
        return self._ops.dispatch(func, args, kwargs)

    def pinned_like(self, tensor: Tensor) -> FakeTensor:
        with self.mutex, plainly():
            inner = torch.empty_like(inner_of(tensor))
            poison(inner)
            made = FakeTensor(inner, self.allocate(HOST, inner, None, "pinned memory"))
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
