"""`RunData`: what the files of a run folder hold, each field checked: a run folder may come from a stranger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from rlplace.decode import decode_record
from rlplace.errors import InvalidValue
from rlplace.measure.explain.explanation import Explanation
from rlplace.records import described
from rlplace.report.chrome_trace import Trace

T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """A row of the table in `result.json`."""

    method: str
    placement: bool = True
    """False for what is no placement: plain PyTorch."""
    step_time_s: float | None = None
    spread_s: float | None = None
    placements: int = 0
    """How many the method tried."""
    measured: int = 0
    """How many of them it ran."""
    samples: int = 0
    status: str = "ok"
    why: str = ""
    history: tuple[tuple[float, ...], ...] = ()
    """`[evaluations, measured, seconds, step_time_s]` for each improvement."""

    @property
    def step_s(self) -> float | None:
        """The step time; None where it failed or was not timed."""
        return self.step_time_s if self.status == "ok" and self.step_time_s and self.step_time_s > 0 else None


@dataclass(frozen=True)
class DeviceFacts:
    """What the report says of a device in `problem.json`."""

    name: str
    kind: str = ""
    backend: str = ""
    memory_bytes: int = 0
    memory_pool: str = ""
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class Search:
    """What a method tried, as `search.json` keeps it."""

    placements: int = 0
    measured: int = 0
    seconds: float = 0.0
    single_s: float | None = None
    """Step time on the best single device, in the last race of the search."""
    history: tuple[tuple[float, ...], ...] = ()
    tried: tuple[tuple[float, ...], ...] = ()
    """Simulated and measured seconds of each placement that ran."""


@dataclass(frozen=True)
class Seconds:
    """How long each part of the run was expected to take and took, by name, in seconds."""

    expected: dict[str, float] = field(default_factory=dict)
    taken: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Factor:
    """One factor of `host_model.json`."""

    kind: str
    name: str
    log_mean: float
    log_deviation: float
    prior_deviation: float = 0.0


@dataclass(frozen=True)
class RunData:
    """What a report is made of.

    Attributes:
        config: as it was asked, resolved; shown, never acted on.
        rows: of the final table.
        best: the method whose placement the run hands back; empty where there is none.
        is_measured: whether step times come from running.
        time_s: when the table was finished, seconds since 1970; None where it is not known.
        host: its name.
        devices: of the host, in order; gangs among them.
        num_ops: of the captured step; 0 where it is not known.
        num_micro_batches: that the step's batch is cut into.
        trace: a typical step of the best placement; None without one.
        searches: by method; empty where the run kept none.
        host_lines: what was learned about the host, in words; None where no method learned any.
        factors: the same as figures.
        explanation: where the time of the step goes; None without one.
        durations: of the parts of the run.
        files: names of the files of the run that a reader may open.
    """

    config: Mapping[str, Any]
    rows: tuple[Row, ...]
    best: str = ""
    is_measured: bool = False
    time_s: float | None = None
    host: str = ""
    devices: tuple[DeviceFacts, ...] = ()
    num_ops: int = 0
    num_micro_batches: int = 1
    trace: Trace | None = None
    searches: Mapping[str, Search] = field(default_factory=dict)
    host_lines: tuple[str, ...] | None = None
    factors: tuple[Factor, ...] = ()
    explanation: Explanation | None = None
    durations: Seconds = field(default_factory=Seconds)
    files: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """What step times are: `measured` or `simulated`."""
        return "measured" if self.is_measured else "simulated"

    @property
    def workload(self) -> str:
        """As it was named."""
        return str(self.config.get("workload", "a step"))

    def row(self, method: str) -> Row | None:
        """The row of `method`; None where there is none."""
        return next((row for row in self.rows if row.method == method), None)

    def step_s(self, method: str) -> float | None:
        """The step time of `method`'s row; None where it has none."""
        row = self.row(method)
        return None if row is None else row.step_s

    @property
    def best_row(self) -> Row | None:
        """The row of the placement that is handed back."""
        return self.row(self.best) if self.best else None


def decode_run(
    config: Mapping[str, Any],
    result: Mapping[str, Any],
    *,
    problem: Mapping[str, Any] | None = None,
    trace: Mapping[str, Any] | None = None,
    search: Mapping[str, Any] | None = None,
    host_model: Mapping[str, Any] | None = None,
    explanation: Explanation | None = None,
    files: tuple[str, ...] = (),
) -> RunData:
    """The data of a report, from the JSON objects of a run's files; None for a file that is missing.

    Fields that a report has no use for are left aside.

    Raises:
        InvalidValue: a field of the wrong type; says of which file.
        UnknownName: a choice that does not exist.
    """
    where = "result.json"
    best = _mapping(result.get("best") or {}, where, "best")
    head = part_of(_Head, result, where)
    graph = _mapping((problem or {}).get("graph") or {}, "problem.json", "graph")
    host = _mapping((problem or {}).get("host") or {}, "problem.json", "host")
    facts = part_of(_GraphFacts, graph, "problem.json")
    learned = None if host_model is None else part_of(_Learned, host_model, "host_model.json")
    methods = _mapping((search or {}).get("methods") or {}, "search.json", "methods")
    return RunData(
        config=config,
        rows=_list_of(Row, result.get("rows"), where, "rows"),
        best=part_of(_Best, best, where).method,
        is_measured=head.measured,
        time_s=head.time,
        host=part_of(_HostFacts, host, "problem.json").name,
        devices=_list_of(DeviceFacts, host.get("devices"), "problem.json", "host.devices"),
        num_ops=facts.num_ops,
        num_micro_batches=facts.num_micro_batches,
        trace=None if trace is None else Trace.of(trace, "timeline.json"),
        searches={
            str(name): part_of(Search, _mapping(one, "search.json", str(name)), "search.json")
            for name, one in methods.items()
        },
        host_lines=None if learned is None else learned.lines,
        factors=_list_of(Factor, (host_model or {}).get("factors"), "host_model.json", "factors"),
        explanation=explanation,
        durations=part_of(Seconds, _mapping(result.get("durations") or {}, where, "durations"), where),
        files=files,
    )


def part_of(record: type[T], data: Mapping[str, Any], where: str) -> T:
    """A `record` of those fields of `data` that it has; JSON's null is a field that was left out.

    Raises:
        InvalidValue: a value of the wrong type.
    """
    known = {one.name for one in fields(record)}  # type: ignore[arg-type]
    return decode_record(record, {key: data[key] for key in known if data.get(key) is not None}, where)


@dataclass(frozen=True)
class _Head:
    measured: bool = False
    time: float | None = None


@dataclass(frozen=True)
class _Best:
    method: str = ""


@dataclass(frozen=True)
class _GraphFacts:
    num_ops: int = 0
    num_micro_batches: int = 1


@dataclass(frozen=True)
class _HostFacts:
    name: str = ""


@dataclass(frozen=True)
class _Learned:
    lines: tuple[str, ...] = ()


def _list_of(record: type[T], data: object, where: str, at: str) -> tuple[T, ...]:
    if data is None:
        return ()
    if not isinstance(data, list):
        raise InvalidValue(at, described(data), "a list", where=where)
    return tuple(part_of(record, _mapping(item, where, f"{at}[{index}]"), where) for index, item in enumerate(data))


def _mapping(data: object, where: str, at: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise InvalidValue(at, described(data), "an object", where=where)
    return data
