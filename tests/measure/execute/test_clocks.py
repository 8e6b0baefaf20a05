"""Clocks of traced steps; the one of a GPU with events that tell made-up times."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from rlplace import cuda
from rlplace.measure.execute.workers import CudaClock, HostClock, cycles_to_launch


def test_a_gpu_is_held_back_longer_than_launches_take_but_never_for_long() -> None:
    assert cycles_to_launch(1e-3) == 2_250_000, "half as long again at 1.5 GHz"
    assert cycles_to_launch(60.0) == 150_000_000
    assert cycles_to_launch(0.0) == 0


def test_a_host_marks_seconds() -> None:
    clock = HostClock()
    clock.start()
    before, mark, after = time.perf_counter(), clock.mark(), time.perf_counter()
    assert before <= clock.seconds(mark) <= after


class Event:
    """Records the time, in milliseconds, of a stream that only the test moves."""

    now_ms = 100.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms = -1.0
        self.is_awaited = False

    def record(self, stream: str) -> None:
        assert stream == "stream of cuda:1"
        self.at_ms = Event.now_ms

    def synchronize(self) -> None:
        self.is_awaited = True

    def elapsed_time(self, other: Event) -> float:
        assert self.is_awaited
        assert other.is_awaited
        return other.at_ms - self.at_ms


def test_a_gpu_marks_events_that_are_resolved_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "event", lambda *, is_timed=False: Event(enable_timing=is_timed))
    monkeypatch.setattr(cuda, "current_stream", lambda device: f"stream of {device}")
    host_s = iter([50.0, 70.0])
    monkeypatch.setattr("rlplace.measure.execute.workers.time.perf_counter", lambda: next(host_s))
    clock = CudaClock(torch.device("cuda:1"))
    for start_s in (50.0, 70.0):  # every step starts anew
        clock.start()
        Event.now_ms += 250.0
        mark: Any = clock.mark()
        Event.now_ms += 1000.0
        later: Any = clock.mark()
        assert clock.seconds(mark) == start_s + 0.25
        assert clock.seconds(later) == start_s + 1.25
