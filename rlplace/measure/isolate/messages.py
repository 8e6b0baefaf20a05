"""What the process that asks and its worker say to each other: records and arrays, pickled on a private socket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlplace.graphs.program import Origin, Program
from rlplace.measure.isolate.settings import TorchSettings
from rlplace.measure.measurement import Status
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.run.eager.eager_recipe import EagerRecipe
from rlplace.measure.run.race import RaceProtocol


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
    """What placements may take beside what the worker has now; infinite where nobody knows."""


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
    """Whether the worker was killed by somebody else: the contender gets another try."""
    is_usable: bool = False
    """Whether the worker can be asked again."""


@dataclass(frozen=True)
class Ask:
    """The worker waits while the process that asks runs one of its own timers."""

    other: int
    """Which of `Race.others`."""


@dataclass(frozen=True)
class Timed:
    """What such a timer gave."""

    seconds: float
    """Of one step."""


@dataclass(frozen=True)
class Failed:
    """What such a timer raised."""

    status: Status
    """What it makes of the measurement."""
    why: str
    """The error."""
