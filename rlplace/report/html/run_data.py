"""`RunData`: the data of a report in the session of a run; read strictly, since it may be a stranger's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlplace.errors import FileProblem
from rlplace.measure import Device
from rlplace.measure.explain.explanation import Explanation
from rlplace.measure.host_model import LearnedHost
from rlplace.measure.timing.verdict import SpeedVerdict
from rlplace.report.chrome_trace import Trace
from rlplace.session.session import Session
from rlplace.session.session_records import Ending, MethodResult, Row


@dataclass(frozen=True)
class RunData:
    """The data of a report.

    Attributes:
        config: the request; shown, never acted on.
        rows: of the final table.
        best: the method whose placement the run hands back; empty where there is none.
        ending: when and how the table was made.
        host: its name.
        devices: of the host, in order; gangs among them.
        num_ops: of the captured step; 0 where it is not known.
        num_micro_batches: that the step's batch is cut into.
        trace: a typical step of the best placement; None without one.
        searches: results of the methods that search, by name.
        learned: the learned host model; None where no method learned any.
        explanation: where the time of the step goes; None without one.
        files: names of the files of the run that a reader may open.
        verdict: whether the best placement is faster than one device and plain PyTorch; None where it was not judged.
    """

    config: Mapping[str, Any]
    rows: tuple[Row, ...]
    best: str
    ending: Ending
    host: str = ""
    devices: tuple[Device, ...] = ()
    num_ops: int = 0
    num_micro_batches: int = 1
    trace: Trace | None = None
    searches: Mapping[str, MethodResult] = field(default_factory=dict)
    learned: LearnedHost | None = None
    explanation: Explanation | None = None
    files: tuple[str, ...] = ()
    verdict: SpeedVerdict | None = None

    @classmethod
    def of(cls, session: Session, files: tuple[str, ...] = ()) -> RunData:
        """The data of a run.

        Raises:
            FileProblem: it stopped before its table, or something in its session cannot be read.
            InvalidValue, UnknownName: something in its session is malformed.
        """
        table, ending = session.table, session.ending
        if table is None or ending is None:
            why = "it stopped before its table, so there is nothing to report."
            raise FileProblem(session.path.parent, f"this run has no result: {why}")
        facts, host, trace, asked = session.facts, session.host, session.timeline, dict[str, Any]()
        if session.has("request"):
            asked = {name: value for name, value in dataclasses.asdict(session.request).items() if name != "asked"}
            asked |= {"micro_batches": session.micro_batches, "train": session.plain("config")}
        return cls(
            asked,
            table.rows,
            table.best,
            ending,
            host.name,
            host.devices,
            facts.num_ops,
            facts.num_micro_batches,
            None if trace is None else Trace.of(trace, f"{session.path}: timeline"),
            session.results(),
            session.learned,
            session.explanation,
            files,
            table.verdict,
        )

    @property
    def kind(self) -> str:
        """The kind of step times: `measured` or `simulated`."""
        return "measured" if self.ending.is_measured else "simulated"

    @property
    def workload(self) -> str:
        """As it was named."""
        return str(self.config.get("workload", "a step"))

    def row(self, method: str) -> Row | None:
        """The row of `method`; None where there is none."""
        return next((row for row in self.rows if row.method == method), None)

    def step_s(self, method: str) -> float | None:
        """The step time of `method`'s row; None where it has none."""
        return next((row.step_s for row in self.rows if row.method == method), None)

    @property
    def best_row(self) -> Row | None:
        """The row of the placement that is handed back."""
        return self.row(self.best) if self.best else None
