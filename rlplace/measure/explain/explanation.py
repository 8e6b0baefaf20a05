"""`Explanation`: where the time and the memory of one placed step go, as plain records that a run keeps."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from rlplace.errors import refuse_if
from rlplace.files import MOST_GRAPH_VALUES, read_json, write_json_atomic
from rlplace.records import Count, FirstSchema, Seconds, read_record, record

SCHEMA: Final = 1
FILE = "explanation.json"
"""Its name in a run folder."""

Kind = Literal["simulated", "measured"]
"""Where step times come from."""


@record(frozen=True)
class DeviceShare:
    """The shares of one device during the step: `busy_s + transfer_s + idle_s` is the step."""

    name: str
    kind: str
    num_ops: Count
    """Ops placed on it, sources left out."""
    busy_s: Seconds
    """It runs an op, of its own or of a gang that it is a member of."""
    transfer_s: Seconds
    """It runs no op, but a copy from it or to it is on its way."""
    idle_s: Seconds
    """Neither."""
    sent_bytes: Count
    received_bytes: Count
    peak_bytes: Count
    """Most that was allocated at once."""
    capacity_bytes: Count
    """Its memory; of a pool, that of all its devices together."""
    memory_pool: str = ""
    """The pool that it shares its memory in; empty for a memory of its own."""
    members: tuple[str, ...] = ()
    """Devices that it is a gang of; empty for a single device."""


@record(frozen=True)
class PathPart:
    """A stretch of the critical path: ops of one module in a row, one transfer, or a wait."""

    kind: Literal["op", "transfer", "wait"]
    start_s: Seconds
    end_s: Seconds
    device: str
    """Where the ops run, where the transfer goes, or which device waits."""
    name: str
    """Of the first op of the stretch, or the op whose output is sent; for a wait, the item after it."""
    module: str
    """Of that op; empty at the root."""
    phase: str
    """Of that op: `forward`, `backward` or `update`."""
    source: str = ""
    """Where a transfer comes from; empty for others."""
    num_ops: Count = 0
    """Ops of the stretch; 0 for others."""
    num_bytes: Count = 0
    """The tensor of a transfer; 0 for others."""
    what: Literal["", "parameter", "input", "activation", "gradient"] = ""
    """Its kind; empty for others."""

    def __post_init__(self) -> None:
        refuse_if(self.end_s < self.start_s, "end_s", self.end_s, f"a time not before start_s = {self.start_s}")

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end_s - self.start_s


@record(frozen=True)
class ModuleShare:
    """Seconds of the ops of a module in a phase on the critical path."""

    module: str
    """Dotted path; empty at the root."""
    phase: str
    seconds: Seconds
    num_ops: Count


@record(frozen=True)
class RouteShare:
    """Seconds of the transfers between two devices on the critical path."""

    source: str
    destination: str
    seconds: Seconds
    num_transfers: Count
    num_bytes: Count


@record(frozen=True)
class CriticalPath:
    """The chain of ops, transfers and waits that ends the step: its parts follow each other from 0 to the end.

    A wait is time in which the next item has its inputs, its device and its links, but does not run: it waits for its
    launch; of a measured step also for other work of the host.
    """

    parts: tuple[PathPart, ...]
    """In order of time, without gaps."""
    op_s: Seconds
    transfer_s: Seconds
    wait_s: Seconds
    modules: tuple[ModuleShare, ...]
    """Longest first."""
    routes: tuple[RouteShare, ...]
    """Longest first."""

    @property
    def seconds(self) -> float:
        """The whole path: the step."""
        return self.parts[-1].end_s if self.parts else 0.0


@record(frozen=True)
class CutEdge:
    """A tensor that is sent to another device."""

    op: str
    """Its producer."""
    module: str
    """Of the producer."""
    what: Literal["parameter", "input", "activation", "gradient"]
    reader: str
    """The first op that reads it at the destination."""
    reader_module: str
    num_readers: Count
    """Ops that read it there."""
    source: str
    destination: str
    num_bytes: Count
    start_s: Seconds
    seconds: Seconds
    """How long the transfer takes once it has its links."""
    is_critical: bool
    """Whether it is on the critical path."""


@record(frozen=True)
class MemoryCurve:
    """Allocated bytes of a device over the step: `num_bytes[i]` from `time_s[i]` on."""

    device: str
    time_s: tuple[float, ...]
    """Ascending."""
    num_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        refuse_if(
            len(self.time_s) != len(self.num_bytes),
            "num_bytes",
            f"{len(self.num_bytes)} values",
            f"{len(self.time_s)}, one for each time",
        )


@record(frozen=True)
class Alternative:
    """The step time of an alternative."""

    name: str
    """`one device`, `data parallel`, `eager`, ..."""
    step_time_s: Seconds | None
    """None where there is none."""
    kind: Literal["measured", "simulated", "estimated"]
    """How the step time was found."""
    note: str = ""
    """The basis of it, or the reason why there is none."""


@record(frozen=True)
class Advice:
    """One sentence of advice, and the rule that gave it."""

    rule: str
    """A name of `rlplace.measure.explain.explain_step.RULES`."""
    sentence: str


@record(frozen=True)
class Explanation:
    """The time and memory of one placed step, by parts; the content of `explanation.json`."""

    schema: FirstSchema
    graph_fingerprint: str
    host: str
    method: str
    """The method that found the placement."""
    kind: Kind
    """Whether the explained step was run or simulated."""
    step_time_s: Seconds
    """Median step time of the placement."""
    explained_s: Seconds
    """The one step that everything below is of, a typical one."""
    bound_s: Seconds
    """No placement's step is shorter, by the costs that are known."""
    bound: str
    """The name of that bound."""
    num_ops: Count
    num_micro_batches: Count
    num_transfers: Count
    """In the whole step, hand-overs left out ..."""
    transfer_bytes: Count
    """... and their tensors."""
    devices: Annotated[tuple[DeviceShare, ...], Field(min_length=1)]
    path: CriticalPath
    cuts: tuple[CutEdge, ...]
    """The costliest, longest first."""
    memory: tuple[MemoryCurve, ...]
    """One a device; empty where memory was not followed."""
    alternatives: tuple[Alternative, ...]
    advice: Advice
    spread_s: Seconds = 0.0
    """Half the interquartile range of the measured steps; 0 where they were simulated, or where it is unknown."""
    disturbed: str = ""
    """The reason to doubt the measurement, in a sentence; empty where nothing shows."""
    learned: tuple[str, ...] = ()
    """What the run learned about the host, a line each."""
    split: str = ""
    """How ops are split into shards, in words; empty where they are not."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `explanation.json` keeps it and `rlplace explain --json` prints it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any, where: str) -> Explanation:
        """The explanation in plain data, every field checked.

        Args:
            data: of such a file.
            where: its name, for messages.

        Raises:
            InvalidValue: a missing, mistyped or inconsistent field.
            UnknownName: a field that explanations do not have.
        """
        return read_record(cls, data, where)


def save_explanation(explanation: Explanation, path: str | os.PathLike[str]) -> None:
    """Writes `explanation` as JSON, whole or not at all."""
    write_json_atomic(path, explanation.to_dict())


def load_explanation(path: str | os.PathLike[str]) -> Explanation:
    """The explanation in a JSON file.

    Raises:
        FileProblem: no such file, or not JSON.
        InvalidValue, UnknownName: a malformed field.
    """
    data = read_json(
        path,
        most_values=MOST_GRAPH_VALUES,
        hint="Expected an explanation, as `rlplace train` leaves it in a run folder.",
    )
    return Explanation.from_dict(data, str(path))
