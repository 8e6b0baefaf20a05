"""Channels: each carries one tensor of a plan from the device that made it to one that reads it, while both run.

`Streams` holds the streams of a crew's GPUs: one to compute on for each device, and a pair for copies from each device
to each other.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from rlplace import cuda
from rlplace.measure.hosts.host import Device


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


class Channel(ABC):
    """One transfer of a plan, used once a step: the producer sends, the destination waits, then takes.

    It has a slot for the tensor and two signals: the tensor is ready, and the original was copied. A signal is a lock
    that starts locked: one side releases it, the other takes it and so leaves it locked for the next step.

    `wait_ready` returns when the tensor may be taken. `acknowledge` tells the producer that the original was copied.
    """

    def __init__(self) -> None:
        self._slot: torch.Tensor | None = None
        self._is_aborted = False
        self._ready, self._copied = threading.Lock(), threading.Lock()
        self._ready.acquire()
        self._copied.acquire()
        self.wait_ready = self._ready.acquire
        self.acknowledge = self._copied.release

    def send(self, tensor: torch.Tensor) -> None:
        """Hands the tensor to the destination's thread."""
        self._slot = tensor
        if self._is_aborted:  # looked at after the slot was filled, as `abort` clears it after it said so
            self._slot = None
            return
        self._ready.release()

    def _taken(self) -> torch.Tensor:
        tensor, self._slot = self._slot, None
        assert tensor is not None, "nothing was sent"
        return tensor

    @abstractmethod
    def take(self) -> torch.Tensor:
        """The tensor on the destination, where nothing may read it before `wait_arrived`."""

    @abstractmethod
    def wait_arrived(self) -> None:
        """Has what the calling thread does next wait for the copy."""

    def wait_copied(self) -> bool:
        """Returns when the destination no longer reads the original, which an op is about to overwrite."""
        return self._copied.acquire()

    def abort(self) -> None:
        """Wakes the threads that wait, so that a failed step ends; a channel is not used again after it."""
        self._is_aborted = True
        self._slot = None
        release_all((self._ready, self._copied))


class CpuChannel(Channel):
    """A real copy made by the destination core's thread; for a hand-over, the reference itself."""

    def __init__(self, *, is_copy: bool) -> None:
        super().__init__()
        self._is_copy = is_copy

    def take(self) -> torch.Tensor:
        tensor = self._taken()
        return tensor.clone() if self._is_copy else tensor

    def wait_arrived(self) -> None:
        """Nothing: what was taken is there."""


class CudaChannel(Channel):
    """A copy on a stream of its own: it waits for the producer by an event and holds up neither device's compute.

    What the destination launches between `take` and `wait_arrived` runs beside the copy.

    What a GPU copies from or to the host is pinned there: from pageable memory the call would wait for the copy.

    Attributes:
        device: whose events `began` and `arrived` are.
        began: recorded when a traced copy may begin: its stream is free and the tensor is there.
        arrived: recorded when the copy is done.
    """

    def __init__(self, source: Device, destination: Device, streams: CopyStreams, *, is_traced: bool = False) -> None:
        super().__init__()
        self._source, self._destination = torch_device(source), torch_device(destination)
        self._streams = streams
        self._staging: torch.Tensor | None = None  # of a copy from the host; its last one is done before the next step
        self._produced = cuda.event() if source.backend == "cuda" else None
        self.device = destination if destination.backend == "cuda" else source
        self.began = cuda.event(is_timed=True) if is_traced else None
        self.arrived = cuda.event(is_timed=is_traced)

    def send(self, tensor: torch.Tensor) -> None:
        if self._produced is not None:  # before the tensor is there: a thread that `abort` wakes may take it at once
            cuda.record(self._produced, cuda.current_stream(self._source))
        super().send(tensor)

    def take(self) -> torch.Tensor:
        tensor = self._taken()
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

    def wait_copied(self) -> bool:
        super().wait_copied()
        if self._produced is not None and not self._is_aborted:
            cuda.wait(cuda.current_stream(self._source), self.arrived)
        return True


def _pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = cuda.pinned_like(tensor)
    cuda.copy_into(copy, tensor)
    return copy


def release_all(locks: Iterable[threading.Lock]) -> None:
    """Wakes the threads that wait for `locks`."""
    for lock in locks:
        with contextlib.suppress(RuntimeError):  # no thread waits, or the other side was faster
            lock.release()


POLL_S = 1e-3
"""Between two looks at whether a stream is done."""


def torch_device(device: Device) -> torch.device:
    """The PyTorch device behind a `Device`: every CPU core is `cpu`, every part of a GPU is that GPU."""
    parsed = cuda.parse_name(device.name) if device.backend == "cuda" else None
    return torch.device("cpu") if parsed is None else torch.device("cuda", parsed[0])


@dataclass(frozen=True)
class CopyStreams:
    """Where copies from one device to another run, at least one of them a GPU.

    Between two GPUs PyTorch copies on a stream of the source and makes one of the destination wait for it, and the
    other way round: both must be streams that nothing else runs on.
    """

    incoming: cuda.Stream
    """Of the destination; of the source where that alone is a GPU. It owns the copies' memory on a GPU."""
    outgoing: cuda.Stream | None
    """Of the source, where the two are different GPUs."""

    @property
    def reading(self) -> cuda.Stream:
        """The one that reads the original."""
        return self.outgoing or self.incoming


class Streams:
    """Streams of the GPUs among some devices, made when first asked for: each device and each pair has its own.

    Those for copies come from the pool of high priority, where no compute stream comes from. A pool holds 32 a GPU and
    hands them out in turn: a GPU with more pairs (in seven parts or more) has some share a stream, and run in order.
    """

    def __init__(self) -> None:
        self._compute: dict[str, cuda.Stream] = {}
        self._left: list[cuda.Stream] = []  # of threads that were left behind: what they launched may still run
        self._copies: dict[tuple[str, str], CopyStreams] = {}
        self._lock = threading.Lock()

    def renew_compute(self, device: Device) -> cuda.Stream:
        """A stream for the thread that computes on a GPU from now on."""
        stream = cuda.stream(torch_device(device))
        with self._lock:
            if device.name in self._compute:
                self._left.append(self._compute[device.name])
            self._compute[device.name] = stream
        return stream

    def copies(self, source: Device, destination: Device) -> CopyStreams | None:
        """The streams of copies from `source` to `destination`, None between cores; those of one pair run in order."""
        if "cuda" not in (source.backend, destination.backend):
            return None
        with self._lock:
            pair = source.name, destination.name
            if pair not in self._copies:
                self._copies[pair] = _copy_streams(source, destination)
            return self._copies[pair]

    def settle(self, timeout_s: float) -> bool:
        """Whether all that was launched on them ended within `timeout_s`, be it with an error."""
        with self._lock:
            pairs = [each for pair in self._copies.values() for each in (pair.incoming, pair.outgoing)]
            pending = [*self._left, *self._compute.values(), *(each for each in pairs if each is not None)]
        until_s = time.monotonic() + timeout_s
        for stream in pending:
            while not _is_done(stream):
                if time.monotonic() > until_s:
                    return False
                time.sleep(POLL_S)
        with self._lock:
            self._left = [stream for stream in self._left if stream not in pending]
        return True


def _copy_streams(source: Device, destination: Device) -> CopyStreams:
    here, there = torch_device(source), torch_device(destination)
    incoming = cuda.stream(there if destination.backend == "cuda" else here, is_urgent=True)
    is_between = here.type == there.type == "cuda" and here != there
    return CopyStreams(incoming, cuda.stream(here, is_urgent=True) if is_between else None)


def _is_done(stream: cuda.Stream) -> bool:
    try:
        return cuda.is_done(stream)
    except RuntimeError:  # what went wrong on it: nothing of it runs any more
        return True
