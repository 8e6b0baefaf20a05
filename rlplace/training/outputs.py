"""What a run leaves behind: `TrainResult` in Python, the best placement so far, and the files of its folder.

Files are written from the session, for people and other tools; no command reads one as state.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster import Cluster
from rlplace.errors import RunnerError
from rlplace.files import jsonable, write_bytes_atomic, write_text_atomic
from rlplace.format import format_seconds
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.explain.explanation import save_explanation
from rlplace.measure.host_model.learned_host import FILE as HOST_MODEL
from rlplace.measure.placement import Placement, save_placement
from rlplace.measure.plan import Plan, Timeline
from rlplace.measure.problem import Problem
from rlplace.report import Curve, save_best_so_far_png, save_timeline_png
from rlplace.report.chrome_trace import chrome_trace
from rlplace.report.console import Progress
from rlplace.search.task import Saveable
from rlplace.session.explained import explain_run
from rlplace.session.facts import Ending, FinalTable, MethodResult, Row, ratio_of
from rlplace.session.folder import RunFolder
from rlplace.session.session import Session
from rlplace.store.log import StoreLog
from rlplace.training.agent.agent import Agent
from rlplace.training.config import TrainConfig
from rlplace.training.forecast import Durations
from rlplace.training.table import Table
from rlplace.training.tracking import NoTracker, Tracker

WEIGHTS = ("policy.safetensors", "policy.json")
"""What a policy is saved as."""


@dataclass
class TrainingRun:
    """What the phases of a run share.

    Attributes:
        session: its state.
        folder: where its outputs go; None for a run without one.
        problem: as profiled or estimated, or under the fitted host model.
        config: how it searches, with what its limit of time leaves.
        progress: told how it goes.
        tracker: told figures.
        start: (N,) a placement that methods may start from.
        is_resumed: whether it goes on from what the session holds.
        log: keeps what is measured; None where nothing is.
        cluster: whose machines measure or search; None for this one.
        weights: of the policy to begin with, where the session brings them.
    """

    session: Session
    folder: RunFolder | None
    problem: Problem
    config: TrainConfig
    progress: Progress
    tracker: Tracker
    start: NDArray[np.int32] | None = None
    is_resumed: bool = False
    log: StoreLog | None = None
    cluster: Cluster | None = None
    weights: Path | None = None

    def keep_placement(self, plan: Plan, method: str) -> None:
        """Keeps the best placement so far, and writes it as `placement.json`."""
        placement = Placement.of(self.problem, plan, method)
        self.session.keep_placement(placement)
        if self.folder is not None:
            save_placement(placement, self.folder.path("placement.json"))


@dataclass(frozen=True)
class TrainResult:
    """What a run found.

    Attributes:
        placement: of the best method, as it was measured.
        table: all methods, measured in one race (simulated on a simulated host).
        timeline: a typical step of the placement.
        is_measured: whether the step times come from running.
        durations: how long the parts of the run took.
        expected: how long they were expected to take.
    """

    placement: Placement
    table: Table
    timeline: Timeline
    is_measured: bool
    durations: Durations = field(default_factory=Durations)
    expected: Durations = field(default_factory=Durations)

    def __repr__(self) -> str:
        """In one line: that of a dataclass would print every op of the placement and the timeline."""
        how = "measured" if self.is_measured else "simulated"
        return f"TrainResult(best {self.table.best!r}, {format_seconds(self.step_time_s)} a step, {how})"

    @property
    def summary(self) -> str:
        """The best step beside those of one device and of plain PyTorch, in a line."""
        return self.table.summary if self.is_measured else f"{self.table.summary} (all simulated)"

    @property
    def step_time_s(self) -> float:
        """Median step time of the placement."""
        return float(self.table.row(self.table.best)["step_time_s"])


class Leader:
    """The best placement so far over all searches: Ctrl-C loses nothing, and a tracker is shown each new one.

    Searches measure in different races, while the machine slows down and speeds up: their best placements compare by
    the ratios to the reference, the best single device in the same race, and never by seconds.

    Args:
        run: keeps the placement.
        evaluator: traces what the tracker is shown.
        reference: the best single device.
        single_s: its step time.
    """

    def __init__(self, run: TrainingRun, evaluator: Evaluator, reference: Plan, single_s: float) -> None:
        self._run, self._evaluator, self._kept = run, evaluator, ""
        self._bests = {"single": (reference, ratio_of(single_s, single_s)), **run.session.bests()}
        self._keep()

    def of(self, method: str) -> Callable[[Plan, float, float], None]:
        """What `method` calls with its best plan, whenever that is another: the step time, and the ratio."""

        def keep(plan: Plan, step_time_s: float, ratio: float) -> None:
            self._bests[method] = plan, ratio
            is_new, folder, tracker = self._keep() == method, self._run.folder, self._run.tracker
            if folder is None or not is_new or isinstance(tracker, NoTracker):
                return
            problem = self._evaluator.problem
            path, timeline = folder.path("timeline.png"), timeline_of(self._evaluator, plan, self._run.progress.say)
            title = title_of(method, timeline, step_time_s)
            save_timeline_png(path, timeline, problem.graph, problem.host, title)
            tracker.log_best(step_time_s=step_time_s, placement=folder.path("placement.json"), timeline_png=path)

        return keep

    def _keep(self) -> str:
        """Keeps the placement with the least ratio, where it is another; the method that found it, else nothing."""
        method = min(self._bests, key=lambda name: self._bests[name][1])
        plan, _ = self._bests[method]
        if self._kept == plan.fingerprint:
            return ""
        self._kept = plan.fingerprint
        self._run.keep_placement(plan, method)
        return method

    def keep_learned(self, learned: Saveable) -> None:
        """Keeps what a method has learned: about the host, or its policy."""
        folder = self._run.folder
        if isinstance(learned, Agent):
            if folder is not None:
                learned.save(folder.path(HOST_MODEL))
            return
        with tempfile.TemporaryDirectory() as name:
            learned.save(Path(name) / WEIGHTS[0])
            files = {file: (Path(name) / file).read_bytes() for file in WEIGHTS if (Path(name) / file).exists()}
        self._run.session.keep_files(files)
        if folder is not None:
            for file, data in files.items():
                write_bytes_atomic(folder.path(file), data)


def timeline_of(evaluator: Evaluator, plan: Plan, say: Callable[[str], None], *, is_hurried: bool = False) -> Timeline:
    """A typical step of a plan; simulated, which is said, where tracing one broke it: it has run without before."""
    try:
        return evaluator.timeline(plan, is_hurried=is_hurried)
    except RunnerError as error:
        say(f"a step could not be traced, so its timeline is simulated: {error}")
        return evaluator.simulator.timeline(plan)


def keep_table(session: Session, table: Table) -> None:
    """Keeps the final table: a measured run that goes on does not measure it again."""
    plans = {method: plan.fingerprint for method, plan in table.plans.items()}
    session.keep(table=FinalTable(tuple(Row.of(row) for row in table.rows), table.best, plans))


def kept_table(session: Session, plans: Mapping[str, Plan]) -> Table | None:
    """The final table of these plans, by method; None where it was not made yet, or of others."""
    kept = session.table
    if kept is None or kept.plans != {method: plan.fingerprint for method, plan in plans.items()}:
        return None
    return Table(tuple(row.to_dict() for row in kept.rows), kept.best, dict(plans))


def keep_outcome(run: TrainingRun, result: TrainResult, found: Mapping[str, MethodResult]) -> None:
    """Keeps the end of a run: the table, the best placement, a step of it, and its explanation; writes the files.

    Args:
        run: that has come to its end.
        result: of it.
        found: by method that searched.
    """
    session, problem, table = run.session, run.problem, result.table
    kind, shown = "measured" if result.is_measured else "simulated", result.timeline.source
    session.keep_placement(result.placement)
    keep_table(session, table)
    session.keep(ending=Ending(result.is_measured, time.time(), result.expected.to_dict(), result.durations.to_dict()))
    trace = json.dumps(
        jsonable(chrome_trace({shown: result.timeline}, problem.graph, problem.host)),
        separators=(",", ":"),
        allow_nan=False,
        ensure_ascii=False,
    )
    session.keep_timeline(trace)
    explanation = None
    if shown == kind:  # the shares of a simulated step say nothing of a measured one
        explanation = explain_run(problem, table.plans[table.best], result.timeline, table.rows, table.best)
        session.keep(explanation=json.dumps(jsonable(explanation.to_dict()), allow_nan=False))
    if run.folder is None:
        return
    path = run.folder.path
    save_placement(result.placement, path("placement.json"))
    run.folder.write_json("result.json", result_of(session))
    write_text_atomic(path("timeline.json"), trace + "\n")
    title = title_of(table.best, result.timeline, result.step_time_s)
    save_timeline_png(path("timeline.png"), result.timeline, problem.graph, problem.host, title)
    if explanation is not None:
        save_explanation(explanation, path("explanation.json"))
    run.folder.write_json("search.json", {"schema": 1, "methods": {name: _told(one) for name, one in found.items()}})
    if learning := {name: one.learning for name, one in found.items() if one.learning}:
        run.folder.write_json("learning.json", learning)
    save_best_so_far_png(
        path("best_so_far.png"),
        [
            Curve(
                method,
                [best.to_list() for best in one.history],
                (one.num_scored, one.num_measured, one.seconds),
                one.single_s,
            )
            for method, one in found.items()
        ],
        title=f"{' and '.join(found)} on {problem.host.name}",
        kind=kind,
    )


def result_of(session: Session) -> dict[str, Any]:
    """What `result.json` holds: the table, durations, and how the batch is cut; empty before the table was made."""
    table, ending = session.table, session.ending
    if table is None or ending is None:
        return {}
    best_s = next(row.step_time_s for row in table.rows if row.method == table.best)
    return {
        "schema": 1,
        "rows": [row.to_dict() for row in table.rows],
        "best": {"method": table.best, "step_time_s": best_s},
        "measured": ending.is_measured,
        "durations": {"expected": ending.expected, "taken": ending.taken},
        "time": ending.time_s,
        **({"micro_batches": session.micro_batches} if session.has("request") else {}),
    }


def title_of(method: str, timeline: Timeline, step_time_s: float) -> str:
    """The title of a timeline: the length of the step that it shows, and the median of many where that is another."""
    shown, median = (f"{seconds * 1e3:.1f} ms" for seconds in (timeline.step_s, step_time_s))
    other = "" if shown == median else f" (median of many: {median})"
    return f"{method}: one {timeline.source} step, {shown}{other}"


def _told(found: MethodResult) -> dict[str, Any]:
    """What `search.json` says of a method."""
    return {
        "placements": found.num_scored,
        "measured": found.num_measured,
        "seconds": found.seconds,
        "single_s": found.single_s,
        "history": [best.to_list() for best in found.history],
        "tried": [list(pair) for pair in found.tried],
    }
