"""`rlplace.cuda` on a `Machine`: the functions that stand in for the real ones, under the same names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from fake_gpus.fake_tensors import HOST, fakes_in, gpu_of, plainly
from fake_gpus.fake_threads import FakeThreading
from fake_gpus.late_queues import FakeEvent, FakeStream, Position
from fake_gpus.machine import Machine
from rlplace import cuda
from rlplace.export.placed.model_state import PlacedState
from rlplace.measure.execute import device_threads, placed_step
from rlplace.measure.execute import device_threads as channels
from rlplace.measure.execute.residents import Residents

MEMORY_BYTES = 1 << 34
SYNCHRONISING: tuple[ModuleType, ...] = (channels, placed_step, device_threads)
"""Modules whose locks and threads order what they do."""
OP_S = 1e-6
"""What an op takes where events tell the time."""


class FakeCuda:
    """The functions of `rlplace.cuda`, for one machine; their docstrings are there."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def num_gpus(self) -> int:
        return self._machine.num_gpus

    def is_started(self) -> bool:
        return True

    def gpu(self, index: int) -> cuda.Gpu:
        return cuda.Gpu("fake GPU", MEMORY_BYTES, MEMORY_BYTES - self._machine.live_bytes[index])

    def use(self, place: torch.device) -> None:
        """Nothing: who asks for something names the GPU."""

    def stream(self, place: torch.device, *, is_urgent: bool = False) -> FakeStream:
        return self._machine.new_stream(place.index, is_urgent=is_urgent)

    def current_stream(self, place: torch.device) -> FakeStream:
        return self._machine.current_stream(place.index)

    def using(self, stream: FakeStream) -> contextlib.AbstractContextManager[None]:
        return self._machine.using(stream)

    @contextlib.contextmanager
    def settled(self, place: torch.device) -> Iterator[None]:
        with self.unsettled(place):
            yield
        if place.type == "cuda":
            self._machine.await_stream(self._machine.current_stream(place.index))

    def unsettled(self, place: torch.device) -> contextlib.AbstractContextManager[None]:
        """`settled` without what it is for: what a mutant calls instead."""
        return self._machine.attached()

    def event(self, *, is_timed: bool = False) -> FakeEvent:
        return self._machine.new_event(is_timed=is_timed)

    def record(self, event: FakeEvent, stream: FakeStream) -> None:
        self._machine.record(event, stream)

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        self._machine.wait(stream, event)

    def await_event(self, event: FakeEvent) -> None:
        self._machine.await_event(event)

    def await_stream(self, stream: FakeStream) -> None:
        self._machine.await_stream(stream)

    def is_done(self, stream: FakeStream) -> bool:
        """Looking does not make the caller the stream's user: who looks after a failure must not wait for it first."""
        with self._machine.mutex, plainly():
            self._machine.queues.complete(Position(stream))
            self._machine.host.learn(stream.actor.clock)
            return True

    def await_all(self, place: torch.device) -> None:
        self._machine.await_stream(self._machine.current_stream(place.index))

    @contextlib.contextmanager
    def forbid_waits(self) -> Iterator[None]:
        before, self._machine.forbids_waits = self._machine.forbids_waits, True
        try:
            yield
        finally:
            self._machine.forbids_waits = before

    def elapsed_s(self, begin: FakeEvent, end: FakeEvent) -> float:
        with self._machine.mutex:
            order, host = self._machine.order, self._machine.host
            for event in (begin, end):
                if not (event.actor.is_timed and order.has_seen(host, event.actor)):
                    order.blame("wait", f"{host} asks for the time of {event.actor.name} without waiting for it")
            return (end.actor.time - begin.actor.time) * OP_S

    def keep_for(self, tensor: Tensor, stream: FakeStream) -> None:
        self._machine.keep_for(tensor, stream)

    def copy(self, tensor: Tensor, place: torch.device) -> Tensor:
        return tensor.clone() if tensor.device == place else tensor.to(place, non_blocking=True)

    def copy_into(self, target: Tensor, source: Tensor) -> None:
        assert all(each.block.is_pinned or gpu_of(each) != HOST for each in fakes_in((target, source)))
        target.copy_(source, non_blocking=True)

    def pinned_like(self, tensor: Tensor) -> Tensor:
        return self._machine.pinned_like(tensor)

    def generator(self, place: torch.device) -> torch.Generator:
        return self._machine.generators[HOST if place.type == "cpu" else place.index or 0]

    def seed_all(self, seed: int) -> None:
        for generator in self._machine.generators.values():
            generator.manual_seed(seed)

    def hold_back(self, stream: FakeStream, cycles: int) -> None:
        """Nothing: what is launched runs late anyway."""

    def limit_memory(self, place: torch.device, num_bytes: int) -> None:
        self._machine.limit_bytes[place.index] = num_bytes

    def peak_bytes(self, place: torch.device) -> int:
        return self._machine.peak_bytes[place.index]

    def forget_peak(self, place: torch.device) -> None:
        self._machine.peak_bytes[place.index] = self._machine.live_bytes[place.index]

    def give_back_memory(self) -> None:
        """Nothing: no memory is kept."""


NOT_FAKED = ("capture_graph", "default_generators")
"""What only a plain PyTorch step, or a trace, is run with."""
AS_THEY_ARE = ("parse_name", "is_out_of_memory", "is_sticky", "is_gone", "is_lost", "is_late", "advice")
"""What does not touch a GPU."""


def install(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    """Puts `machine` behind `rlplace.cuda`, and its locks and threads into the modules that use it."""
    fake = FakeCuda(machine)
    for name in (name for name in vars(FakeCuda) if not name.startswith("_")):
        patch.setattr(cuda, name, getattr(fake, name), raising=name != "unsettled")
    for owner in (Residents, PlacedState):
        patch.setattr(owner, "unsettled", lambda _: machine.attached(), raising=False)
    threads = FakeThreading(machine)
    for module in SYNCHRONISING:
        patch.setattr(module, "threading", threads)
    patch.setattr(device_threads, "time", threads)
    if not torch.cuda.is_available():
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)  # which refuses to name a GPU where there is none
