"""Clocks of a traced step: when an item of the plan began and ended, on a core or on a GPU's compute stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from rlplace import cuda

CLOCK_HZ = 1.5e9
"""Of a GPU, about."""
SPARE = 1.5
LONGEST_HOLD_S = 0.1


def cycles_to_launch(launch_s: float) -> int:
    """Clock cycles to hold a GPU back for, so that launches that take `launch_s` seconds get ahead of it."""
    return int(min(launch_s * SPARE, LONGEST_HOLD_S) * CLOCK_HZ)


class Clock(Protocol):
    """Traced code calls `mark` at the beginning and end of every item; `seconds` tells afterwards when that was."""

    mark: Callable[[], Any]

    def start(self) -> None: ...
    def seconds(self, mark: Any) -> float: ...


class HostClock:
    """Marks are `time.perf_counter` seconds."""

    def __init__(self) -> None:
        self.mark = time.perf_counter

    def start(self) -> None:
        pass

    def seconds(self, mark: float) -> float:
        return mark


class CudaClock:
    """Marks are events on the calling thread's stream: work on a GPU ends long after it was launched.

    Their times are made comparable with the host's by one event whose end the host has seen, at the start of the job.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = cuda.event(is_timed=True)
        self._base_s = 0.0
        self.mark = self._record

    def start(self) -> None:
        cuda.record(self._base, cuda.current_stream(self._device))
        cuda.await_event(self._base)
        self._base_s = time.perf_counter()

    def _record(self) -> cuda.Event:
        event = cuda.event(is_timed=True)
        cuda.record(event, cuda.current_stream(self._device))
        return event

    def seconds(self, mark: cuda.Event) -> float:
        """Seconds on `time.perf_counter` at which the device passed `mark`; waits for it."""
        cuda.await_event(mark)
        return self._base_s + cuda.elapsed_s(self._base, mark)
