"""What `progress.safetensors` of a run folder holds: plain records as JSON, and the arrays that they speak of."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from rlplace.decode import decode_list, decode_record
from rlplace.errors import FileProblem, InvalidValue
from rlplace.files import jsonable, parse_json
from rlplace.measure.host_model.learned_host import LearnedHost
from rlplace.measure.measurement import Measurement, Status
from rlplace.records import described
from rlplace.search.task import Failure

SCHEMA = 1
RECORDS = "records"
"""The tensor that holds the JSON, as bytes: one file is written whole or not at all, two are not."""
KNOWN_HOSTS = "known_hosts"
"""The tensor that holds what was known of the host when the run began."""
LARGEST_BYTES = 1 << 30

Arrays = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True)
class KeptOutcome:
    """A measurement, without its key."""

    status: Status
    step_time_s: float | None = None
    samples_s: tuple[float, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    why: str = ""
    reference_s: float = 0.0

    def __post_init__(self) -> None:
        if (self.status == "ok") != (self.step_time_s is not None):
            raise InvalidValue("step_time_s", self.step_time_s, "seconds where the status is ok, and nowhere else")
        for name, value in (("step_time_s", self.step_time_s), *(("samples_s", one) for one in self.samples_s)):
            if value is not None and not 0 < value < math.inf:
                raise InvalidValue(name, value, "finite seconds > 0")
        if not 0 <= self.reference_s < math.inf:
            raise InvalidValue("reference_s", self.reference_s, "finite seconds >= 0")

    @classmethod
    def of(cls, outcome: Measurement) -> KeptOutcome:
        """The record of a measurement."""
        step_s = outcome.step_time_s if outcome.ok else None
        return cls(outcome.status, step_s, outcome.samples_s, outcome.peak_bytes, outcome.why, outcome.reference_s)

    @property
    def measurement(self) -> Measurement:
        """As it was measured."""
        step_s = math.inf if self.step_time_s is None else self.step_time_s
        return Measurement(self.status, step_s, self.samples_s, self.peak_bytes, self.why, self.reference_s)


@dataclass(frozen=True)
class KeptRace:
    """Plans that were measured in turn, by fingerprint; the plans themselves are in the run's store."""

    plans: tuple[str, ...]
    outcomes: tuple[KeptOutcome, ...]
    is_final: bool = False

    def __post_init__(self) -> None:
        if len(self.plans) != len(self.outcomes):
            raise InvalidValue("number of outcomes", len(self.outcomes), f"{len(self.plans)}, one for each plan")


@dataclass(frozen=True)
class KeptMethod:
    """A `MethodState`, without its arrays."""

    budget: float
    seconds: float
    num_scored: int
    num_measured: int
    single_s: float | None
    history: tuple[tuple[float, ...], ...]
    learning: tuple[dict[str, float | None], ...]
    tried: tuple[tuple[float, ...], ...]
    races: tuple[KeptRace, ...]
    is_searched: bool
    is_done: bool
    failure: Failure | None = None

    def __post_init__(self) -> None:
        for name in ("budget", "seconds", "num_scored", "num_measured"):
            if not getattr(self, name) >= 0:
                raise InvalidValue(name, getattr(self, name), "at least 0")
        for name, width in (("history", 4), ("tried", 2)):
            for row in getattr(self, name):
                if len(row) != width:
                    raise InvalidValue(name, f"a row of {len(row)} numbers", f"rows of {width}")


@dataclass(frozen=True)
class KeptRow:
    """A row of the final table."""

    method: str
    placement: bool
    placements: int
    status: str
    history: tuple[tuple[float, ...], ...] = ()
    step_time_s: float | None = None
    spread_s: float | None = None
    measured: int | None = None
    samples: int | None = None
    why: str | None = None
    traceback: str | None = None
    one_thread_s: float | None = None

    def to_dict(self) -> dict[str, object]:
        """The row as `result.json` has it."""
        optional = ("measured", "samples", "why", "traceback", "one_thread_s")
        row = {name: value for name, value in asdict(self).items() if name not in optional or value is not None}
        return row | {"history": [list(best) for best in self.history]}


@dataclass(frozen=True)
class KeptTable:
    """The final table, and the plans that it is of."""

    plans: dict[str, str]
    """Fingerprints by method."""
    rows: tuple[KeptRow, ...]
    best: str

    def __post_init__(self) -> None:
        if self.best not in (row.method for row in self.rows):
            raise InvalidValue("best", self.best, "the method of a row")


@dataclass(frozen=True)
class KeptProgress:
    """How far a run has come."""

    problem: str
    """Fingerprint of the problem and of what was to be done with it."""
    schema: int = SCHEMA
    is_finished: bool = False
    calibration: KeptRace | None = None
    """What was measured to calibrate the simulator."""
    methods: dict[str, KeptMethod] = field(default_factory=dict)
    table: KeptTable | None = None

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise InvalidValue("schema", self.schema, str(SCHEMA))


def encode(progress: KeptProgress, arrays: Arrays) -> bytes:
    """The bytes of a file that `decode` reads."""
    text = json.dumps(jsonable(asdict(progress)), allow_nan=False, separators=(",", ":"))
    records = np.frombuffer(text.encode("utf-8"), dtype=np.uint8)
    return save({RECORDS: records, **{name: np.ascontiguousarray(array) for name, array in arrays.items()}})


def decode(data: bytes, where: str) -> tuple[KeptProgress, dict[str, NDArray[np.generic]]]:
    """What `encode` was given; runs no code.

    Raises:
        FileProblem: it is no such file.
        InvalidValue, UnknownName: a record in it is malformed; names the field.
    """
    try:
        arrays: dict[str, NDArray[np.generic]] = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise FileProblem(where, f"not the progress of a run: {error}.") from error
    records = arrays.pop(RECORDS, None)
    if records is None:
        raise FileProblem(where, f"not the progress of a run: it has no {RECORDS}.")
    return decode_record(KeptProgress, parse_json(_text(records, where), where), where), arrays


def _text(data: NDArray[np.generic], where: str) -> str:
    if data.dtype != np.uint8 or data.ndim != 1:
        raise FileProblem(where, "not the progress of a run: its records are no text.")
    try:
        return data.tobytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileProblem(where, f"not the progress of a run: its records are no text ({error.reason}).") from error


def encode_hosts(known: Sequence[LearnedHost]) -> NDArray[np.uint8]:
    """What was learned about hosts as bytes, made once: with many of them they are most of a file."""
    text = json.dumps(jsonable([asdict(learned) for learned in known]), allow_nan=False, separators=(",", ":"))
    return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)


def decode_hosts(data: NDArray[np.generic], where: str) -> tuple[LearnedHost, ...]:
    """What `encode_hosts` was given.

    Raises:
        FileProblem: it is no such text.
        InvalidValue, UnknownName: a record in it is malformed; names the field.
    """
    return decode_list(LearnedHost, parse_json(_text(data, where), where), where, KNOWN_HOSTS)


def whole_numbers(arrays: Arrays, name: str, bound: int, where: str) -> NDArray[np.int32]:
    """The array of this name as int32, its entries in 0..bound - 1.

    Raises:
        InvalidValue: it is missing, holds other numbers, or is out of range.
    """
    found = arrays.get(name)
    if found is None or not np.issubdtype(found.dtype, np.integer):
        raise InvalidValue(name, described(None) if found is None else str(found.dtype), "integers", where=where)
    numbers = found.astype(np.int64)
    if numbers.size and (numbers.min() < 0 or numbers.max() >= bound):
        wrong = int(numbers.min()) if numbers.min() < 0 else int(numbers.max())
        raise InvalidValue(name, wrong, f"0..{bound - 1}", where=where)
    return numbers.astype(np.int32)
