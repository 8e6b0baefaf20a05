"""`Streams`: those of a crew's GPUs, one to compute on each device and a pair for copies from each to each other."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import torch

from rlplace import cuda
from rlplace.measure.hosts.host import Device

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
