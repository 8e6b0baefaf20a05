"""`train`: baselines, random search and a learned policy over one problem, judged in one table."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue, RunnerError
from rlplace.measure.placement import Placement, save_placement
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.run.eager import EagerStep
from rlplace.measure.run.race import RaceProtocol
from rlplace.measure.run.threads import one_thread_here
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timeline import Timeline
from rlplace.report import save_timeline_png, write_chrome_trace
from rlplace.report.progress import Progress, make_progress
from rlplace.runs.calibration import calibrated
from rlplace.runs.folder import RunFolder
from rlplace.runs.tracking import NoTracker, Tracker
from rlplace.search import eft
from rlplace.search.groups import majority_devices
from rlplace.search.rules import baselines
from rlplace.training.config import TrainConfig
from rlplace.training.evaluator import Judge
from rlplace.training.learner import PolicySearch
from rlplace.training.random_search import RandomSearch
from rlplace.training.search_loop import Found, search_within
from rlplace.training.table import Entry, Table, fill_table


@dataclass(frozen=True)
class TrainResult:
    """What a run found.

    Attributes:
        placement: of the best method, as it was measured.
        table: all methods, measured in one race (simulated on a simulated host).
        timeline: a typical step of the placement.
        is_measured: whether the step times come from running.
    """

    placement: Placement
    table: Table
    timeline: Timeline
    is_measured: bool

    @property
    def step_time_s(self) -> float:
        """Median step time of the placement."""
        return float(self.table.row(self.table.best)["step_time_s"])


@one_thread_here()
def train(
    problem: Problem,
    config: TrainConfig | None = None,
    *,
    run: RunFolder | None = None,
    progress: Progress | None = None,
    tracker: Tracker | None = None,
    **options: Any,
) -> TrainResult:
    """The best placement that was measured, and the table that it stands in.

    The policy starts by imitating a heuristic, learns from simulated placements, then from measured ones. On a
    simulated host nothing is measured: the simulator judges everything.

    Args:
        problem: what to place where.
        config: how; or give its fields as keywords (`budget_s=60, seed=0`).
        run: a folder to keep the result in; Ctrl-C leaves the best placement so far there.
        progress: told how it goes.
        tracker: told figures.
        options: fields of `TrainConfig`, over those of `config`.

    Raises:
        InvalidValue: an unknown option, or one out of range.
        RunnerError: no placement could be run, or the reference failed.
    """
    config = _config(config, options)
    progress, tracker = progress or make_progress(is_quiet=True), tracker or NoTracker()
    if config.num_calibrated and not problem.host.is_simulated:
        problem = calibrated(problem, config.num_calibrated, seed=config.seed, say=progress.say)
    simulator = Simulator(problem)
    reference = baselines.best_single(problem, simulator)
    judge = Judge(problem, simulator, reference, seed=config.seed)
    try:
        heuristics = {
            "single": reference,
            "blocks": baselines.nearest_allowed(problem, baselines.blocks(problem)),
            "round-robin": baselines.nearest_allowed(problem, baselines.round_robin(problem)),
            "eft": _where_allowed(problem, eft(problem)),
        }
        if run is not None:
            _keep(run, problem, simulator.plan(reference), "single")
        keeper = _Keeper(run, judge, tracker)
        progress.say("random search")
        random = search_within(
            RandomSearch(problem, seed=config.seed),
            judge,
            config,
            progress=progress,
            on_best=keeper.of("random"),
        )
        progress.say("learning")
        policy = PolicySearch(problem, simulator, config, teacher=heuristics.get(config.init), tracker=tracker)
        learned = search_within(
            policy,
            judge,
            config,
            progress=progress,
            tracker=tracker,
            on_best=keeper.of("learned"),
        )
        entries = [Entry(name, simulator.plan(devices)) for name, devices in heuristics.items()]
        if np.ptp(reference):
            entries[0] = Entry("single", None, 0, why="pins and exclusions leave no device that may hold everything")
        entries.insert(3, _entry("random", random, {}))
        entries.append(_entry("learned", learned, {"init": policy.init}))
        progress.say("measuring the final table")
        table = _table(problem, judge, entries, config)
        if not table.best:
            raise RunnerError(f"no placement could be run to its end: {_reasons(table)}")
        plan = table.plans[table.best]
        timeline = judge.timeline(plan)
        placement = Placement.of(problem, plan, table.best)
        result = TrainResult(placement, table, timeline, judge.is_measured)
        if run is not None:
            _write(run, problem, result, policy)
            tracker.log_best(
                step_time_s=result.step_time_s,
                placement=run.path("placement.json"),
                timeline_png=run.path("timeline.png"),
            )
        return result
    finally:
        judge.close()


def _config(config: TrainConfig | None, options: dict[str, Any]) -> TrainConfig:
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    for name in options:
        if name not in known:
            raise InvalidValue("option", name, f"one of {', '.join(sorted(known))}", where="train")
    return dataclasses.replace(config or TrainConfig(), **options)


def _where_allowed(problem: Problem, devices: NDArray[np.int32]) -> NDArray[np.int32]:
    """`devices` (N,) as they are where ops may be anywhere, else by group, each where most of it is and may be."""
    return devices if problem.allowed is None else problem.grouping.expand(majority_devices(problem, devices))


def _table(problem: Problem, judge: Judge, entries: list[Entry], config: TrainConfig) -> Table:
    protocol = RaceProtocol(max_rounds=config.table_rounds, min_rounds=config.table_rounds, hopeless=float("inf"))
    eager, why = _eager(problem, judge)
    return fill_table(entries, eager, why, lambda plans, others: judge.judge(plans, protocol, others=others))


def _eager(problem: Problem, judge: Judge) -> tuple[EagerStep | None, str]:
    if not judge.is_measured:
        return None, "the host is simulated"
    try:
        return EagerStep(problem.graph, problem.host, worker=judge.widest_worker()), ""
    except InvalidValue as error:
        return None, str(error)


def _entry(method: str, found: Found, facts: dict[str, Any]) -> Entry:
    return Entry(
        method,
        found.plan,
        found.num_measured or found.num_proposed,
        {"simulated": found.num_proposed, **facts},
        why="" if found.plan is not None else "found no feasible placement",
    )


def _reasons(table: Table) -> str:
    rows = (row for row in table.rows if row["placement"] and row["status"] != "ok")
    return "; ".join(f"{row['method']}: {row['status']}: {row.get('why', '')}" for row in rows)


class _Keeper:
    """Keeps the best placement so far over all searches, so that Ctrl-C loses nothing, and shows it to the tracker."""

    def __init__(self, run: RunFolder | None, judge: Judge, tracker: Tracker) -> None:
        self._run, self._judge, self._tracker = run, judge, tracker
        self._best_s = float("inf")

    def of(self, method: str) -> Callable[[Plan, float], None]:
        """What `method` calls with each new best plan and its step time."""

        def keep(plan: Plan, step_time_s: float) -> None:
            if self._run is None or step_time_s >= self._best_s:
                return
            self._best_s = step_time_s
            problem = self._judge.problem
            _keep(self._run, problem, plan, method)
            if not isinstance(self._tracker, NoTracker):
                title = f"{method}: {step_time_s * 1e3:.1f} ms a step"
                path = self._run.path("timeline.png")
                save_timeline_png(path, self._judge.timeline(plan), problem.graph, problem.host, title)
                placement = self._run.path("placement.json")
                self._tracker.log_best(step_time_s=step_time_s, placement=placement, timeline_png=path)

        return keep


def _keep(run: RunFolder, problem: Problem, plan: Plan, method: str) -> None:
    save_placement(Placement.of(problem, plan, method), run.path("placement.json"))


def _write(run: RunFolder, problem: Problem, result: TrainResult, policy: PolicySearch) -> None:
    save_placement(result.placement, run.path("placement.json"))
    run.write_json("result.json", {**result.table.to_dict(), "measured": result.is_measured, "time": time.time()})
    policy.save(run)
    kind = "measured" if result.is_measured else "simulated"
    write_chrome_trace(run.path("timeline.json"), {kind: result.timeline}, problem.graph, problem.host)
    title = f"{result.table.best}: {result.step_time_s * 1e3:.1f} ms a step ({kind})"
    save_timeline_png(run.path("timeline.png"), result.timeline, problem.graph, problem.host, title)
