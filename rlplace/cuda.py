"""All of `torch.cuda` that rlplace uses outside of its doctor: one module, so that a test can put another in its place.

Streams and events go through here, and so do copies that involve a GPU: all calls but ATen ops on the calling thread's
    stream are in these functions. `tests/cuda` replaces them by a GPU that is made up.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import cast

import torch

from rlplace.errors import RunnerError

Stream = torch.cuda.Stream
Event = torch.cuda.Event

UNLIMITED = 1 << 62
"""Lifts the limit of `limit_memory`."""

_NAME = re.compile(r"cuda:(?P<index>[0-9]{1,4})(?:/(?P<part>[0-9]{1,4}))?\Z")
_OUT_OF_MEMORY = (
    *("out of memory", "can't allocate memory", "cudaerrormemoryallocation", "cublas_status_alloc_failed"),
    *("cudnn_status_alloc_failed", "cublas_status_not_initialized", "cannot allocate memory"),
)
"""Words of such errors; cuBLAS cannot make its handle where no memory is left for it."""
_STICKY = (
    *("device-side assert", "illegal memory access", "unspecified launch failure", "misaligned address"),
    *("illegal instruction", "hardware stack error", "uncorrectable ecc error", "launch timed out"),
    *("invalid program counter", "not supported on global/shared address space", "uncorrectable nvlink error"),
)

_GONE = (
    *(
        "busy or unavailable",
        "no cuda-capable device",
        "invalid device ordinal",
        "device unavailable",
        "devicesunavailable",
    ),
    *("gpu is lost", "device lost", "fallen off the bus", "cudaerrornodevice", "no cuda gpus are available"),
)
"""Words of errors about a GPU that is gone: the driver has lost it, or another process uses it exclusively."""
LOST = "the GPU cannot be used by this process any more; start again"
LATE = "launches run ahead, so an earlier op may be at fault: CUDA_LAUNCH_BLOCKING=1 in the environment tells"
_LIBRARIES = ("cuda error", "cublas_status", "cudnn_status", "cufft_", "cusolver_status", "cusparse_status", "nccl")


@dataclass(frozen=True)
class Gpu:
    """PyTorch's facts about one GPU."""

    name: str
    """E.g. `NVIDIA H100 80GB HBM3`."""
    memory_bytes: int
    """All of its memory."""
    free_bytes: int
    """Memory that is left once this process has its context there: free memory, and PyTorch's cache for tensors."""


def parse_name(name: str) -> tuple[int, int] | None:
    """(GPU, part of it) that a device name stands for: `cuda:1` is (1, 0), `cuda:1/2` is (1, 2); None if none.

    >>> parse_name("cuda:1/2"), parse_name("cuda:1"), parse_name("cpu:0")
    ((1, 2), (1, 0), None)
    """
    match = _NAME.match(name)
    return None if match is None else (int(match["index"]), int(match["part"] or 0))


def num_gpus() -> int:
    """How many GPUs PyTorch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def is_started() -> bool:
    """Whether this process uses GPUs already."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def gpu(index: int) -> Gpu:
    """PyTorch's facts about GPU `index`; starts using it."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    kept_bytes = torch.cuda.memory_reserved(index)
    return Gpu(torch.cuda.get_device_properties(index).name, int(total_bytes), int(free_bytes + kept_bytes))


def use(place: torch.device) -> None:
    """Makes a GPU the calling thread's current one."""
    torch.cuda.set_device(place)


def stream(place: torch.device, *, is_urgent: bool = False) -> Stream:
    """A stream of a GPU, from the pool of high priority if it is urgent.

    Each pool holds 32 streams a GPU and hands them out in turn.
    """
    return torch.cuda.Stream(place, priority=-1 if is_urgent else 0)  # type: ignore[no-untyped-call]


def current_stream(place: torch.device) -> Stream:
    """The stream of a GPU on which the calling thread launches."""
    return torch.cuda.current_stream(place)


def using(stream: Stream) -> AbstractContextManager[object]:
    """While active, the calling thread launches on `stream`, and its GPU is the current one."""
    return cast("AbstractContextManager[object]", torch.cuda.stream(stream))


@contextlib.contextmanager
def settled(place: torch.device) -> Iterator[None]:
    """Work launched on `place` while active is done afterwards; `place` may be the CPU."""
    if place.type != "cuda":
        yield
        return
    with torch.cuda.device(place):
        yield
    torch.cuda.current_stream(place).synchronize()


def event(*, is_timed: bool = False) -> Event:
    """An event, on the GPU that first records it."""
    return torch.cuda.Event(enable_timing=is_timed)  # type: ignore[no-untyped-call]


def record(event: Event, stream: Stream) -> None:
    """`event` completes when all work launched on `stream` so far is done."""
    event.record(stream)


def wait(stream: Stream, event: Event) -> None:
    """Later work on `stream` waits for `event`."""
    stream.wait_event(event)


def await_event(event: Event) -> None:
    """Returns when `event` is complete."""
    event.synchronize()


def await_stream(stream: Stream) -> None:
    """Returns when all work launched on `stream` is done.

    It waits for an event: `Stream.synchronize` counts as a wait that `forbid_waits` forbids.
    """
    done = event()
    done.record(stream)
    done.synchronize()


def is_done(stream: Stream) -> bool:
    """Whether all work launched on `stream` is done."""
    return stream.query()


def await_all(place: torch.device) -> None:
    """Returns when all work on a GPU is done."""
    torch.cuda.synchronize(place)


@contextlib.contextmanager
def forbid_waits() -> Iterator[None]:
    """While active, an op that makes the host wait for a GPU raises RuntimeError, on any thread.

    Such as `.item()`, or a copy from memory that is not pinned; waiting for a stream or an event is no op. Does nothing
    where there is no GPU.
    """
    if not num_gpus():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def elapsed_s(begin: Event, end: Event) -> float:
    """Seconds between two completed events of one GPU."""
    return float(begin.elapsed_time(end)) / 1e3


def keep_for(tensor: torch.Tensor, stream: Stream) -> None:
    """When `tensor` dies, its memory is not reused before `stream` has finished the work launched so far."""
    tensor.record_stream(stream)


def copy(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    """A copy of `tensor` on `place`, made by the calling thread's current streams of both GPUs; does not wait for it.

    Its memory belongs to the current stream of `place`. Between GPUs, the copy runs on the source's stream and both
    streams wait for each other. Memory of the host should be pinned (`pinned_like`), or the call waits for the copy.
    """
    return tensor.clone() if tensor.device == place else tensor.to(place, non_blocking=True)


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies between pinned memory of the host and a GPU, on the calling thread's current stream; does not wait."""
    target.copy_(source, non_blocking=True)


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory of the host for such a tensor that a GPU copies from and to by itself; its content is undefined."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


def generator(place: torch.device) -> torch.Generator:
    """PyTorch's default source of random numbers on `place`, which may be the CPU."""
    return torch.default_generator if place.type == "cpu" else torch.cuda.default_generators[place.index or 0]


def default_generators() -> tuple[torch.Generator, ...]:
    """PyTorch's default sources of random numbers: of the CPU, then of the GPUs, which have theirs once in use."""
    return torch.default_generator, *torch.cuda.default_generators


def seed_all(seed: int) -> None:
    """Seeds the default sources of all GPUs."""
    torch.cuda.manual_seed_all(seed)


def hold_back(stream: Stream, cycles: int) -> None:
    """`stream` does nothing for so many clock cycles of its GPU, so that launches can run ahead of it."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def limit_memory(place: torch.device, num_bytes: int) -> None:
    """Beyond so many bytes, allocations of this process on a GPU fail as out of memory; `UNLIMITED` lifts that."""
    total_bytes = torch.cuda.get_device_properties(place).total_memory
    with torch.cuda.device(place):  # else PyTorch's allocator leaves it the thread's current one
        torch.cuda.set_per_process_memory_fraction(min(num_bytes / total_bytes, 1.0), place)


def peak_bytes(place: torch.device) -> int:
    """The most that tensors of this process took on a GPU since `forget_peak`."""
    return torch.cuda.max_memory_allocated(place)


def forget_peak(place: torch.device) -> None:
    """`peak_bytes` counts from now on."""
    torch.cuda.reset_peak_memory_stats(place)


def give_back_memory() -> None:
    """Memory that PyTorch keeps for tensors to come is given back to the GPUs."""
    torch.cuda.empty_cache()


def capture_graph(run: Callable[[], None], place: torch.device, *, warmup: int = 3) -> Callable[[], None]:
    """The launches of `run` on a GPU, as one CUDA graph: the function that comes back replays it.

    Args:
        run: must not synchronise.
        place: the GPU.
        warmup: runs before the capture, on a stream of their own: allocations and lazy states must be there.

    Raises:
        RuntimeError: `run` does something that a CUDA graph cannot hold.
    """
    with torch.cuda.device(place):
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(warmup):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # a stream of its own: PyTorch's is on the GPU of the process's first capture
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            run()
    return graph.replay


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or its cause, says that a device or the host has no memory left.

    >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    True
    """
    return any(
        isinstance(each, (torch.OutOfMemoryError, MemoryError)) or _says(each, _OUT_OF_MEMORY) for each in _chain(error)
    )


def is_sticky(error: BaseException) -> bool:
    """Whether an error leaves this process without its GPUs: every later call fails.

    >>> is_sticky(RuntimeError("CUDA error: an illegal memory access was encountered"))
    True
    """
    return not is_out_of_memory(error) and any(_says(each, _STICKY) for each in _chain(error))


def is_gone(error: BaseException) -> bool:
    """Whether an error, or its cause, says that a GPU is gone; it may quote another process.

    >>> is_gone(RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"))
    True
    """
    return any(_says(each, _GONE) for each in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _says(error: BaseException, words: tuple[str, ...]) -> bool:
    return any(each in str(error).lower() for each in words)


def is_lost(error: BaseException) -> bool:
    """Whether `error` leaves this process without its GPUs.

    A `RunnerError` tells by its cause: without one it quotes another process, whose GPU is not ours.
    """
    cause = error.__cause__ if isinstance(error, RunnerError) else error
    return cause is not None and (is_sticky(cause) or is_gone(cause))


def is_late(cause: BaseException) -> bool:
    """Whether a GPU or a library of it reported `cause`, maybe after other ops had been launched."""
    return is_sticky(cause) or (not is_out_of_memory(cause) and _says(cause, _LIBRARIES))


def advice(cause: BaseException) -> str:
    """The words after the text of `cause`: that the GPU is lost, that another op may be at fault; mostly nothing."""
    return f"; {LOST}" * is_sticky(cause) + f"; {LATE}" * is_late(cause)
