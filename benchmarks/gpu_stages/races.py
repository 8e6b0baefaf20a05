"""No two kernels of a placed step touch one tensor unordered: PyTorch's CUDA sanitizer watches every thread.

The sanitizer looks at one thread and is not made for several, so here each thread of a crew enters it, and a lock lets
one at a time tell it something.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.cuda import _gpu_trace, _sanitizer
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_stages.subject import subject
from gpu_stages.verdict import Verdict
from rlplace import cuda
from rlplace.errors import RunnerError
from rlplace.measure import Device
from rlplace.measure.execute import device_threads
from rlplace.measure.execute.device_threads import Streams, torch_device

NUM_PLANS = 6


def run(host_word: str) -> Verdict:
    # made before any stream is: it has to know them all
    watched = _Watched()
    placed = subject(host_word)
    place = torch_device(placed.host.devices[0])
    with watched, watched.threads():
        if place.type == "cuda" and not _sees_a_race(place):
            return Verdict.of(False, "the sanitizer does not see a race that is there, so it proves nothing")
        for number, plan in enumerate(placed.draw_plans(NUM_PLANS)):
            try:
                with placed.loaded(plan) as step:
                    for k in range(3):
                        step.run(k)
            except RunnerError as error:
                return Verdict.of(False, f"placement {number}: {error}", num_transfers=plan.num_transfers)
    return Verdict.of(True, f"{NUM_PLANS} random placements on {placed.host.name}: every access is ordered")


class _Watched:
    """The sanitizer, entered by the calling thread, and while `threads` is active by those of every new crew."""

    def __init__(self) -> None:
        self._handler = _sanitizer.cuda_sanitizer.dispatch.event_handler
        lock = threading.RLock()
        for registry in vars(_gpu_trace).values():
            if isinstance(registry, _gpu_trace.CallbackRegistry):
                registry.callback_list = [_locked(lock, each) for each in registry.callback_list]
        self._handler._handle_kernel_launch = _locked(lock, self._handler._handle_kernel_launch)
        self._modes: list[TorchDispatchMode] = []

    def __enter__(self) -> None:
        self._modes.append(_Mode(self._handler))
        self._modes[-1].__enter__()

    def __exit__(self, *caught: Any) -> None:
        self._modes.pop().__exit__(*caught)

    @contextlib.contextmanager
    def threads(self) -> Iterator[None]:
        as_device = device_threads.as_device

        @contextlib.contextmanager
        def watched(device: Device, streams: Streams) -> Iterator[cuda.Stream | None]:
            with as_device(device, streams) as stream, _Mode(self._handler):
                yield stream

        device_threads.as_device = watched
        try:
            yield
        finally:
            device_threads.as_device = as_device


class _Mode(_sanitizer.CUDASanitizerDispatchMode):
    """The sanitizer's eye on one thread; what it sees goes to a handler that all of them share."""

    def __init__(self, handler: Any) -> None:
        TorchDispatchMode.__init__(self)  # the sanitizer's own would register a second handler
        self.event_handler = handler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # `_unsafe_view` launches nothing, but its schema does not say that it is a view: it would count as a write
        if not cuda.num_gpus() or func is torch.ops.aten._unsafe_view.default:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _locked(lock: threading.RLock, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return function(*args, **kwargs)

    return run


def _sees_a_race(place: torch.device) -> bool:
    tensor = torch.zeros(1 << 20, device=place)
    with cuda.using(cuda.stream(place)):
        try:
            tensor.add_(1.0)  # nothing says that the zeros are there
        except _sanitizer.CUDASanitizerErrors:
            return True
    return False
