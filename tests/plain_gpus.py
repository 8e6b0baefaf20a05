"""GPUs that are made up in the simplest way: their tensors are on the CPU and their streams do nothing.

Enough for plans without transfers: what is where, and what is let go of.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field

import pytest
import torch

from rlplace import cuda
from rlplace.measure.execute import device_threads as channels
from rlplace.measure.execute import placed_step, residents
from rlplace.measure.hosts.host import Device, Host, Link, Route


@dataclass
class Calls:
    """What was asked of the GPUs."""

    num_given_back: int = 0
    limits: list[tuple[str, int]] = field(default_factory=list)
    held_back: list[int] = field(default_factory=list)


class Event:
    """Comes to pass when it is recorded."""

    at_s = 0.0


def gpu_host(num_devices: int, memory_bytes: int, context_bytes: int = 0) -> Host:
    """`cuda:0`, `cuda:1`, ... with a link for each ordered pair."""
    names = [f"cuda:{index}" for index in range(num_devices)]
    pairs = [(one, other) for one in names for other in names if one != other]
    return Host(
        "gpus",
        tuple(
            Device(name, "Some GPU", "cuda", memory_bytes=memory_bytes, context_bytes=context_bytes, dispatcher="i")
            for name in names
        ),
        tuple(Link(f"{one}->{other}", 1e10) for one, other in pairs),
        tuple(Route(one, other, (f"{one}->{other}",)) for one, other in pairs),
    )


def install(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Replaces what plans without transfers need of `rlplace.cuda`."""
    calls = Calls()

    def give_back() -> None:
        calls.num_given_back += 1

    for module in (channels, placed_step, residents):
        monkeypatch.setattr(module, "torch_device", lambda device: torch.device("cpu"))
    monkeypatch.setattr(cuda, "num_gpus", lambda: 8)
    monkeypatch.setattr(cuda, "stream", lambda place, **_: object())
    monkeypatch.setattr(cuda, "event", lambda **_: Event())
    monkeypatch.setattr(cuda, "record", lambda event, stream: setattr(event, "at_s", time.perf_counter()))
    monkeypatch.setattr(cuda, "await_event", lambda event: None)
    monkeypatch.setattr(cuda, "elapsed_s", lambda begin, end: end.at_s - begin.at_s)
    monkeypatch.setattr(cuda, "current_stream", lambda place: object())
    monkeypatch.setattr(cuda, "using", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(cuda, "await_stream", lambda stream: None)
    monkeypatch.setattr(cuda, "is_done", lambda stream: True)
    monkeypatch.setattr(cuda, "give_back_memory", give_back)
    monkeypatch.setattr(cuda, "limit_memory", lambda place, num_bytes: calls.limits.append((str(place), num_bytes)))
    monkeypatch.setattr(cuda, "hold_back", lambda stream, cycles: calls.held_back.append(cycles))
    return calls
