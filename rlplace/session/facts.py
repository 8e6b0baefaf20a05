"""The records of a session: what was asked, the problem without its arrays, the final table, and the end of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from rlplace.errors import InvalidValue
from rlplace.measure.costs.costs import CostSource
from rlplace.records import Count, Number, Seconds, Seed, Whole, record
from rlplace.session.cut import WHOLE, CutOptions
from rlplace.workloads import Size


@record(frozen=True)
class Request:
    """What was asked for, in the words of the user, but for how to search (the fact `config`)."""

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

    @property
    def num_ops(self) -> int:
        """Of the step."""
        return len(self.names)


@record(frozen=True)
class Row:
    """A row of the final table."""

    method: str
    placement: bool = True
    """False for what is no placement: plain PyTorch."""
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
    """The final table: rows, the method whose placement is the best, and the plans by method (fingerprints)."""

    rows: tuple[Row, ...]
    best: str
    plans: dict[str, str]

    def __post_init__(self) -> None:
        if self.best and self.best not in (row.method for row in self.rows):
            raise InvalidValue("best", self.best, "the method of a row")


@record(frozen=True)
class Ending:
    """When and how the table was made, and how long the parts of the run were expected to take and took."""

    is_measured: bool
    time_s: Seconds
    """Since 1970."""
    expected: dict[str, Seconds]
    taken: dict[str, Seconds]
