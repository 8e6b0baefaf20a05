"""`recorded`: what the calling thread allocates and frees, as PyTorch's allocator of the CPU's memory reports it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

_MARK = "rlplace: "
_CONFIG = (ProfilerState.CPU, False, True, False, False, False)
"""Of the profiler: allocations, but no shapes, stacks, FLOPs or modules."""
Records = Sequence[Any]
"""Events as PyTorch's profiler of one thread keeps them."""


class Event(NamedTuple):
    """Something that a thread did.

    Attributes:
        time_s: when; zero is the same for all threads.
        kind: it entered or left what was marked with `mark`, or changed what it holds in memory.
        label: of the mark; of a change, of the innermost one around it, empty where there is none.
        num_bytes: of a change: allocated, or if below 0 freed.
    """

    time_s: float
    kind: Literal["enter", "leave", "change"]
    label: str
    num_bytes: int


@contextlib.contextmanager
def recorded(keep: Callable[[Records], None]) -> Iterator[None]:
    """While active, the calling thread's allocations are recorded; `keep` is given them at the end.

    What is freed is known by the thread that frees it, if it was allocated while some thread was recorded. This is the
    profiler of single threads: the one in `torch.profiler` tells nothing of the memory of threads that were there
    before it was started.

    Raises:
        RuntimeError: the thread is being profiled already.
    """
    _enable_profiler_legacy(ProfilerConfig(*_CONFIG, _ExperimentalConfig()))
    try:
        yield
    finally:
        keep([record for each in _disable_profiler_legacy() for record in each])


def marked(function: Callable[..., Any], label: str) -> Callable[..., Any]:
    """`function`, whose calls are marked with `label` in what is recorded of a thread."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.profiler.record_function(_MARK + label):
            return function(*args, **kwargs)

    return call


def read_events(threads: Sequence[Records]) -> list[list[Event]]:
    """What each of the threads did, in its order."""
    origin = next((record for records in threads for record in records), None)
    return [list(_read(records, origin)) for records in threads]


def _read(records: Records, origin: Any) -> Iterator[Event]:
    open_marks: dict[int, str] = {}
    for record in records:
        kind, label = record.kind(), next(reversed(open_marks.values()), "")
        time_s = origin.cpu_elapsed_us(record) / 1e6
        if kind == "memory_alloc" and record.cpu_memory_usage():
            yield Event(time_s, "change", label, record.cpu_memory_usage())
        elif kind == "push" and record.name().startswith(_MARK):
            open_marks[record.handle()] = record.name().removeprefix(_MARK)
            yield Event(time_s, "enter", open_marks[record.handle()], 0)
        elif kind == "pop" and record.handle() in open_marks:
            yield Event(time_s, "leave", open_marks.pop(record.handle()), 0)
