"""Channels: how a tensor gets from the device that made it to one that reads it, while both run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from rlplace import cuda
from rlplace.measure.hosts.host import Device
from rlplace.measure.run.crew.streams import CopyStreams, torch_device


class Channel(Protocol):
    """One transfer of a plan, used once a step: the producer sends, the destination waits, then takes.

    `wait_ready` returns when the tensor may be taken; `take` returns it on the destination, where nothing may read it
    before `wait_arrived`; `wait_copied` (called by an op about to overwrite the tensor) returns when the destination no
    longer reads the original. `abort` wakes those who wait, so that a failed step ends; a channel is not used again
    after it.
    """

    def send(self, tensor: torch.Tensor) -> None: ...
    def wait_ready(self) -> Any: ...
    def take(self) -> torch.Tensor: ...
    def wait_arrived(self) -> None: ...
    def acknowledge(self) -> None: ...
    def wait_copied(self) -> Any: ...
    def abort(self) -> None: ...


def make_channel(
    source: Device,
    destination: Device,
    streams: CopyStreams | None = None,
    *,
    is_copy: bool = True,
    is_traced: bool = False,
) -> Channel:
    """The channel that fits two devices.

    Args:
        source: sends.
        destination: receives.
        streams: of copies between the two, where one is a GPU.
        is_copy: False hands the tensor itself over: both see the same memory.
        is_traced: a copy by a GPU keeps the events of its beginning and end.
    """
    if streams is None:
        return CpuChannel(is_copy=is_copy)
    return CudaChannel(source, destination, streams, is_traced=is_traced)


class CpuChannel:
    """A real copy made by the destination core's thread; for a hand-over, the reference itself.

    A lock that starts locked is a signal that is used once a step: the sender releases it, the receiver takes it and
    so leaves it locked for the next step.
    """

    def __init__(self, *, is_copy: bool) -> None:
        self._is_copy = is_copy
        self._slot: torch.Tensor | None = None
        self._is_aborted = False
        self._ready, self._copied = threading.Lock(), threading.Lock()
        self._ready.acquire()
        self._copied.acquire()
        self.wait_ready = self._ready.acquire
        self.wait_copied = self._copied.acquire
        self.acknowledge = self._copied.release

    def send(self, tensor: torch.Tensor) -> None:
        self._slot = tensor
        if self._is_aborted:  # looked at after the slot was filled, as `abort` clears it after it said so
            self._slot = None
            return
        self._ready.release()

    def take(self) -> torch.Tensor:
        tensor = self._slot
        assert tensor is not None, "nothing was sent"
        self._slot = None
        return tensor.clone() if self._is_copy else tensor

    def wait_arrived(self) -> None:
        """Nothing: what was taken is there."""

    def abort(self) -> None:
        self._is_aborted = True
        self._slot = None
        release_all((self._ready, self._copied))


class CudaChannel:
    """A copy on a stream of its own: it waits for the producer by an event and holds up neither device's compute.

    What the destination launches between `take` and `wait_arrived` runs beside the copy.

    What a GPU copies from or to the host is pinned there: from pageable memory the call would wait for the copy.

    Attributes:
        device: whose events `began` and `arrived` are.
        began: recorded when a traced copy may begin: its stream is free and the tensor is there.
        arrived: recorded when the copy is done.
    """

    def __init__(self, source: Device, destination: Device, streams: CopyStreams, *, is_traced: bool = False) -> None:
        self._source, self._destination = torch_device(source), torch_device(destination)
        self._streams = streams
        self._slot: torch.Tensor | None = None
        self._staging: torch.Tensor | None = None  # of a copy from the host; its last one is done before the next step
        self._produced = cuda.event() if source.backend == "cuda" else None
        self.device = destination if destination.backend == "cuda" else source
        self.began = cuda.event(is_timed=True) if is_traced else None
        self.arrived = cuda.event(is_timed=is_traced)
        self._is_aborted = False
        self._ready, self._copied = threading.Lock(), threading.Lock()
        self._ready.acquire()
        self._copied.acquire()
        self.wait_ready = self._ready.acquire

    def send(self, tensor: torch.Tensor) -> None:
        if self._produced is not None:  # before the tensor is there: who is woken by `abort` may take it at once
            cuda.record(self._produced, cuda.current_stream(self._source))
        self._slot = tensor
        if self._is_aborted:  # looked at after the slot was filled, as `abort` clears it after it said so
            self._slot = None
            return
        self._ready.release()

    def take(self) -> torch.Tensor:
        tensor = self._slot
        assert tensor is not None, "nothing was sent"
        self._slot = None
        if self._source.type == "cpu":
            return self._from_host(tensor)
        with contextlib.ExitStack() as launching:
            if self._streams.outgoing is not None:
                launching.enter_context(cuda.using(self._streams.outgoing))
            launching.enter_context(cuda.using(self._streams.incoming))
            assert self._produced is not None
            cuda.wait(self._streams.incoming, self._produced)
            cuda.keep_for(tensor, self._streams.reading)
            self._mark(self.began)
            copy = cuda.copy(tensor, self._destination) if self._destination.type == "cuda" else _pinned_copy(tensor)
            self._mark(self.arrived)
        return self._kept(copy)

    def _from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._staging is None:
            self._staging = cuda.pinned_like(tensor)
        self._staging.copy_(tensor)
        with cuda.using(self._streams.incoming):
            self._mark(self.began)
            copy = cuda.copy(self._staging, self._destination)
            self._mark(self.arrived)
        return self._kept(copy)

    def _kept(self, copy: torch.Tensor) -> torch.Tensor:
        if self._destination.type == "cuda":
            cuda.keep_for(copy, cuda.current_stream(self._destination))
        return copy

    def wait_arrived(self) -> None:
        if self._destination.type == "cuda":
            cuda.wait(cuda.current_stream(self._destination), self.arrived)
        else:
            cuda.await_event(self.arrived)

    def _mark(self, event: cuda.Event | None) -> None:
        if event is not None:
            cuda.record(event, self._streams.incoming)

    def acknowledge(self) -> None:
        self._copied.release()

    def wait_copied(self) -> bool:
        self._copied.acquire()
        if self._produced is not None and not self._is_aborted:
            cuda.wait(cuda.current_stream(self._source), self.arrived)
        return True

    def abort(self) -> None:
        self._is_aborted = True
        self._slot = None
        release_all((self._ready, self._copied))


def _pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = cuda.pinned_like(tensor)
    cuda.copy_into(copy, tensor)
    return copy


def release_all(locks: Iterable[threading.Lock]) -> None:
    """Wakes whoever waits for one of `locks`."""
    for lock in locks:
        with contextlib.suppress(RuntimeError):  # nobody waits, or the other side was faster
            lock.release()
