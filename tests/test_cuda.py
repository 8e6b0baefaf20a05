"""What `rlplace.cuda` does where there is no GPU, and what it asks of PyTorch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlplace import cuda


def test_waits_are_forbidden_while_it_is_active_and_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int | str] = [1]
    monkeypatch.setattr(cuda, "num_gpus", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with pytest.raises(ZeroDivisionError), cuda.forbid_waits():
        _ = 1 / (modes[-1] != "error")
    assert modes == [1, "error", 1]


def test_without_a_gpu_there_is_nothing_to_forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "num_gpus", lambda: 0)
    with cuda.forbid_waits():
        pass


def test_to_await_a_stream_is_to_await_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch counts `Stream.synchronize` as a wait that its debug mode forbids."""
    did: list[object] = []

    class Event:
        def record(self, stream: object) -> None:
            did.append(("record", stream))

        def synchronize(self) -> None:
            did.append("synchronize")

    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event())
    cuda.await_stream("a stream")  # type: ignore[arg-type]
    assert did == [("record", "a stream"), "synchronize"]


def test_a_limit_leaves_the_calling_thread_on_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's allocator makes the GPU that it limits the current one, and stays there."""
    entered: list[torch.device] = []
    limits: list[tuple[float, torch.device]] = []

    class Device:
        def __init__(self, place: torch.device) -> None:
            self._place = place

        def __enter__(self) -> None:
            entered.append(self._place)

        def __exit__(self, *_: object) -> None:
            entered.pop()

    def limit(fraction: float, place: torch.device) -> None:
        assert entered == [place]
        limits.append((fraction, place))

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=800))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limit)
    place = torch.device("cuda", 1)
    cuda.limit_memory(place, 200)
    cuda.limit_memory(place, cuda.UNLIMITED)
    assert (limits, entered) == ([(0.25, place), (1.0, place)], [])
