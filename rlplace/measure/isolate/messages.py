"""The protocol between a worker process and its parent, the process that asks for measurements.

Messages are the records below, pickled on a socket pair that no third process has a name for. One worker serves one
parent, one request at a time:

    parent                                       worker
      |  Popen, with inherited descriptors         |   of the socket, of the packed `Setup` and of the board
      |  <-------------------- Ready | Unfit ----  |   once, after it imported torch and read its `Setup`
      |  ---- Race | Trace | Step | Profile ---->  |   a request
      |  <------------------------- Said, Ask ---  |   any number of them while it works
      |  ---- float | Fault (after an Ask) ----->  |   what the parent's own timer took
      |  <---------------------- Done | Fault ---  |   exactly one answer to each request

A worker that crashes or hangs sends nothing. So beside the socket there is the `Board`, a page of shared memory on
which the worker writes what it is doing before it does it. The parent looks at the board, at the worker's memory and at
its exit status ten times a second, ends a worker that takes too long (`TimeLimits`) or too much, and makes the `Fault`
itself. Writing to the board is a few stores and wakes no thread, so that the timed step is not disturbed.

`TorchSettings` carries over what a user set in PyTorch for the whole process, so that a worker computes the same.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlplace.errors import RunnerError
from rlplace.graphs.program import Origin, Program
from rlplace.measure.isolate.packing import shared_file
from rlplace.measure.measurement import Status
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.timing.eager_step import EagerRecipe
from rlplace.measure.timing.host_runner import LONGEST_S
from rlplace.measure.timing.race import RaceProtocol


@dataclass(frozen=True)
class Setup:
    """All that a worker needs before it is asked anything; it is packed, with its tensors in shared memory."""

    problem: Problem
    """What is measured; a graph travels without its program."""
    program: Program
    """Of its graph, without the user's model."""
    reference: Plan | None
    """What every plan is timed beside."""
    reference_peaks: Sequence[int]
    """(D,) its simulated peaks in bytes."""
    seed: int
    """Of random ops."""
    cores: tuple[int, ...]
    """That the worker may use."""
    settings: TorchSettings
    """Of the process that asks."""
    memory_limit_bytes: int | None
    """Most that placements may take beside what the worker has when it is ready; None is what the machine has."""


Parts = tuple[Setup, Origin | None]
"""The two things that are packed, in this order: the second is read when it is needed."""


@dataclass(frozen=True)
class Race:
    """Asks for measurements of plans and of others, all in one race."""

    plans: Sequence[Plan]
    """What is to run."""
    peaks: Sequence[Sequence[int]]
    """(D,) of each, simulated, in bytes."""
    others: Sequence[EagerRecipe | None]
    """Recipes; None for a timer that runs in the process that asks."""
    protocol: RaceProtocol
    """Rounds."""
    deadline_s: float
    """On `time.monotonic`."""


@dataclass(frozen=True)
class Trace:
    """Asks for timelines of steps of a plan."""

    plan: Plan
    """What is to run."""
    peaks: Sequence[int]
    """(D,) simulated, in bytes."""
    num_steps: int
    """That are traced."""
    warmup: int
    """Steps before them."""


@dataclass(frozen=True)
class Step:
    """Asks for the seconds of one step of a plan, which stays loaded until a race."""

    plan: Plan
    """What is to run."""


@dataclass(frozen=True)
class Profile:
    """Asks what every op takes on every device, from steps with everything on one device of each kind.

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
class Ready:
    """The worker has what it needs."""

    room_bytes: float
    """What placements may take beside what the worker has now; infinite where it is unknown."""


@dataclass(frozen=True)
class Unfit:
    """The worker cannot be used: what was sent cannot be read there."""

    why: str
    """The first error."""


@dataclass(frozen=True)
class Said:
    """The worker has something to tell people."""

    line: str
    """What it tells."""


@dataclass(frozen=True)
class Done:
    """The answer to what was asked."""

    result: Any
    """Measurements, timelines, seconds of a step, or `Costs`."""


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
_NUM_BYTES = mmap.PAGESIZE
_CONTENDER, _IS_AT_WORK, _IS_MADE, _BEGIN_NS, _FIRST_NS, _BEST_NS, _END_NS = range(7)


class Board:
    """What a worker is doing; the worker writes (it is a `Watch`), the process that waits for it reads.

    Times are of `time.monotonic`, which processes of one machine share.

    Args:
        file: descriptor of the page; a new page by default.

    Attributes:
        file: descriptor to inherit.
    """

    def __init__(self, file: int | None = None) -> None:
        self.file = shared_file(_NUM_BYTES) if file is None else file
        self._page = mmap.mmap(self.file, _NUM_BYTES)
        self._words = memoryview(self._page).cast("q")
        self._have_run: set[int] = set()
        if file is None:
            self.reset()

    def reset(self) -> None:
        """Forgets the contenders of the last race, not how long steps took."""
        self._have_run.clear()
        self._words[_CONTENDER], self._words[_IS_AT_WORK] = IDLE, False

    def begin(self, contender: int, *, is_made: bool = True) -> None:
        words = self._words
        words[_IS_MADE], words[_CONTENDER] = is_made, contender
        words[_BEGIN_NS] = time.monotonic_ns()
        words[_IS_AT_WORK] = True

    def end(self) -> None:
        words = self._words
        words[_END_NS] = time.monotonic_ns()
        took_ns = words[_END_NS] - words[_BEGIN_NS]
        contender = words[_CONTENDER]
        if words[_IS_MADE] and contender in self._have_run:
            words[_BEST_NS] = min(words[_BEST_NS] or took_ns, took_ns)
        elif words[_IS_MADE]:
            self._have_run.add(contender)
            words[_FIRST_NS] = max(words[_FIRST_NS], took_ns)
        words[_IS_AT_WORK] = False

    @property
    def contender(self) -> int:
        """The contender that is at work, or was last; `IDLE` where none was since the worker was asked."""
        return int(self._words[_CONTENDER])

    @property
    def is_at_work(self) -> bool:
        """Whether its step has begun and not ended."""
        return bool(self._words[_IS_AT_WORK])

    @property
    def is_made(self) -> bool:
        """False while it is being made for the race."""
        return bool(self._words[_IS_MADE])

    @property
    def begin_s(self) -> float:
        """When its step began."""
        return float(self._words[_BEGIN_NS]) / 1e9

    @property
    def end_s(self) -> float:
        """When the last step ended."""
        return float(self._words[_END_NS]) / 1e9

    @property
    def first_s(self) -> float:
        """The longest first step of any contender so far: it loads the plan; 0 before one has ended."""
        return float(self._words[_FIRST_NS]) / 1e9

    @property
    def best_s(self) -> float:
        """The shortest later step so far; 0 before one has ended."""
        return float(self._words[_BEST_NS]) / 1e9

    def carry(self, other: Board) -> None:
        """Takes over how long steps took on `other`, the board of a worker that this one's replaces."""
        for word in (_FIRST_NS, _BEST_NS):
            self._words[word] = other._words[word]

    def close(self) -> None:
        """Gives the page back."""
        self._words.release()
        self._page.close()
        os.close(self.file)


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
)
_OF_CUDNN = ("benchmark", "deterministic", "allow_tf32")


@dataclass(frozen=True)
class TorchSettings:
    """Settings of a process that change what ops do or how long they take.

    Attributes:
        values: intra-op threads of the calling thread, the default dtype, the precision of float32 matrix products.
        is_deterministic: `torch.use_deterministic_algorithms`.
        warns_only: whether an op that has no deterministic form only warns.
        of_cudnn: whether cuDNN tries its algorithms out, uses deterministic ones alone, may round to TF32.
    """

    values: tuple[Any, ...]
    is_deterministic: bool
    warns_only: bool
    of_cudnn: tuple[bool, ...]

    @classmethod
    def here(cls) -> TorchSettings:
        """Those of this process."""
        return cls(
            tuple(get() for get, _ in _SETTINGS),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            tuple(getattr(torch.backends.cudnn, name) for name in _OF_CUDNN),
        )

    def apply(self) -> None:
        """Makes them those of this process."""
        for (_, set_), value in zip(_SETTINGS, self.values, strict=True):
            set_(value)
        torch.use_deterministic_algorithms(self.is_deterministic, warn_only=self.warns_only)
        for name, value in zip(_OF_CUDNN, self.of_cudnn, strict=True):
            setattr(torch.backends.cudnn, name, value)


MAKING_S = 900.0
"""What compiling a model, or another way of making a contender, may take; plain PyTorch's own steps have it too."""
BETWEEN_S = 900.0
"""What a worker may take between steps, to load what it was sent and to make code of plans."""
STOPPED_S = 10.0
"""How long a worker that a signal stopped may stay stopped."""


@dataclass(frozen=True)
class TimeLimits:
    """Seconds that one step may take until its worker is ended and the contender is a `timeout`.

    A race that drops the hopeless needs of a slow placement only that it is slow: once a step was timed, a limit of
    many times the best one, and what loading takes, tells that. A race that drops no contender needs all figures.
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
            protocol: of the race: what it drops as hopeless.
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
