"""Channels: how a tensor gets from the device that made it to one that reads it, while both run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from rlplace.measure.hosts.host import Device
from rlplace.measure.run.clocks import cuda_event


class Channel(Protocol):
    """One transfer of a plan, used once a step: the producer sends, the destination waits, then takes.

    `wait_ready` returns when the tensor may be taken; `take` returns it on the destination; `wait_copied` (called by
    an op about to overwrite the tensor) returns when the destination no longer reads the original. `abort` wakes those
    who wait, so that a failed step ends; a channel is not used again after it.
    """

    def send(self, tensor: torch.Tensor) -> None: ...
    def wait_ready(self) -> Any: ...
    def take(self) -> torch.Tensor: ...
    def acknowledge(self) -> None: ...
    def wait_copied(self) -> Any: ...
    def abort(self) -> None: ...


def make_channel(
    source: Device,
    destination: Device,
    *,
    is_copy: bool = True,
    is_traced: bool = False,
    stream: torch.cuda.Stream | None = None,
) -> Channel:
    """The channel that fits two devices.

    Args:
        source: sends.
        destination: receives.
        is_copy: False hands the tensor itself over: both see the same memory.
        is_traced: a copy by a GPU keeps the events of its beginning and end.
        stream: of copies by a GPU, from `copy_stream`: those on one stream run in order. By default one of its own.
    """
    if "cuda" not in (source.backend, destination.backend):
        return CpuChannel(is_copy=is_copy)
    return CudaChannel(source, destination, stream or copy_stream(source, destination), is_traced=is_traced)


def copy_stream(source: Device, destination: Device) -> torch.cuda.Stream:
    """A stream for copies between two devices, one of them a GPU: on the destination where that is one.

    It comes from the pool of high priority, where no compute stream comes from.
    """
    return _stream(destination if destination.backend == "cuda" else source)


class CpuChannel:
    """A real copy made by the destination core's thread; for a hand-over, the reference itself.

    A lock that starts locked is a signal that is used once a step: the sender releases it, the receiver takes it and
    so leaves it locked for the next step.
    """

    def __init__(self, *, is_copy: bool) -> None:
        self._is_copy = is_copy
        self._slot: torch.Tensor | None = None
        self._ready, self._copied = threading.Lock(), threading.Lock()
        self._ready.acquire()
        self._copied.acquire()
        self.wait_ready = self._ready.acquire
        self.wait_copied = self._copied.acquire
        self.acknowledge = self._copied.release

    def send(self, tensor: torch.Tensor) -> None:
        self._slot = tensor
        self._ready.release()

    def take(self) -> torch.Tensor:
        tensor = self._slot
        assert tensor is not None, "nothing was sent"
        self._slot = None
        return tensor.clone() if self._is_copy else tensor

    def abort(self) -> None:
        self._slot = None
        release_all((self._ready, self._copied))


class CudaChannel:
    """A copy on a stream of its own: it waits for the producer by an event and holds up neither device's compute.

    Attributes:
        device: whose events `began` and `arrived` are.
        began: recorded when a traced copy may begin: its stream is free and the tensor is there.
        arrived: recorded when the copy is done.
    """

    def __init__(
        self, source: Device, destination: Device, stream: torch.cuda.Stream, *, is_traced: bool = False
    ) -> None:
        self._source, self._destination = torch.device(_place(source)), torch.device(_place(destination))
        self._stream = stream
        # between GPUs PyTorch copies on the source's current stream and makes the destination's wait for it
        is_between = source.backend == destination.backend == "cuda"
        self._outgoing = _stream(source) if is_between else None
        self._slot: torch.Tensor | None = None
        self._produced = cuda_event() if source.backend == "cuda" else None
        self.device = destination if destination.backend == "cuda" else source
        self.began = cuda_event(is_timed=True) if is_traced else None
        self.arrived = cuda_event(is_timed=is_traced)
        self._ready, self._copied = threading.Lock(), threading.Lock()
        self._ready.acquire()
        self._copied.acquire()
        self.wait_ready = self._ready.acquire

    def send(self, tensor: torch.Tensor) -> None:
        self._slot = tensor
        if self._produced is not None:
            self._produced.record(torch.cuda.current_stream(self._source))
        self._ready.release()

    def take(self) -> torch.Tensor:
        tensor = self._slot
        assert tensor is not None, "nothing was sent"
        self._slot = None
        with torch.cuda.stream(self._outgoing), torch.cuda.stream(self._stream):
            if self._produced is not None:
                self._stream.wait_event(self._produced)
                tensor.record_stream(self._outgoing or self._stream)
            if self.began is not None:
                self.began.record(self._stream)
            copy = tensor.to(self._destination, non_blocking=self._destination.type == "cuda")
            self.arrived.record(self._stream)
        if self._destination.type == "cuda":
            compute = torch.cuda.current_stream(self._destination)
            compute.wait_event(self.arrived)
            copy.record_stream(compute)
        else:
            self.arrived.synchronize()
        return copy

    def acknowledge(self) -> None:
        self._copied.release()

    def wait_copied(self) -> bool:
        self._copied.acquire()
        if self._source.type == "cuda":
            torch.cuda.current_stream(self._source).wait_event(self.arrived)
        else:
            self.arrived.synchronize()
        return True

    def abort(self) -> None:
        self._slot = None
        release_all((self._ready, self._copied))


def _place(device: Device) -> str:
    return device.name if device.backend == "cuda" else "cpu"


def _stream(device: Device) -> torch.cuda.Stream:
    return torch.cuda.Stream(torch.device(device.name), priority=-1)  # type: ignore[no-untyped-call]


def release_all(locks: Iterable[threading.Lock]) -> None:
    """Wakes whoever waits for one of `locks`."""
    for lock in locks:
        with contextlib.suppress(RuntimeError):  # nobody waits, or the other side was faster
            lock.release()
