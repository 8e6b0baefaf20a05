"""The results of a run: the final table, `TrainResult` in Python, and the files of its folder.

The table holds the placement of every method, measured in turn in one race, the rows that need no search, and plain
PyTorch beside them. Files are written from the session, for people and other tools; no command reads one as state.
"""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster import Cluster
from rlplace.errors import InvalidValue, RunnerError, UserError
from rlplace.files import jsonable, write_bytes_atomic, write_text_atomic
from rlplace.measure import (
    Host,
    Measurement,
    Placement,
    Plan,
    Problem,
    RaceProtocol,
    Simulator,
    Timeline,
    save_placement,
)
from rlplace.measure.bounds import even_split_s
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.explain.explanation import Alternative, Explanation, Kind, save_explanation
from rlplace.measure.host_model import LearnedHost
from rlplace.measure.host_model.learned_host import FILE as HOST_MODEL
from rlplace.measure.timing.eager_step import EagerRecipe, Other, check_has_values
from rlplace.measure.timing.threads import usable_cores
from rlplace.measure.timing.verdict import LARGE, LEVEL, TINY_S, SpeedVerdict, interval, judge
from rlplace.report import Curve, results_table, save_best_so_far_png, save_timeline_png
from rlplace.report.chrome_trace import chrome_trace
from rlplace.report.console import Progress, as_html, as_text
from rlplace.say import Say, format_seconds
from rlplace.search import Budget, find
from rlplace.search.rules.baselines import best_gang, best_single, whole_single_s, without_gangs
from rlplace.search.task import Failure, Saveable
from rlplace.session.calibrate import cut_words
from rlplace.session.folder import RunFolder
from rlplace.session.prepare import COMPARED_EVALUATIONS
from rlplace.session.session import Session
from rlplace.session.session_records import Ending, FinalTable, MethodResult, Row, ratio_of
from rlplace.store import StoreLog
from rlplace.training.agent.agent import Agent
from rlplace.training.config import TrainConfig
from rlplace.training.forecast import LEAST_RACE_S, LOAD_S_PER_OP, Durations, limit_s, race_within
from rlplace.training.tracking import NoTracker, Tracker


@dataclass(frozen=True)
class Table:
    """The rows that `rlplace train --json` prints, and the best placement among them.

    Attributes:
        rows: one per method.
        best: the method with the best placement, which the run returns: the shortest step, or everything on one device
            or gang where no step is clearly shorter.
        plans: the plan of each method.
        verdict: whether that placement is faster than one device and plain PyTorch, from a race that did not choose
            it; None where it was not judged.
        leader: the method with the shortest step, before that race.
    """

    rows: tuple[dict[str, Any], ...]
    best: str
    plans: dict[str, Plan]
    verdict: SpeedVerdict | None = None
    leader: str = ""

    def __repr__(self) -> str:
        """In one line; `print` shows all of it."""
        return f"Table({len(self.rows)} rows, best {self.best!r})"

    def __str__(self) -> str:
        """The table as `rlplace train` prints it, without colours."""
        return as_text(results_table(self.rows, best=self.best or None))

    def _repr_html_(self) -> str:
        """The table for a notebook."""
        return as_html(results_table(self.rows, best=self.best or None))

    @property
    def summary(self) -> str:
        """One line with the step times of the best placement, of one device and of plain PyTorch, and the verdict;
        with `not worth it` if placing is not known to help."""
        placed_s = self.row(self.best)["step_time_s"] if self.best else LARGE
        return str(self.verdict or judge((placed_s,), {}, why="it was not raced again, beside others"))

    def row(self, method: str) -> dict[str, Any]:
        """The row of `method`."""
        return next(row for row in self.rows if row["method"] == method)


ONE_DEVICE, EAGER, ONE_THREAD, COMPILED = "one device", "eager", "eager on one thread", "torch.compile"
"""Steps beside which a placement is judged."""


def fill_table(
    entries: Mapping[str, MethodResult],
    eager: Other | None,
    eager_why: str,
    measure: Callable[[list[Plan], list[Other]], list[Measurement]],
    one_thread: Other | None = None,
) -> Table:
    """The table of `entries`; equal plans share one measurement.

    Args:
        entries: by method.
        eager: plain PyTorch; None skips that row.
        eager_why: why it is skipped.
        measure: measures plans and the other contenders in one race.
        one_thread: plain PyTorch with one thread, a figure in the row of plain PyTorch; None leaves it out.
    """
    placed = {method: entry.plan for method, entry in entries.items() if entry.plan is not None}
    plans = list({plan.fingerprint: plan for plan in placed.values()}.values())
    outcomes = measure(plans, [other for other in (eager, one_thread) if other is not None])
    by_plan = {plan.fingerprint: outcome for plan, outcome in zip(plans, outcomes)}
    rows = [
        _row(method, entry, None if entry.plan is None else by_plan[entry.plan.fingerprint])
        for method, entry in entries.items()
    ]
    eager_row = {"method": "eager", "placement": False, "placements": 0, "history": []}
    if eager is None:
        rows.append({**eager_row, "step_time_s": None, "spread_s": None, "status": "skipped", "why": eager_why})
    else:
        rows.append({**eager_row, **_figures(outcomes[len(plans)])})
        if one_thread is not None and outcomes[-1].ok:
            rows[-1]["one_thread_s"] = outcomes[-1].step_time_s
    ran = [row["method"] for row in rows if row["placement"] and row["status"] == "ok"]
    measured = {method: by_plan[placed[method].fingerprint] for method in ran}
    return Table(tuple(rows), best_of(measured), placed, leader=leader_of(measured))


def leader_of(measured: Mapping[str, Measurement]) -> str:
    """The method with the shortest step, which a race of its own has to confirm; `""` of none."""

    def centre(name: str) -> float:
        return float(interval(np.log(np.maximum(measured[name].rounds_s, TINY_S)), LEVEL)[1])

    return min(measured, key=centre, default="")


def best_of(measured: Mapping[str, Measurement]) -> str:
    """The best `SIMPLE` method, or the leader where none ran: the race that chose a leader says nothing of its lead."""
    return leader_of({name: measured[name] for name in measured if name in SIMPLE}) or leader_of(measured)


def measure_table(
    problem: Problem,
    evaluator: Evaluator,
    entries: Mapping[str, MethodResult],
    config: TrainConfig,
    say: Say,
    left_s: float = math.inf,
    step_s: float = math.inf,
) -> Table:
    """The table of `entries`, every plan measured in one race, or simulated where the host is.

    Args:
        problem: that is placed.
        evaluator: runs plans.
        entries: by method.
        config: of the run.
        say: told if time cuts the race short.
        left_s: seconds for it, where all of the run has a limit: with few, fewer entries are raced for fewer rounds.
        step_s: seconds of a step on one device, busy as the machine is.
    """
    rounds, most_s, warmup = config.search.table_rounds, limit_s(config.budget_s), RaceProtocol().warmup
    eager, one_thread, why = _eager(problem, evaluator)
    if math.isfinite(left_s) and evaluator.is_measured:
        load_s, warmup = LOAD_S_PER_OP * problem.graph.num_ops, 1
        count = len({entry.plan.fingerprint for entry in entries.values() if entry.plan is not None})
        room_s = max(left_s, LEAST_RACE_S)
        raced, rounds = race_within(room_s, step_s, load_s, count + 3, rounds)
        entries, most_s = _the_first(entries, max(raced - 3, 1)), min(most_s, room_s)
    deadline_s = time.monotonic() + most_s
    protocol = RaceProtocol(warmup=warmup, max_rounds=rounds, min_rounds=rounds, hopeless=float("inf"))

    def measure(plans: list[Plan], others: list[Other]) -> list[Measurement]:
        outcomes = evaluator.measure_plans(plans, protocol, others=others, deadline_s=deadline_s)
        ran = min((len(outcome.samples_s) for outcome in outcomes if outcome.ok), default=rounds)
        if evaluator.is_measured and ran < rounds:
            say(cut_words("the final table", ran, rounds))
        return outcomes

    return fill_table(entries, eager, why, measure, one_thread)


def _the_first(entries: Mapping[str, MethodResult], most: int) -> dict[str, MethodResult]:
    """The entries, but at most so many distinct plans: of methods that searched, then of one device, then of the
    search without gangs, then of the others."""
    rank = {**dict.fromkeys(SIMPLE, 1), NO_GANG: 2}
    ranked = sorted(entries, key=lambda method: 0 if entries[method].is_searched else rank.get(method, 3))
    plans = dict.fromkeys(plan.fingerprint for method in ranked if (plan := entries[method].plan) is not None)
    late = {*list(plans)[most:]}
    return {
        method: replace(entry, plan=None, why="no time was left to race it")
        if entry.plan is not None and entry.plan.fingerprint in late
        else entry
        for method, entry in entries.items()
    }


def _eager(problem: Problem, evaluator: Evaluator) -> tuple[EagerRecipe | None, EagerRecipe | None, str]:
    """Plain PyTorch to race against, on CPU cores with one thread as well, and why not where it cannot."""
    if not evaluator.is_measured:
        return None, None, "the host is simulated"
    try:
        check_has_values(problem.graph)
    except InvalidValue as error:
        return None, None, str(error)
    is_cpu = all(device.backend == "cpu" for device in problem.host.devices)
    return EagerRecipe(), EagerRecipe(num_threads=1) if is_cpu and len(usable_cores()) > 1 else None, ""


def _row(method: str, entry: MethodResult, outcome: Measurement | None) -> dict[str, Any]:
    failed = entry.failure
    row: dict[str, Any] = {
        "method": method,
        "placement": True,
        "placements": entry.num_scored,
        "history": [best.to_list() for best in entry.history],
        **({"measured": entry.num_measured} if entry.is_searched else {}),
        **({} if failed is None else {"traceback": failed.traceback}),
    }
    if outcome is None:
        has_tried = entry.num_scored or entry.num_measured
        why = entry.why or ("found no feasible placement" if has_tried else "tried no allowed placement")
        reason = {"status": "skipped", "why": why} if failed is None else {"status": "error", "why": failed.why}
        return {**row, "step_time_s": None, "spread_s": None, **reason}
    row |= _figures(outcome)
    if outcome.ok and (why := entry.tracing if failed is None else f"its best until it raised {failed.why}"):
        row["why"] = why
    return row


def _figures(outcome: Measurement) -> dict[str, Any]:
    return {
        "step_time_s": outcome.step_time_s if outcome.ok else None,
        "spread_s": outcome.spread_s if outcome.ok else None,
        "samples": len(outcome.samples_s),
        "status": outcome.status,
        **({"why": outcome.why} if outcome.why else {}),
    }


SIMPLE = ("single", "gang")
"""Rows of placements with everything on one device: the one that simulates best, and a gang."""
NO_GANG = "no-gang"
"""The row of a search without gangs."""
HEURISTICS = ("single", "blocks", "round-robin", "expert", "eft", "heft")
EVALUATIONS = 64
SEARCH = "portfolio"
WARM_UP_EVALUATIONS = 400
"""Enough for every kernel of `portfolio` to be called: those of heuristics, which few evaluations leave out, and of
annealing, the last."""


def place_quickly(
    problem: Problem, simulator: Simulator, name: str, evaluations: int = EVALUATIONS, *, seed: int = 0
) -> MethodResult:
    """The placement of a heuristic, or of a short search, found at once."""
    try:
        found = find(problem, name, simulator, Budget(evaluations), seed=seed)
    except UserError:
        raise
    except Exception as error:  # whatever it is: one that failed is one row, not the run
        return MethodResult(failure=Failure.of(error))
    if found.devices is None:
        why = "found no feasible placement" if found.evaluations else "pins and exclusions leave it no placement"
        return MethodResult(num_scored=found.evaluations, why=why)
    history = found.history if problem.host.is_simulated else ()  # a measured row is not followed by simulated steps
    is_own = found.plan is None or found.op_order == problem.op_order
    return MethodResult(simulator.plan(found.devices) if is_own else found.plan, found.evaluations, history=history)


def place_on_gang(problem: Problem, simulator: Simulator) -> dict[str, MethodResult]:
    """The row of everything on a gang, where there is one: a simulation can be wrong about whether it is the best."""
    devices = best_gang(problem, simulator)
    return {} if devices is None else {"gang": MethodResult(simulator.plan(devices), 1)}


def place_without_gangs(problem: Problem, simulator: Simulator, *, seed: int) -> dict[str, MethodResult]:
    """The row of a short search without gangs, on a host of this machine that has some: other searches may all end on
    gangs, where only a simulation is in their favour."""
    plain = None if problem.host.is_simulated else without_gangs(problem)
    if plain is None:
        return {}
    return {NO_GANG: place_quickly(plain, simulator, SEARCH, COMPARED_EVALUATIONS, seed=seed)}


def compile_kernels(problem: Problem, simulator: Simulator) -> None:
    """Runs a short search: kernels are compiled, or read from disk, before the clock of any method starts."""
    with contextlib.suppress(Exception):  # its own row will say so
        find(problem, SEARCH, simulator, Budget(WARM_UP_EVALUATIONS))


def num_rows(methods: tuple[str, ...], host: Host) -> int:
    """The contenders of the final table with these methods: the reference and plain PyTorch with all threads and one
    are among them."""
    return len({*HEURISTICS, *methods}) + 2 * any(device.members for device in host.devices) + 3


WEIGHTS = ("policy.safetensors", "policy.json")
"""The files of a saved policy."""


@dataclass(frozen=True, eq=False)
class Run:
    """What the phases of a run share; what they find goes into its session, and nothing here changes.

    Attributes:
        session: what is known so far.
        folder: where its outputs go; None for a run without one.
        problem: as profiled or estimated.
        config: as asked for, within the rest of its limit of time.
        progress: told how it goes.
        tracker: told figures.
        start: (N,) a placement that methods may start from.
        is_resumed: whether it goes on from the session.
        known_hosts: knowledge of the host, besides that of the store.
        profiling_s: how long the problem was profiled.
        expected: how long the run was expected to take before that; None where that was not said.
        log: keeps measurements; None where nothing is.
        cluster: whose machines measure or search; None for this one.
    """

    session: Session
    folder: RunFolder | None
    problem: Problem
    config: TrainConfig
    progress: Progress
    tracker: Tracker
    start: NDArray[np.int32] | None = None
    is_resumed: bool = False
    known_hosts: Sequence[LearnedHost] = ()
    profiling_s: float = 0.0
    expected: Durations | None = None
    log: StoreLog | None = None
    cluster: Cluster | None = None

    def keep_placement(self, placement: Placement) -> None:
        """Keeps the best placement so far, and writes it as `placement.json`."""
        self.session.keep_placement(placement)
        if self.folder is not None:
            save_placement(placement, self.folder.path("placement.json"))


@dataclass(frozen=True)
class TrainResult:
    """The result of a run.

    Attributes:
        placement: the measured placement of the best method.
        table: all methods, measured in one race (simulated on a simulated host).
        timeline: a typical step of the placement.
        is_measured: whether the step times are measured.
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
        """One line with the step times of the best placement, of one device and of plain PyTorch."""
        return self.table.summary if self.is_measured else f"{self.table.summary} (all simulated)"

    @property
    def is_worth_it(self) -> bool:
        """Whether the placement is known to be faster than one device and plain PyTorch (`table.verdict`)."""
        return self.table.verdict is not None and self.table.verdict.is_worth_it

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
        evaluator: traces the steps for the tracker.
        reference: the best single device.
        single_s: its step time.
    """

    def __init__(self, run: Run, evaluator: Evaluator, reference: Plan, single_s: float) -> None:
        self._run, self._evaluator, self._kept = run, evaluator, ""
        self._bests = {"single": (reference, ratio_of(single_s, single_s)), **run.session.bests()}
        self._keep()

    def keep(self, method: str, plan: Plan, step_time_s: float, ratio: float) -> None:
        """Takes a new best plan of `method`: its step time, and the ratio of that to the reference's."""
        self._bests[method] = plan, ratio
        is_new, folder, tracker = self._keep() == method, self._run.folder, self._run.tracker
        if folder is None or not is_new or isinstance(tracker, NoTracker):
            return
        path, timeline = folder.path("timeline.png"), timeline_of(self._evaluator, plan, self._run.progress.say)
        problem, title = self._evaluator.problem, title_of(method, timeline, step_time_s)
        save_timeline_png(path, timeline, problem.graph, problem.host, title)
        tracker.log_best(step_time_s=step_time_s, placement=folder.path("placement.json"), timeline_png=path)

    def _keep(self) -> str:
        """Keeps the placement with the least ratio, where it is another; the method that found it, else nothing."""
        method, (plan, _) = min(self._bests.items(), key=lambda item: item[1][1])
        if self._kept == plan.fingerprint:
            return ""
        self._kept = plan.fingerprint
        self._run.keep_placement(Placement.of(self._evaluator.problem, plan, method))
        return method

    def keep_learned(self, learned: Saveable) -> None:
        """Keeps the learned host model, also in the store, or the policy of a method."""
        run, folder = self._run, self._run.folder
        if isinstance(learned, Agent):
            lines = learned.say()
            if folder is not None:
                learned.save(folder.path(HOST_MODEL))
            if run.log is not None:
                run.log.keep_learned(run.problem.graph.fingerprint, LearnedHost.of(learned.posterior, lines))
            factors = "".join(f"\n  {line}" for line in lines)
            run.progress.say(
                f"what was learned about the host:{factors}"
                if factors
                else "the host is as profiled, as far as the measured steps tell"
            )
            return
        saved = SavedFiles.of(learned)
        run.session.keep_files(saved.files)
        if folder is not None:
            saved.save(folder.path(WEIGHTS[0]))


@dataclass(frozen=True)
class SavedFiles:
    """A learned policy as its files.

    Attributes:
        files: contents by name, those of `WEIGHTS`.
    """

    files: Mapping[str, bytes]

    @classmethod
    def of(cls, learned: Saveable) -> SavedFiles:
        """The files that a policy is saved in."""
        with tempfile.TemporaryDirectory() as folder:
            learned.save(Path(folder) / WEIGHTS[0])
            return cls({path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name in WEIGHTS})

    def save(self, path: Path) -> None:
        """Writes them to `path` and beside it, under its own name without the suffix."""
        for name, data in self.files.items():
            write_bytes_atomic(path.with_suffix(Path(name).suffix), data)


def timeline_of(evaluator: Evaluator, plan: Plan, say: Callable[[str], None], *, is_hurried: bool = False) -> Timeline:
    """A typical step of a plan; simulated, which is said, where tracing one broke it: it has run without before."""
    try:
        return evaluator.timeline(plan, is_hurried=is_hurried)
    except RunnerError as error:
        say(f"a step could not be traced, so its timeline is simulated: {error}")
        return evaluator.simulator.timeline(plan)


def keep_table(session: Session, table: Table) -> None:
    """Keeps the final table: a measured run that goes on does not measure it again."""
    session.keep(
        table=FinalTable(
            tuple(Row.of(row) for row in table.rows),
            table.best,
            {method: plan.fingerprint for method, plan in table.plans.items()},
            table.verdict,
        )
    )


def kept_table(session: Session, plans: Mapping[str, Plan]) -> Table | None:
    """The final table of these plans, by method; None where it was not made yet, or of others."""
    kept = session.table
    if kept is None or kept.plans != {method: plan.fingerprint for method, plan in plans.items()}:
        return None
    return Table(tuple(row.to_dict() for row in kept.rows), kept.best, dict(plans), kept.verdict)


def keep_outcome(run: Run, problem: Problem, result: TrainResult, found: Mapping[str, MethodResult]) -> None:
    """Keeps the end of a run: the table, the best placement, a step of it, and its explanation; writes the files.

    Without a folder nothing of it would be read: making the explanation alone takes kernels that nothing else needs.

    Args:
        run: that has come to its end.
        problem: that was searched.
        result: of it.
        found: by method that searched.
    """
    if run.folder is None:
        return
    session, table = run.session, result.table
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
    if shown == kind:  # the shares of a simulated step say nothing of a measured one
        plan, whole_s = table.plans[table.best], session.facts.whole_s if session.has("problem") else None
        explanation = explain_run(problem, plan, result.timeline, table.rows, table.best, whole_s)
        if (learned := session.learned) is not None:
            explanation = replace(explanation, learned=learned.lines)
        session.keep(explanation=json.dumps(jsonable(explanation.to_dict()), allow_nan=False))
        save_explanation(explanation, run.folder.path("explanation.json"))
    path = run.folder.path
    save_placement(result.placement, path("placement.json"))
    run.folder.write_json("result.json", result_of(session))
    write_text_atomic(path("timeline.json"), trace + "\n")
    title = title_of(table.best, result.timeline, result.step_time_s)
    save_timeline_png(path("timeline.png"), result.timeline, problem.graph, problem.host, title)
    run.folder.write_json(
        "search.json",
        {
            "schema": 1,
            "methods": {
                name: {
                    "placements": one.num_scored,
                    "measured": one.num_measured,
                    "seconds": one.seconds,
                    "single_s": one.single_s,
                    "history": [best.to_list() for best in one.history],
                    "tried": [list(pair) for pair in one.tried],
                }
                for name, one in found.items()
            },
        },
    )
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
                one.tried,
            )
            for method, one in found.items()
        ],
        title=f"{' and '.join(found)} on {problem.host.name}",
        kind=kind,
    )


def result_of(session: Session) -> dict[str, Any]:
    """The content of `result.json`: the table, durations, and how the batch is cut; empty before the table was made."""
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


SPLIT_NOTE = "at best: an even split of the batch, ops shrinking with it, a ring summing the gradients"


def explain_run(
    problem: Problem,
    plan: Plan,
    timeline: Timeline,
    rows: Sequence[Mapping[str, Any]],
    method: str,
    whole_s: float | None = None,
) -> Explanation:
    """The parts of the best placement's step time, beside the step time of alternatives.

    Args:
        problem: of the run.
        plan: of its best placement.
        timeline: of a typical step of it.
        rows: of the run's table, `single` and `eager` among them.
        method: the method that found the placement, one of the rows.
        whole_s: where a split was chosen, the shortest step that was simulated without one.
    """
    from rlplace.measure.explain.explain_step import explain  # its kernels are compiled when they are first needed

    kind: Kind = timeline.source
    by_name = {str(row["method"]): row for row in rows}
    one_device = _of_row("one device", by_name.get("single"), kind)
    if kind == "simulated" and (whole_batch_s := whole_single_s(problem)) < (one_device.step_time_s or math.inf):
        one_device = replace(one_device, step_time_s=whole_batch_s, note="the whole batch at once")
    row = by_name.get(method, {})
    whole = []
    if whole_s is not None:
        step_s = _measured_over_simulated(problem, one_device) * whole_s
        whole = [Alternative("whole ops", step_s, "simulated", "the best step without a split, when it was chosen")]
    return explain(
        problem,
        plan,
        timeline,
        method=method,
        step_time_s=row.get("step_time_s"),
        spread_s=row.get("spread_s") or 0.0,
        alternatives=[
            one_device,
            data_parallel(problem, one_device),
            *whole,
            _of_row("eager", by_name.get("eager"), kind),
        ],
    )


def _measured_over_simulated(problem: Problem, one_device: Alternative) -> float:
    """What simulated times are multiplied by beside measured ones: the ratio on one device; 1 if none is measured."""
    if one_device.kind != "measured" or one_device.step_time_s is None:
        return 1.0
    simulator = Simulator(problem)
    single_s = float(simulator.step_times(best_single(problem, simulator)[None])[0])
    return one_device.step_time_s / single_s if 0 < single_s < math.inf else 1.0


def data_parallel(problem: Problem, one_device: Alternative) -> Alternative:
    """The step time with the batch split over devices: simulated where it is cut, else an estimate.

    Args:
        problem: of the run.
        one_device: where it was measured, simulated and estimated times are scaled by measured over simulated.
    """
    simulator, ratio = Simulator(problem), _measured_over_simulated(problem, one_device)
    if problem.graph.num_micro_batches > 1:
        kind: Literal["simulated", "estimated"] = "simulated"
        step_s = ratio * find(problem, "data-parallel", simulator).step_time_s
        note = f"{problem.graph.num_micro_batches} micro-batches dealt out"
        failed = f"{note}: does not fit into memory"
    else:
        kind, step_s, note = "estimated", ratio * even_split_s(problem), SPLIT_NOTE
        failed = "the batch is one sample, or no two devices hold the model each"
    is_possible = math.isfinite(step_s)
    return Alternative("data parallel", step_s if is_possible else None, kind, note if is_possible else failed)


def _of_row(name: str, row: Mapping[str, Any] | None, kind: Kind) -> Alternative:
    if row is None:
        return Alternative(name, None, kind, "not in the table")
    step_s = row.get("step_time_s")
    if row.get("status") == "ok" and step_s is not None:
        return Alternative(name, float(step_s), kind)
    return Alternative(name, None, kind, str(row.get("why") or row.get("status", "")))
