"""Custom ops that break their process on one device, and are harmless on every other."""

from __future__ import annotations

import copy
import ctypes
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlplace.graphs import capture
from rlplace.graphs.opgraph import OpGraph

HOARD: list[object] = []
"""What was allocated without end: nobody lets go of it."""
FAULTS = ("abort", "segfault", "exit", "kill", "hang", "raise", "nan", "allocate", "map")
"""Kinds of faults, in the order of the ops of `faulty_graph`."""
CHUNK = 8 << 20


@torch.library.custom_op("rlplace_tests_faults::faulty", mutates_args=())
def faulty(x: Tensor, kind: str) -> Tensor:
    """A copy of `x`; on `cpu:1` the fault that `kind` names."""
    if threading.current_thread().name == "rlplace cpu:1":
        return misbehave(x, kind)
    return x.clone()


@faulty.register_fake
def _(x: Tensor, kind: str) -> Tensor:
    return torch.empty_like(x)


def misbehave(x: Tensor, kind: str) -> Tensor:
    if kind == "abort":
        os.abort()
    if kind == "segfault":
        ctypes.string_at(0)
    if kind == "traced":  # only a traced step marks its ops by a clock
        return os.abort() if any("clock" in code.co_names for code in placed_code()) else x.clone()
    if kind == "exit":
        os._exit(3)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "raise":
        raise ValueError("boom")
    while kind == "hang":
        ctypes.PyDLL(None).sleep(3600)  # it holds the interpreter lock, so no Python code can end it
    while kind == "allocate":
        HOARD.append(torch.ones(CHUNK // 4))
    while kind == "map":  # memory that is no process's data, which the limit of data does not see
        shared = mmap.mmap(-1, CHUNK)
        shared.write(b"x" * CHUNK)
        HOARD.append(shared)
    return x * float("nan")


def placed_code() -> Iterator[CodeType]:
    """The code of the placed steps that called this function."""
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:
        if frame.f_code.co_filename.startswith("<placed step"):
            yield frame.f_code


class Faulty(nn.Module):
    """A chain with one op for each kind."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.kinds = kinds

    def forward(self, x: Tensor) -> Tensor:
        for kind in self.kinds:
            x = faulty(x, kind)
        return x + 1


def faulty_graph(kinds: tuple[str, ...] = FAULTS) -> OpGraph:
    """The input, an op for each of `kinds`, and a sum: `len(kinds)` + 2 ops."""
    return capture(Faulty(kinds), torch.ones(8))


SWITCH: dict[str, Any] = {"fails": None, "thread": None, "stuck": None}
"""What `switched` does: an error that it raises or an event that it waits for, on one thread or all; who waits."""


@torch.library.custom_op("rlplace_tests_faults::switched", mutates_args=())
def switched(x: Tensor) -> Tensor:
    fails, here = SWITCH["fails"], threading.current_thread()
    if SWITCH["thread"] in (None, here.name):
        if isinstance(fails, Exception):
            raise copy.copy(fails)
        if fails is not None:
            SWITCH["stuck"] = here
            fails.wait(timeout=600)
    return x.clone()


@switched.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Switched(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return switched(x * 2) + 1


def switched_graph(size: int = 3) -> OpGraph:
    """Input, mul, switched, add."""
    return capture(Switched(), torch.ones(size))


@torch.library.custom_op("rlplace_tests_faults::pause", mutates_args=())
def pause(x: Tensor) -> Tensor:
    """A copy of `x`, after 40 ms, and 10 ms on `cpu:1`: no noise of a machine hides which device is faster."""
    time.sleep(0.01 if threading.current_thread().name == "rlplace cpu:1" else 0.04)
    return x.clone()


@pause.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Paused(Faulty):
    """The chain, and a pause at its end."""

    def forward(self, x: Tensor) -> Tensor:
        return pause(super().forward(x))


def paused_graph(kinds: tuple[str, ...]) -> OpGraph:
    """The input, an op for each of `kinds`, a sum and a pause: `len(kinds)` + 3 ops."""
    return capture(Paused(kinds), torch.ones(8))


TOLD = ("nothing", "raise", "memory", "wait", "kill")
"""What an op does that is told by its input, by number."""
GO = "RLPLACE_TESTS_GO"
"""The variable with the path of a file, for which an op that was told to `wait` waits."""


@torch.library.custom_op("rlplace_tests_faults::told", mutates_args=())
def told(x: Tensor, what: Tensor) -> Tensor:
    """A copy of `x`; before, what is told."""
    kind = TOLD[int(what)]
    if kind == "raise":
        raise ValueError("boom")
    if kind == "memory":
        torch.empty(1 << 55)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while kind == "wait" and not Path(os.environ[GO]).exists():
        time.sleep(0.01)
    return x.clone()


@told.register_fake
def _(x: Tensor, what: Tensor) -> Tensor:
    return torch.empty_like(x)


told.register_autograd(lambda _, gradient: (gradient, None))


class Told(nn.Module):
    """Layers with dropout, and between them an op that is told what to do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, what: Tensor) -> Tensor:
        hidden = functional.dropout(torch.relu(self.first(x)), 0.5)
        out: Tensor = self.last(told(hidden, what))
        return out
