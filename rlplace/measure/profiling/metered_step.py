"""`MeteredStep`: a placed step that counts the memory of each device while it runs.

`recorded` records allocations and frees of the calling thread, as PyTorch's allocator of the CPU's memory reports it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

from rlplace import cuda
from rlplace.graphs import OpGraph
from rlplace.graphs.program import Update
from rlplace.measure.execute.device_threads import Crew, Job, torch_device
from rlplace.measure.execute.placed_step import PlacedStep
from rlplace.measure.execute.residents import Residents
from rlplace.measure.hosts.host import Host
from rlplace.measure.problem import Plan

_TAKE, _ITEM = "take ", "item "


class MeteredStep(PlacedStep):
    """A placed step that counts the bytes that PyTorch's allocators give to each of its devices; slow, never for step
    times.

    Nothing of it comes from the simulator, the graph's sizes or the generated code's own bookkeeping. Of a core's
    memory it counts the storages of its residents, then each block that its thread allocates, at the size that was
    asked for: outputs, copies, and scratch memory that kernels take through PyTorch. A block that another device frees
    when it has made its copy is its maker's until then. Of a GPU it is the most that PyTorch's allocator gave to the
    process since the step began: a GPU that is split into devices shows the sum of theirs on each.

    It does not see memory that libraries take from the system by themselves (MKL, OpenMP, CUDA contexts), nor blocks
    that the other threads of a device's intra-op team take. Of a hand-over, whose memory is common, the last reader may
    be on another device: its block is then taken off the account of that one.

    Args:
        graph: with its program.
        host: of this machine.
        plan: made for both.
        residents: as for `PlacedStep`.
        crew: the host's threads.
        seed: of random ops.
        marks_ops: also count the bytes that each op needs while it runs (`needed_bytes`); of cores.

    Attributes:
        needed_bytes: (N,) int64, the most that each marked op added, while it ran, to its device's memory, in the last
            step. Updates that one call does have theirs at the last of them.
    """

    def __init__(
        self,
        graph: OpGraph,
        host: Host,
        plan: Plan,
        residents: Residents,
        crew: Crew,
        *,
        seed: int = 0,
        marks_ops: bool = False,
    ) -> None:
        super().__init__(graph, host, plan, residents, crew, seed=seed)
        self._marks_ops = marks_ops
        self._records: list[Records] = [[] for _ in host.devices]
        self._gpus = {d: torch_device(device) for d, device in enumerate(host.devices) if device.backend == "cuda"}
        self._level: NDArray[np.int64] = np.zeros(host.num_devices, dtype=np.int64)
        self._peak = self._level
        self.needed_bytes: NDArray[np.int64] = np.zeros(graph.num_ops, dtype=np.int64)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """(D,) the most that each device held at a time during the last step; memory that earlier ones left there
        counts."""
        return tuple(self._peak.tolist())

    def load(self) -> None:
        super().load()
        self._level = self._resident_bytes()

    def run(self, step: int = 0, *, deadline_s: float = 600.0) -> float:
        if not self.is_loaded:
            self.load()
        for place in self._gpus.values():
            cuda.forget_peak(place)
        seconds = super().run(step, deadline_s=deadline_s)
        origin = next((record for records in self._records for record in records), None)
        self._count([list(read_events(records, origin)) for records in self._records])
        for device, place in self._gpus.items():
            self._peak[device] = cuda.peak_bytes(place)
        return seconds

    def _bind(self, device: int) -> Job:
        job = super()._bind(device)
        if device in self._gpus:
            return job
        names, n = self._namespaces[device], self._graph.num_ops
        keep = partial(self._records.__setitem__, device)  # not this step, which holds its jobs
        labels = {f"k{item - n}_take": f"{_TAKE}{item - n}" for item in self._code.items[device] if item >= n}
        if self._marks_ops:
            labels |= {f"{kind}{op}": f"{_ITEM}{op}" for op in self._code.items[device] if op < n for kind in "fu"}
        names.update({name: marked(names[name], label) for name, label in labels.items() if name in names})

        def metered(step: int) -> None:
            with recorded(keep):
                job(step)

        return metered

    def _count(self, threads: list[list[Event]]) -> None:
        changes: list[list[tuple[float, int]]] = [[] for _ in threads]
        for device, events in enumerate(threads):
            for event in events:
                if event.kind == "change":
                    changes[self._account(device, event)].append((event.time_s, event.num_bytes))
            for item, needed in _needed(events):
                self.needed_bytes[item] = needed
        self._peak, self._level = self._level.copy(), self._level.copy()
        for device, own in enumerate(changes):
            levels = np.cumsum([0, *(num_bytes for _, num_bytes in sorted(own, key=lambda change: change[0]))])
            self._peak[device] += levels.max()
            self._level[device] += levels[-1]

    def _account(self, device: int, event: Event) -> int:
        """Whose block it is: memory that a receiver frees while it takes a tensor is the sender's."""
        if event.num_bytes > 0 or not event.label.startswith(_TAKE):
            return device
        return self._code.ranks.sources[int(event.label.removeprefix(_TAKE))]

    def _resident_bytes(self) -> NDArray[np.int64]:
        """(D,) bytes of the storages that stay on each device from step to step."""
        tensors = map(self._resident_tensors, range(self._host.num_devices))
        storages = (map(torch.Tensor.untyped_storage, own) for own in tensors)
        sizes = ({each.data_ptr(): each.nbytes() for each in own} for own in storages)
        return np.array([sum(each.values()) for each in sizes], dtype=np.int64)

    def _resident_tensors(self, device: int) -> Iterator[torch.Tensor]:
        for item in self._code.items[device]:
            if item in self._program.sources:
                yield self._residents.tensor(item, device)
            elif isinstance(self._program.calls.get(item), Update):
                yield from self._residents.update_state(item, device).tensors


def _needed(events: list[Event]) -> Iterator[tuple[int, int]]:
    """Each marked op, and the most that was allocated at a time since it began."""
    level = most = 0
    for event in events:
        if event.label.startswith(_ITEM):
            if event.kind == "enter":
                level = most = 0
            elif event.kind == "change":
                level += event.num_bytes
                most = max(most, level)
            else:
                yield int(event.label.removeprefix(_ITEM)), most


_MARK = "rlplace: "
_CONFIG = (ProfilerState.CPU, False, True, False, False, False)
"""Of the profiler: allocations, but no shapes, stacks, FLOPs or modules."""
Records = Sequence[Any]
"""Events as PyTorch's profiler of one thread keeps them."""


class Event(NamedTuple):
    """Something that a thread did.

    Attributes:
        time_s: when; zero is the same for all threads.
        kind: it entered or left a function marked with `mark`, or changed its memory.
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

    A free is recorded by the thread that frees, if it was allocated while some thread was recorded. This is the
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
    """`function`, whose calls are marked with `label` in the record of a thread."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.profiler.record_function(_MARK + label):
            return function(*args, **kwargs)

    return call


def read_events(records: Records, origin: Any) -> Iterator[Event]:
    """The records of a thread, in order of time; time zero is that of the record `origin`."""
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
