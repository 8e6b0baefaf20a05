"""What `rlplace.cuda` does where there is no GPU, and what it asks of PyTorch.

What is said beside an error of a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlplace import cuda
from rlplace.cuda import LATE, LOST, advice, is_late, is_lost
from rlplace.errors import RunnerError


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


STICKY = RuntimeError("CUDA error: an illegal memory access was encountered")
LIBRARY = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`")
MEMORY = RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")


def chained(cause: Exception) -> RunnerError:
    error = RunnerError(f"op 'mm' on cuda:0: {cause}")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("cause", "is_lost_after", "late", "says"),
    [
        (STICKY, True, True, f"; {LOST}; {LATE}"),
        (LIBRARY, False, True, f"; {LATE}"),
        (MEMORY, False, False, ""),
        (ValueError("boom"), False, False, ""),
    ],
)
def test_what_an_error_means(cause: Exception, is_lost_after: bool, late: bool, says: str) -> None:
    assert is_lost(cause) is is_lost(chained(cause)) is is_lost_after
    assert is_late(cause) is late
    assert advice(cause) == says


def test_the_gpu_of_another_process_is_not_ours() -> None:
    assert not is_lost(RunnerError(f"replica 1 failed: {STICKY}"))
