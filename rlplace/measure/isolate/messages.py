"""The protocol between a worker process and its parent, the process that asks for measurements.

Messages are the records below, pickled on a socket pair that no third process has a name for. One worker serves one
parent, one request at a time:

    parent                                       worker
      |  Popen, with inherited descriptors         |   of the socket, of the packed `Setup` and of the board
      |  <---------------------- Done | Fault ---  |   once, after it imported torch and read its `Setup`
      |  ---- Race | Trace | Step | Profile ---->  |   a request
      |  <------------------------- Said, Ask ---  |   any number of them while it works
      |  ---- float | Fault (after an Ask) ----->  |   time of the parent's own timer
      |  <---------------------- Done | Fault ---  |   exactly one answer to each request

A worker that crashes or hangs sends nothing. So beside the socket there is the `Board`, a page of shared memory on
which the worker announces each of its actions. The parent looks at the board, at the worker's memory and at its exit
status ten times a second, ends a worker that takes too long (`TimeLimits`) or too much, and makes the `Fault` itself.
Writing to the board is a few stores and wakes no thread, so that the timed step is not disturbed.

`torch_settings` are the user's process-wide settings of PyTorch. A worker gets them too, so that it computes the same
results.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rlplace.errors import RunnerError
from rlplace.graphs import Program
from rlplace.measure.isolate.packing import shared_file
from rlplace.measure.measurement import Status
from rlplace.measure.problem import Plan, Problem
from rlplace.measure.timing.eager_step import MAKING_S, EagerRecipe
from rlplace.measure.timing.host_runner import LONGEST_S
from rlplace.measure.timing.race import RaceProtocol, Watch


@dataclass(frozen=True)
class Setup:
    """All that a worker needs before it is asked anything; it is packed, with its tensors in shared memory."""

    problem: Problem
    """The problem that is measured; a graph travels without its program."""
    program: Program
    """Of its graph, without the user's model."""
    seed: int
    """Of random ops."""
    cores: tuple[int, ...]
    """That the worker may use."""
    settings: tuple[Any, ...]
    """Of PyTorch in the process that asks (`torch_settings`)."""
    memory_limit_bytes: float | None
    """Most bytes that placements may take beside the memory of a worker that is ready; None is the machine's memory,
    infinite no limit."""


@dataclass(frozen=True)
class Race:
    """Asks for measurements of plans and of others, all in one race."""

    plans: Sequence[Plan]
    """The plan to run."""
    peaks: Mapping[str, Sequence[int]]
    """(D,) simulated bytes of each and of the reference, by fingerprint."""
    others: Sequence[EagerRecipe | None]
    """Recipes; None for a timer that runs in the process that asks."""
    protocol: RaceProtocol
    """Rounds."""
    deadline_s: float
    """On `time.monotonic`."""
    reference: Plan | None = None
    """The reference of the race."""


@dataclass(frozen=True)
class Trace:
    """Asks for timelines of steps of a plan."""

    plan: Plan
    """The plan to run."""
    peaks: Mapping[str, Sequence[int]]
    """(D,) its simulated bytes, by its fingerprint."""
    num_steps: int
    """That are traced."""
    warmup: int
    """Steps before them."""
    step_s: float | None = None
    """Its step time in the race that they belong to; None where there was no race."""
    longest_s: float = MAKING_S
    """That they may take, all together."""


@dataclass(frozen=True)
class Step:
    """Asks for the seconds of one step of a plan, which stays loaded until a race."""

    plan: Plan
    """The plan to run."""


@dataclass(frozen=True)
class Profile:
    """Asks for the time of every op on every device, from steps with everything on one device of each kind.

    The contender on the board is the device that is at work.
    """

    num_steps: int
    """That are traced on each kind of device."""
    warmup: int
    """Steps before them."""
    most_s: float
    """Seconds for tracing, as of `profile_costs`."""


Request = Race | Trace | Step | Profile


@dataclass(frozen=True)
class Said:
    """The worker has something to tell people."""

    line: str
    """Its message."""


@dataclass(frozen=True)
class Done:
    """The answer to a request; the first one says that the worker is ready."""

    result: Any
    """Measurements, timelines, seconds of a step, or `Costs`.

    In the first answer: bytes that placements may use, besides the worker's own memory; infinite if unknown.
    """


@dataclass(frozen=True)
class Fault:
    """One contender ended the race for all: by an error after which the worker cannot go on, or by its death."""

    contender: int
    """Its index, `REFERENCE`, or `IDLE` where none had run."""
    status: Status
    """That of its measurement."""
    why: str
    """The cause."""
    is_from_outside: bool = False
    """Whether another process killed the worker: the contender gets another try."""
    is_usable: bool = False
    """Whether the worker can be asked again."""

    def as_error(self) -> Exception:
        """The error that it stands for in another process."""
        kinds: dict[str, type[Exception]] = {"timeout": TimeoutError, "oom": MemoryError}
        return kinds.get(self.status, RunnerError)(self.why)


@dataclass(frozen=True)
class Ask:
    """The worker waits while the parent runs one of its own timers; the answer is its seconds, or its `Fault`."""

    other: int
    """Which of `Race.others`."""


IDLE = -2
"""The contender of a worker that has run none since it was asked."""


class Board(ctypes.Structure, Watch):
    """The action of a worker; the worker writes (it is a `Watch`), the process that waits for it reads.

    It lies on a page of shared memory. Times are of `time.monotonic`, which processes of one machine share.

    Attributes:
        contender: the contender that is at work, or was last; `IDLE` where none was since the worker was asked.
        is_at_work: whether its step has begun and not ended.
        is_made: False while it is being made for the race.
        begin_s: when its step began.
        first_s: the longest first step of any contender so far, which loads the plan; 0 before one has ended.
        best_s: the shortest later step so far; 0 before one has ended.
        end_s: when the last step ended.
        file: descriptor to inherit.
    """

    first_s: float
    best_s: float
    _fields_ = (
        ("contender", ctypes.c_int64),
        ("is_at_work", ctypes.c_bool),
        ("is_made", ctypes.c_bool),
        *((name, ctypes.c_double) for name in ("begin_s", "first_s", "best_s", "end_s")),
    )

    @classmethod
    def on(cls, file: int) -> Board:
        """The board on the page of a descriptor."""
        board = cls.from_buffer(mmap.mmap(file, mmap.PAGESIZE))
        board.file, board._have_run = file, set()
        return board

    @classmethod
    def new(cls) -> Board:
        """A board on a new page."""
        board = cls.on(shared_file(mmap.PAGESIZE))
        board.reset()
        return board

    def reset(self) -> None:
        """Forgets the contenders of the last race, not how long steps took."""
        self._have_run.clear()
        self.contender, self.is_at_work = IDLE, False

    def begin(self, contender: int, *, is_made: bool = True) -> None:
        self.is_made, self.contender = is_made, contender
        self.begin_s = time.monotonic()
        self.is_at_work = True

    def end(self) -> None:
        self.end_s = time.monotonic()
        took_s = self.end_s - self.begin_s
        if self.is_made and self.contender in self._have_run:
            self.best_s = min(self.best_s or took_s, took_s)
        elif self.is_made:
            self._have_run.add(self.contender)
            self.first_s = max(self.first_s, took_s)
        self.is_at_work = False

    def follow(self, told: bytes, *, later_s: float) -> None:
        """Is as the board of another machine was, whose clock shows `later_s` less than this one's."""
        ctypes.memmove(ctypes.addressof(self), told, ctypes.sizeof(self))
        self.begin_s, self.end_s = self.begin_s + later_s, self.end_s + later_s

    def carry(self, other: Board) -> None:
        """Takes over how long steps took on `other`, the board of a worker that this one's replaces."""
        self.first_s, self.best_s = other.first_s, other.best_s

    def close(self) -> None:
        """Closes the descriptor; the page is given back with this object."""
        os.close(self.file)


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda asked: torch.use_deterministic_algorithms(asked[0], warn_only=asked[1]),
    ),
    *(
        (partial(getattr, torch.backends.cudnn, name), partial(setattr, torch.backends.cudnn, name))
        for name in ("benchmark", "deterministic", "allow_tf32")
    ),
)


def torch_settings() -> tuple[Any, ...]:
    """Settings of this process that change the results or the times of ops.

    Intra-op threads of the calling thread, the default dtype, the precision of float32 matrix products, whether ops
    must be deterministic and whether others only warn, and whether cuDNN tries its algorithms out, uses
    deterministic ones alone, and may round to TF32.
    """
    return tuple(get() for get, _ in _SETTINGS)


def apply_settings(settings: tuple[Any, ...]) -> None:
    """Makes the `torch_settings` of another process those of this one."""
    for (_, set_), value in zip(_SETTINGS, settings, strict=True):
        set_(value)


BETWEEN_S = 900.0
"""The time limit of a worker between steps, to load its request and to make code of plans."""
STOPPED_S = 10.0
"""How long a worker that a signal stopped may stay stopped."""


@dataclass(frozen=True)
class TimeLimits:
    """Seconds that one step may take until its worker is ended and the contender is a `timeout`.

    A race that drops the hopeless needs of a slow placement only that it is slow: once a step was timed, a limit of
    many times the best one plus the time for loading shows that. A race that drops no contender needs all figures.
    """

    longest_s: float = LONGEST_S
    """Of any step."""
    least_s: float = 5.0
    """Of any step, however fast others are: a busy machine may hold one up."""
    num_best: float = 20.0
    """Times the best step known."""
    num_first: float = 4.0
    """Times the longest first step, in which a plan is loaded: that of another may take longer."""

    def limit_s(self, protocol: RaceProtocol, best_s: float, first_s: float) -> float:
        """Seconds for a step of a plan.

        Args:
            protocol: of the race: the contenders that it drops as hopeless.
            best_s: the best step known; 0 where none is.
            first_s: the longest first step known; 0 where none is.

        >>> hopeful = RaceProtocol(hopeless=float("inf"))
        >>> TimeLimits().limit_s(RaceProtocol(), 0.5, 2.0), TimeLimits().limit_s(hopeful, 0.5, 2.0)
        (18.0, 120.0)
        """
        if best_s <= 0.0 or math.isinf(protocol.hopeless):
            return self.longest_s
        several = max(self.num_best, 2.0 * protocol.hopeless)
        return min(max(several * best_s + self.num_first * first_s, self.least_s), self.longest_s)
