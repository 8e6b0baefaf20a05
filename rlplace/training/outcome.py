"""What a run leaves behind: `TrainResult` in Python, and the files of its folder."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlplace.errors import RunnerError
from rlplace.format import format_seconds
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.explain.explanation import save_explanation
from rlplace.measure.host_model.learned_host import FILE as HOST_MODEL
from rlplace.measure.placement import Placement, save_placement
from rlplace.measure.plan import Plan, Timeline
from rlplace.measure.problem import Problem
from rlplace.report import Curve, save_best_so_far_png, save_timeline_png, write_chrome_trace
from rlplace.runs.tracking import NoTracker, Tracker
from rlplace.search.task import Saveable
from rlplace.session.explained import explain_run
from rlplace.session.folder import RunFolder
from rlplace.training.agent.agent import AgentResult
from rlplace.training.forecast import Durations
from rlplace.training.resume.state import ratio_of
from rlplace.training.searches.result import LoopResult
from rlplace.training.table import Table


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
    durations: Durations = dataclasses.field(default_factory=Durations)
    expected: Durations = dataclasses.field(default_factory=Durations)

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


class Keeper:
    """Keeps the best placement so far over all searches, so that Ctrl-C loses nothing, and shows it to the tracker.

    Searches measure in different races, while the machine slows down and speeds up: their best placements compare by
    the ratios to the reference, the best single device in the same race, and never by seconds.

    Args:
        run: the folder; None keeps nothing.
        evaluator: traces what the tracker is shown.
        tracker: shown each new best placement.
        say: told what cannot be traced.
        reference: the best single device.
        single_s: its step time.
        bests: the best plan of each method and its ratio, where an interrupted run had come to some.
    """

    def __init__(
        self,
        run: RunFolder | None,
        evaluator: Evaluator,
        tracker: Tracker,
        say: Callable[[str], None],
        reference: Plan,
        single_s: float,
        bests: Mapping[str, tuple[Plan, float]] | None = None,
    ) -> None:
        self._run, self._evaluator, self._tracker, self._say = run, evaluator, tracker, say
        self._bests = {"single": (reference, ratio_of(single_s, single_s)), **(bests or {})}
        self._kept = ""
        self._keep()

    def of(self, method: str) -> Callable[[Plan, float, float], None]:
        """What `method` calls with its best plan, whenever that is another: the step time, and the ratio."""

        def keep(plan: Plan, step_time_s: float, ratio: float) -> None:
            self._bests[method] = plan, ratio
            is_new = self._keep() == method
            if self._run is None or not is_new or isinstance(self._tracker, NoTracker):
                return
            problem = self._evaluator.problem
            path, timeline = self._run.path("timeline.png"), timeline_of(self._evaluator, plan, self._say)
            title = title_of(method, timeline, step_time_s)
            save_timeline_png(path, timeline, problem.graph, problem.host, title)
            placement = self._run.path("placement.json")
            self._tracker.log_best(step_time_s=step_time_s, placement=placement, timeline_png=path)

        return keep

    def _keep(self) -> str:
        """Writes the placement with the least ratio, where it is another; the method that found it, else nothing."""
        method = min(self._bests, key=lambda name: self._bests[name][1])
        plan, before = self._bests[method][0], self._kept
        self._kept = plan.fingerprint
        if self._run is None or self._kept == before:
            return ""
        keep_placement(self._run, self._evaluator.problem, plan, method)
        return method

    def keep_learned(self, learned: Saveable) -> None:
        """Writes what a method has learned: about the host, or its policy."""
        if self._run is not None:
            learned.save(self._run.path(HOST_MODEL if isinstance(learned, AgentResult) else "policy.safetensors"))


def keep_placement(run: RunFolder, problem: Problem, plan: Plan, method: str) -> None:
    """Writes `placement.json`."""
    save_placement(Placement.of(problem, plan, method), run.path("placement.json"))


def timeline_of(evaluator: Evaluator, plan: Plan, say: Callable[[str], None], *, is_hurried: bool = False) -> Timeline:
    """A typical step of a plan; simulated, which is said, where tracing one broke it: it has run without before."""
    try:
        return evaluator.timeline(plan, is_hurried=is_hurried)
    except RunnerError as error:
        say(f"a step could not be traced, so its timeline is simulated: {error}")
        return evaluator.simulator.timeline(plan)


def keep_result(run: RunFolder, problem: Problem, result: TrainResult, found: Mapping[str, LoopResult]) -> None:
    """Writes what a run came to: the table, the best placement and a step of it, and what each method tried.

    Args:
        run: the folder.
        problem: that was placed.
        result: of the run.
        found: by method that searched.
    """
    _write(run, problem, result)
    _keep_search(run, problem, found, is_measured=result.is_measured)
    if learning := {name: one.learning for name, one in found.items() if one.learning}:
        run.write_json("learning.json", learning)


def _write(run: RunFolder, problem: Problem, result: TrainResult) -> None:
    save_placement(result.placement, run.path("placement.json"))
    durations = {"expected": result.expected.to_dict(), "taken": result.durations.to_dict()}
    facts = {"measured": result.is_measured, "durations": durations, "time": time.time()}
    run.write_json("result.json", {**result.table.to_dict(), **facts})
    kind = "measured" if result.is_measured else "simulated"
    shown = result.timeline.source
    write_chrome_trace(run.path("timeline.json"), {shown: result.timeline}, problem.graph, problem.host)
    title = title_of(result.table.best, result.timeline, result.step_time_s)
    save_timeline_png(run.path("timeline.png"), result.timeline, problem.graph, problem.host, title)
    if shown != kind:  # the shares of a simulated step say nothing of a measured one
        return
    table = result.table
    explanation = explain_run(problem, table.plans[table.best], result.timeline, table.rows, table.best)
    save_explanation(explanation, run.path("explanation.json"))


def title_of(method: str, timeline: Timeline, step_time_s: float) -> str:
    """The title of a timeline: the length of the step that it shows, and the median of many where that is another."""
    shown, median = (f"{seconds * 1e3:.1f} ms" for seconds in (timeline.step_s, step_time_s))
    other = "" if shown == median else f" (median of many: {median})"
    return f"{method}: one {timeline.source} step, {shown}{other}"


def _kept(found: LoopResult) -> dict[str, Any]:
    """What `search.json` keeps of a method."""
    return {
        "placements": found.num_scored,
        "measured": found.num_measured,
        "seconds": found.seconds,
        "single_s": found.single_s,
        "history": [best.to_list() for best in found.history],
        "tried": [list(pair) for pair in found.tried],
    }


def _keep_search(run: RunFolder, problem: Problem, found: Mapping[str, LoopResult], *, is_measured: bool) -> None:
    """Writes what each method had come to over placements and seconds, as figures and as a picture."""
    run.write_json("search.json", {"schema": 1, "methods": {name: _kept(one) for name, one in found.items()}})
    curves = [
        Curve(
            method,
            [best.to_list() for best in result.history],
            (result.num_scored, result.num_measured, result.seconds),
            result.single_s,
        )
        for method, result in found.items()
    ]
    kind = "measured" if is_measured else "simulated"
    title = f"{' and '.join(found)} on {problem.host.name}"
    save_best_so_far_png(run.path("best_so_far.png"), curves, title=title, kind=kind)
