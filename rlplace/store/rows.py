"""The rows of a store, checked as they come: a stranger's database may say anything; and as CSV, JSON or Parquet."""

from __future__ import annotations

import csv
import functools
import hashlib
import io
import json
import math
import os
import platform
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field

from rlplace.errors import FileProblem, InvalidValue, MissingExtra, check_known, refuse_if
from rlplace.files import jsonable, parse_json, write_bytes_atomic
from rlplace.measure import Measurement, Plan, Problem, Timeline
from rlplace.measure.measurement import MeasurementKey, Status
from rlplace.measure.problem import transfer_sources
from rlplace.records import Count, Number, Positive, Seconds, described, read_record, record

LARGEST_OPS = 10_000_000
"""Ops, and also transfers, of a plan that is read."""
LARGEST_SAMPLES = 1_000_000
ARRAYS = ("devices", "transfer_tensor", "transfer_destination", "sequence")
_CLOCK = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq")
_GLANCE_S = 0.3
"""How long the processor is watched to see how idle it is."""


def _fingerprint(value: str) -> str:
    if not (8 <= len(value) <= 64 and all(digit in "0123456789abcdef" for digit in value)):
        raise ValueError("a fingerprint: 8 to 64 hex digits")
    return value


T = TypeVar("T")
Fingerprint = Annotated[str, AfterValidator(_fingerprint)]


def machine_facts() -> tuple[tuple[str, str], ...]:
    """This machine's architecture, processor, number of cores and memory, by name."""
    names = ("architecture", "processor", "cores", "GiB of memory")
    return tuple(zip(names, map(str, _machine()), strict=True))


@functools.cache
def machine_key() -> str:
    """16 hex digits over this machine's processor, number of cores and memory.

    Machines that are alike in these may answer for each other, as the nodes of a cluster do; GPUs are part of a host's
    own fingerprint.
    """
    return hashlib.sha256(repr(_machine()).encode()).hexdigest()[:16]


def _machine() -> tuple[str, str, int | None, int]:
    """Architecture, processor, number of cores, and GiB of memory; 0 where these are not known."""
    memory_gib = _known(lambda: round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30))
    return platform.machine(), _processor(), os.cpu_count(), memory_gib or 0


def _processor() -> str:
    """Its model as Linux names it, or else as Python does."""
    text = _known(lambda: Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")) or ""
    names = (line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, platform.processor())


@dataclass(frozen=True)
class MeasuringProcess:
    """A process that measured, and the machine as it found it."""

    begun_s: float
    """Seconds since 1970."""
    workload: str
    """Its name; empty where none was given."""
    machine: str
    """`machine_key` of the machine."""
    host_name: str
    versions: str
    """Of rlplace, PyTorch and Python."""
    idle_share: float | None = None
    """Of the processor's time, before anything was measured; None where unknown."""
    load: float | None = None
    """Processes that were running or waiting, averaged over a minute; likewise."""
    clock_hz: float | None = None
    """Of the first core, likewise."""

    @classmethod
    def now(cls, workload: str, host_name: str, versions: str) -> MeasuringProcess:
        """This process, on this machine as it is; takes a third of a second."""
        from rlplace.measure.timing.race import idle_share

        idle = idle_share(_GLANCE_S)
        return cls(
            time.time(),
            workload,
            machine_key(),
            host_name,
            versions,
            idle if math.isfinite(idle) else None,
            _known(lambda: os.getloadavg()[0]),
            _known(lambda: 1e3 * float(_CLOCK.read_text(encoding="ascii"))),
        )


@record(frozen=True)
class Outcome:
    """The outcome of a measurement, without how it was taken."""

    status: Status
    step_time_s: Positive | None = None
    """Median; None where it failed."""
    samples_s: Annotated[tuple[Positive, ...], Field(max_length=LARGEST_SAMPLES)] = ()
    peak_bytes: tuple[Count, ...] = ()
    why: str = ""
    reference_s: Seconds = 0.0
    """Median step time of the reference; 0 without one."""

    def __post_init__(self) -> None:
        refuse_if(
            (self.status == "ok") != (self.step_time_s is not None),
            "step_time_s",
            self.step_time_s,
            "seconds where the status is ok, and nowhere else",
        )

    @classmethod
    def of_measurement(cls, outcome: Measurement, **more: Any) -> Self:
        """The outcome as it is kept; `more` are the other fields of a record."""
        return cls(
            status=outcome.status,
            step_time_s=outcome.step_time_s if outcome.ok else None,
            samples_s=outcome.samples_s,
            peak_bytes=outcome.peak_bytes,
            why=outcome.why.encode("utf-8", "replace").decode("utf-8"),  # an error may quote a name that is no UTF-8
            reference_s=outcome.reference_s,
            **more,
        )

    @property
    def measurement(self) -> Measurement:
        """As it was measured."""
        step_s = math.inf if self.step_time_s is None else self.step_time_s
        return Measurement(self.status, step_s, self.samples_s, self.peak_bytes, self.why, self.reference_s)


@record(frozen=True, kw_only=True)
class StoredMeasurement(Outcome):
    """A measurement and how it was taken."""

    taken_s: Annotated[Number, Field(ge=0, lt=1e11)]
    """Seconds since 1970."""
    graph: Fingerprint
    host: Fingerprint
    plan: Fingerprint
    protocol: str
    versions: str
    reference: str
    """Fingerprint of the reference placement that was timed in turn with it; empty without one."""
    is_whole: bool
    """Whether it ended as the protocol says, not for want of time."""
    workload: str = ""
    host_name: str = ""
    machine: str = ""
    idle_share: Number | None = None
    load: Number | None = None
    clock_hz: Number | None = None

    @classmethod
    def of(cls, plan: Plan, outcome: Measurement, reference: str, *, is_whole: bool) -> StoredMeasurement:
        """A measurement as it is kept; columns of the session are left out.

        Raises:
            InvalidValue: the measurement has no key.
        """
        key = outcome.key
        if key is None or key.plan != plan.fingerprint:
            raise InvalidValue("key", key, "the key of the plan that was measured", where="store")
        how = {"taken_s": time.time(), "reference": reference, "is_whole": is_whole}
        return cls.of_measurement(outcome, **asdict(key), **how)

    @property
    def measurement(self) -> Measurement:
        """As it was measured, with its key."""
        key = MeasurementKey(self.graph, self.host, self.plan, self.protocol, self.versions)
        return replace(super().measurement, key=key)

    def to_dict(self) -> dict[str, object]:
        """The measurement as `rlplace measurements --json` prints it: the fields, `ratio` to the reference and
        `noise`."""
        outcome = self.measurement
        has_ratio = outcome.ok and self.reference_s > 0
        return {
            **asdict(self),
            "samples_s": list(self.samples_s),
            "peak_bytes": list(self.peak_bytes),
            "ratio": outcome.ratio if has_ratio else None,
            "noise": outcome.relative_error if outcome.ok and len(self.samples_s) > 2 else None,
        }


LISTS = ("samples_s", "peak_bytes")
"""Columns that hold a JSON list."""


def decode_measurement(row: Mapping[str, object], where: str) -> StoredMeasurement:
    """The measurement in a row of a database.

    Args:
        row: values by column.
        where: the file and the row, for messages.

    Raises:
        FileProblem, InvalidValue, UnknownName: a value that no measurement has; names the column.
    """
    values = {name: value for name, value in row.items() if name != "number"}
    for name in LISTS:
        text = values[name]
        if not isinstance(text, str):
            raise InvalidValue(name, described(text), "text", where=where)
        values[name] = parse_json(text, f"{where}: {name}")
    if values["is_whole"] in (0, 1):
        values["is_whole"] = bool(values["is_whole"])
    return read_record(StoredMeasurement, values, where)


def encode_array(array: NDArray[np.int32]) -> bytes:
    """As `decode_plan` reads it."""
    return zlib.compress(array.astype("<i4").tobytes(), 1)


def decode_plan(row: Mapping[str, object], where: str) -> Plan:
    """The plan in a row of a database, if it is the one that its fingerprint names.

    Raises:
        InvalidValue: an array that cannot be read, or that is too long, or another plan.
    """
    arrays = {
        name: np.frombuffer(unpacked(row[name], name, 2 * LARGEST_OPS, 4, where), dtype="<i4").astype(np.int32)
        for name in ARRAYS
    }
    refuse_if(
        len(arrays["devices"]) != row["num_ops"],
        "num_ops",
        described(row["num_ops"]),
        f"{len(arrays['devices'])}, one for each device",
        where=where,
    )
    plan = Plan(**arrays)
    refuse_if(
        plan.fingerprint != row["fingerprint"],
        "fingerprint",
        described(row["fingerprint"]),
        plan.fingerprint,
        where=where,
    )
    return plan


def encode_timeline(timeline: Timeline) -> bytes:
    """As `decode_timeline` reads it, in float64: starts and durations of ops and then of transfers, and `traced_op_s`.

    Of a step of thousands of ops some tens of kilobytes; its plan and the memory of devices are not in it.
    """
    starts_s = np.append(timeline.op_start_s, timeline.transfer_start_s)
    durations_s = np.append(timeline.op_end_s, timeline.transfer_end_s) - starts_s
    return zlib.compress(np.concatenate((starts_s, durations_s, [timeline.traced_op_s])).astype("<f8").tobytes(), 1)


def decode_timeline(value: object, plan: Plan, problem: Problem, where: str) -> Timeline:
    """The measured timeline of a step of a plan.

    Args:
        value: bytes of `encode_timeline`.
        plan: of the step, checked against the graph.
        problem: whose graph was placed.
        where: the file and the row, for messages.

    Raises:
        InvalidValue: bytes that cannot be read, or that are of another plan.
    """
    num_ops, count = len(plan.devices), len(plan.devices) + plan.num_transfers
    most = 2 * count + 1
    seconds = np.frombuffer(unpacked(value, "timeline", most, 8, where), dtype="<f8").astype(np.float64)
    refuse_if(
        len(seconds) != most,
        "timeline",
        f"{len(seconds)} numbers",
        f"{most}, two for each op and transfer and one more",
        where=where,
    )
    starts_s, ends_s = seconds[:count], seconds[:count] + seconds[count:-1]
    none = np.zeros(0, dtype=np.int32)
    return Timeline(
        op_device=plan.devices,
        op_start_s=starts_s[:num_ops],
        op_end_s=ends_s[:num_ops],
        transfer_tensor=plan.transfer_tensor,
        transfer_source=transfer_sources(problem.graph, problem.host, plan),
        transfer_destination=plan.transfer_destination,
        transfer_start_s=starts_s[num_ops:],
        transfer_end_s=ends_s[num_ops:],
        memory_time_s=np.zeros(0),
        memory_device=none,
        memory_bytes=none.astype(np.int64),
        source="measured",
        traced_op_s=float(seconds[-1]),
    )


def unpacked(value: object, name: str, most: int, width: int, where: str) -> bytes:
    """The bytes of at most so many numbers, each of `width` bytes."""
    if not isinstance(value, bytes):
        raise InvalidValue(name, described(value), "compressed bytes", where=where)
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(value, most * width)
    except zlib.error as error:
        raise InvalidValue(name, f"no compressed bytes ({error})", "those of an array", where=where) from error
    refuse_if(
        not unpacker.eof or unpacker.unconsumed_tail or unpacker.unused_data or len(raw) % width,
        name,
        "bytes that are cut off, or too many",
        f"at most {most} numbers",
        where=where,
    )
    return raw


def _known(fact: Callable[[], T]) -> T | None:
    """A fact of this machine; None where the system does not say it."""
    try:
        return fact()
    except (AttributeError, OSError, ValueError):
        return None


Format = Literal["csv", "json", "parquet"]
_ENDINGS: dict[str, Format] = {".csv": "csv", ".json": "json", ".parquet": "parquet"}


def as_csv(rows: Sequence[StoredMeasurement]) -> bytes:
    """A line for each measurement below one of names; samples and peaks as JSON lists, unknown values are empty."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        facts = row.to_dict()
        writer.writerow(facts | {name: json.dumps(facts[name]) for name in LISTS})
    return text.getvalue().encode("utf-8")


def as_json(rows: Sequence[StoredMeasurement]) -> bytes:
    """An object with `schema` and `measurements`."""
    told = {"schema": 1, "measurements": [row.to_dict() for row in rows]}
    return (json.dumps(jsonable(told), allow_nan=False) + "\n").encode("utf-8")


def as_parquet(rows: Sequence[StoredMeasurement]) -> bytes:
    """A Parquet file with the same columns; samples and peaks are lists.

    Raises:
        MissingExtra: pyarrow is not installed.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtra("pyarrow", "parquet") from error
    kinds = {
        **dict.fromkeys(COLUMNS, pyarrow.string()),
        **dict.fromkeys(NUMBERS, pyarrow.float64()),
        "samples_s": pyarrow.list_(pyarrow.float64()),
        "peak_bytes": pyarrow.list_(pyarrow.int64()),
        "is_whole": pyarrow.bool_(),
    }
    schema, sink = pyarrow.schema([(name, kinds[name]) for name in COLUMNS]), io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist([row.to_dict() for row in rows], schema=schema), sink)
    return sink.getvalue()


NUMBERS = ("taken_s", "step_time_s", "reference_s", "idle_share", "load", "clock_hz", "ratio", "noise")
COLUMNS = (
    *("taken_s", "graph", "host", "plan", "protocol", "versions", "reference", "status", "why", "step_time_s"),
    *("reference_s", "samples_s", "peak_bytes", "is_whole", "workload", "host_name", "machine", "idle_share", "load"),
    *("clock_hz", "ratio", "noise"),
)
FORMATS: Mapping[Format, Callable[[Sequence[StoredMeasurement]], bytes]] = {
    "csv": as_csv,
    "json": as_json,
    "parquet": as_parquet,
}


def format_of(word: str | None, out: Path | None) -> Format:
    """The format that is asked for, or that a file's name says; CSV where neither says anything.

    Raises:
        UnknownName: no such format.
        InvalidValue: Parquet without a file.
    """
    if word is None:
        word = "csv" if out is None else _ENDINGS.get(out.suffix.lower(), "csv")
    check_known("format", word, FORMATS)
    if word == "parquet" and out is None:
        raise InvalidValue("out", None, "a file for Parquet", where="measurements", hint="Give --out FILE.")
    return cast("Format", word)


def write_table(rows: Sequence[StoredMeasurement], path: Path, kind: Format) -> None:
    """Writes measurements in a format, whole or not at all.

    Raises:
        FileProblem: the file cannot be written, or is a folder.
        MissingExtra: as `as_parquet`.
    """
    if path.is_dir():
        raise FileProblem(path, "this is a folder, expected a file for the table: name another.")
    write_bytes_atomic(path, FORMATS[kind](rows))
