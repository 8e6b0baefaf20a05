"""The records of a session: the request, the problem without its arrays, the final table, and the end of a run.

`MethodResult`: the result of one method of a run, so far or in the end, and how a session keeps it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, SkipValidation

from rlplace.errors import InvalidValue, refuse_if
from rlplace.measure import Measurement, Plan, Problem
from rlplace.measure.costs.costs import CostSource
from rlplace.measure.placement import PlacedSplit, check_plan
from rlplace.measure.timing.verdict import SpeedVerdict
from rlplace.records import Count, Number, NumberOrNan, Seconds, Seed, Whole, readable, record
from rlplace.say import format_seconds
from rlplace.search.task import BestSoFar, Failure, Saveable
from rlplace.session.setup import WHOLE, CutOptions
from rlplace.store.rows import ARRAYS
from rlplace.workloads import Size


@record(frozen=True)
class Request:
    """The request in the user's words, without the search options (the fact `config`)."""

    workload: str
    host: str
    """The HOST word."""
    host_fingerprint: str
    default_size: Size
    """Of a workload that is named without a size."""
    gangs: bool = False
    """Whether the host has devices of several cores."""
    asked: CutOptions = WHOLE
    """How the batch is to be cut."""
    workload_seed: Seed = 0
    """Of the workload's weights and inputs."""
    placed_again: str = ""
    """The run on another host that costs and placement were carried over from; empty without one."""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    """Of rlplace, Python and PyTorch."""


@record(frozen=True)
class Verdict:
    """How micro-batches make the loss of the batch."""

    kind: Literal["separate", "joined", "accumulated"]
    is_checked: bool
    why: str


@record(frozen=True)
class ProblemFacts:
    """A run's problem, without its host and its arrays."""

    graph_fingerprint: str
    num_edges: Count
    num_micro_batches: Annotated[Whole, Field(ge=1, le=1024)]
    verdict: Verdict | None
    op_order: Literal["rank", "tilt", "backward-first"]
    cost_source: CostSource
    rule: str
    dropped: tuple[str, ...]
    evaluations: Count
    """Placements simulated to choose how the batch is cut."""
    names: tuple[str, ...]
    """Of ops, in the order of the graph."""
    modules: tuple[str, ...]
    split: PlacedSplit | None = None
    """How ops were split into shards; None for whole ones."""
    whole_s: Seconds | None = None
    """Where the split was chosen, the shortest step that was simulated without one."""

    def __post_init__(self) -> None:
        refuse_if(
            len(self.modules) != len(self.names), "modules", len(self.modules), f"{len(self.names)}, one for each op"
        )

    @property
    def num_ops(self) -> int:
        """Of the step."""
        return len(self.names)


@record(frozen=True)
class Row:
    """A row of the final table."""

    method: str
    placement: bool = True
    """False for plain PyTorch, which is no placement."""
    placements: Count = 0
    """Placements that the method tried."""
    status: Literal["ok", "oom", "error", "timeout", "lost", "skipped"] = "ok"
    history: tuple[tuple[Number, ...], ...] = ()
    """`[evaluations, measured, seconds, step_time_s]` for each improvement."""
    step_time_s: Seconds | None = None
    spread_s: Seconds | None = None
    measured: Count | None = None
    samples: Count | None = None
    why: str | None = None
    traceback: str | None = None
    one_thread_s: Seconds | None = None

    @property
    def step_s(self) -> float | None:
        """The step time; None where it failed or was not timed."""
        return self.step_time_s or None if self.status == "ok" else None

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Row:
        """From a row as `--json` prints it."""
        return cls(**{**row, "history": tuple(tuple(best) for best in row["history"])})

    def to_dict(self) -> dict[str, Any]:
        """The row as `--json` prints it."""
        optional = ("measured", "samples", "why", "traceback", "one_thread_s")
        row = dataclasses.asdict(self) | {"history": [list(best) for best in self.history]}
        return {name: value for name, value in row.items() if name not in optional or value is not None}


@record(frozen=True)
class FinalTable:
    """The final table: rows, the method whose placement is the best, the plans by method (fingerprints), and whether
    that placement is faster than one device and plain PyTorch."""

    rows: tuple[Row, ...]
    best: str
    plans: dict[str, str]
    verdict: SpeedVerdict | None = None

    def __post_init__(self) -> None:
        refuse_if(
            self.best and self.best not in (row.method for row in self.rows), "best", self.best, "the method of a row"
        )


@record(frozen=True)
class Ending:
    """When and how the table was made, and how long the parts of the run were expected to take and took."""

    is_measured: bool
    time_s: Seconds
    """Since 1970."""
    expected: dict[str, Seconds]
    taken: dict[str, Seconds]


_APART = Field(exclude=True)
"""Of fields that are kept apart from the record: arrays, and races."""

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Race:
    """Plans that were measured in turn, and the outcome of each.

    Attributes:
        plans: the plans that ran.
        outcomes: of each.
        is_final: whether it was the last race, which decides and from which no method learns.
    """

    plans: tuple[Plan, ...]
    outcomes: tuple[Measurement, ...]
    is_final: bool = False


@dataclass(frozen=True, eq=False)
class Unmeasured:
    """Simulated placements that a search would have measured next.

    Attributes:
        devices: (C, N) int32.
        simulated_s: (C,) float64.
    """

    devices: NDArray[np.int32]
    simulated_s: NDArray[np.float64]


@readable
@dataclass(frozen=True, eq=False)
class MethodResult:
    """The result of a method within its budget, so far or in the end.

    Attributes:
        plan: the best placement; None before the first.
        num_scored: placements simulated.
        num_measured: placements run, each as often as it was, without the last race.
        seconds: wall time spent.
        single_s: step time on the best single device, the reference of the step times in `history`.
        history: the best step time so far wherever it improved: measured, or simulated where nothing is measured.
        learning: the figures of every update of its learner, by name.
        tried: simulated and measured seconds of every placement that ran, in order; a drift of the machine is taken
            out by the reference of their race.
        failure: the error that the method raised; the other fields are then its results until that.
        why: the reason for having no plan.
        learned: the learned policy or host model, if the method learns.
        budget: seconds, or placements, that it was given.
        is_searched: whether the method itself has ended, so that only measuring is left.
        is_done: whether everything of it has ended.
        races: its measurements, in order.
        start: (N,) int32, the placement that simulates best; None before the first.
        unmeasured: the placements to measure next; None where nothing is measured.
    """

    plan: Annotated[SkipValidation[Plan | None], _APART] = None
    num_scored: Count = 0
    num_measured: Count = 0
    seconds: Seconds = 0.0
    single_s: NumberOrNan = math.nan
    history: tuple[BestSoFar, ...] = ()
    learning: tuple[dict[str, NumberOrNan], ...] = ()
    tried: tuple[tuple[Number, Number], ...] = ()
    failure: Failure | None = None
    why: str = ""
    learned: Annotated[SkipValidation[Saveable | None], _APART] = None
    budget: Seconds = 0.0
    is_searched: bool = False
    is_done: bool = False
    races: Annotated[SkipValidation[tuple[Race, ...]], _APART] = ()
    start: Annotated[SkipValidation[NDArray[np.int32] | None], _APART] = None
    unmeasured: Annotated[SkipValidation[Unmeasured | None], _APART] = None

    def __repr__(self) -> str:
        """In one line: that of a dataclass would print every array."""
        best = f"{self.best_s * 1e3:.4g} ms a step, " if self.history else ""
        return f"MethodResult({best}{self.num_scored:,} placements simulated, {self.num_measured} measured)"

    @property
    def best_s(self) -> float:
        """The best step time so far; infinite before the first."""
        return self.history[-1].best_s if self.history else math.inf

    @property
    def tracing(self) -> str:
        """As `tracing_words`."""
        return tracing_words(outcome for race in self.races for outcome in race.outcomes)

    @property
    def best_ratio(self) -> float:
        """The step time of `plan` over the reference's, as in the race that decided, else as of the best so far."""
        if self.is_done and self.plan is not None and self.races and self.races[-1].is_final:
            last, name = self.races[-1], self.plan.fingerprint
            for plan, outcome in zip(last.plans, last.outcomes, strict=True):
                if outcome.ok and plan.fingerprint == name:
                    return outcome.ratio
        return ratio_of(self.best_s, self.single_s)


def tracing_words(outcomes: Iterable[Measurement]) -> str:
    """What traced steps took, each with the step before it, and their share of all measured ones; empty without."""
    ran = [outcome for outcome in outcomes if outcome.ok]
    timed_s = sum((1 + len(outcome.samples_s)) * outcome.step_time_s for outcome in ran)
    traced_s = sum(2 * outcome.timeline.step_s for outcome in ran if outcome.timeline is not None)
    share = traced_s / max(timed_s + traced_s, 1e-9)
    return f"traced steps took {format_seconds(traced_s)}, {share:.0%} of measuring" if traced_s else ""


def ratio_of(step_time_s: float, single_s: float) -> float:
    """A step time over that of the best single device, the reference, in the same race.

    A machine slows down and speeds up, so seconds of different races do not compare, but ratios do. Without a reference
    (on a simulated host, where no single device holds the step) it is the step time itself: nothing drifts there.
    """
    return step_time_s / single_s if 0.0 < single_s < math.inf else step_time_s


def arrays_of(result: MethodResult) -> dict[str, NDArray[Any]]:
    """The arrays of a method's result; devices in a byte each, if they are few enough."""
    arrays: dict[str, NDArray[Any]] = {}
    if result.plan is not None:
        arrays |= {f"plan.{part}": getattr(result.plan, part) for part in ARRAYS}
    if result.start is not None:
        arrays["start"] = _narrow(result.start)
    if result.unmeasured is not None:
        arrays |= {"candidates": _narrow(result.unmeasured.devices), "simulated_s": result.unmeasured.simulated_s}
    return arrays


def _narrow(devices: NDArray[np.int32]) -> NDArray[Any]:
    return devices.astype(np.min_scalar_type(int(devices.max(initial=0))))


def with_arrays(
    result: MethodResult, arrays: Arrays, races: Sequence[Race], problem: Problem, where: str
) -> MethodResult:
    """The result with its arrays and races, if they fit the problem: plans of a stranger's file go into compiled code
    that checks nothing.

    Raises:
        InvalidValue: an array is missing, malformed, or does not fit.
    """
    found = dict[str, Any]()
    if "start" in arrays:
        found["start"] = problem.check_placement(arrays["start"])
    if "candidates" in arrays:
        devices = problem.check_placement(np.atleast_2d(arrays["candidates"]))
        found["unmeasured"] = Unmeasured(
            devices, array_of(arrays, "simulated_s", np.float64, devices.shape[:-1], where)
        )
    if "plan.devices" in arrays:
        parts = {part: array_of(arrays, f"plan.{part}", np.int32, None, where) for part in ARRAYS}
        found["plan"] = checked_plan(problem, Plan(**parts), where)
    return replace(result, races=tuple(races), **found)


def checked_plan(problem: Problem, plan: Plan, where: str) -> Plan:
    """The plan, if it can be run.

    Raises:
        InvalidValue: it cannot.
    """
    refuse_if(
        len(plan.transfer_tensor) != len(plan.transfer_destination),
        "transfer_destination",
        len(plan.transfer_destination),
        "one a transfer",
        where=where,
    )
    check_plan(problem.graph, problem.host.num_devices, plan, where=where)
    problem.check_placement(plan.devices)
    return plan


def array_of(
    arrays: Arrays, name: str, kind: type[np.generic], shape: tuple[int, ...] | None, where: str
) -> NDArray[Any]:
    """A copy of the array of this name, if it is of this kind and shape.

    Args:
        arrays: by name.
        name: of the array.
        kind: of its entries.
        shape: of it; None for one dimension of any length.
        where: the file and the record, for messages.

    Raises:
        InvalidValue: it is missing, or another.
    """
    array = arrays.get(name)
    if array is None or array.dtype != kind or array.shape != ((array.size,) if shape is None else shape):
        raise InvalidValue(
            name,
            "missing" if array is None else f"{array.dtype} of shape {array.shape}",
            f"{np.dtype(kind).name} of shape {shape or 'any length'}",
            where=where,
        )
    return array.copy()
