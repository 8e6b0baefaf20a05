"""The final table: every method's placement, measured in turn in one race, and plain PyTorch beside them.

Rows of the table that need no search: each a handful of simulated placements.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlplace.errors import InvalidValue, UserError
from rlplace.format import format_seconds
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.measurement import Measurement
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.simulate.simulator import Simulator
from rlplace.measure.timing.eager_step import EagerRecipe, Other, check_has_values
from rlplace.measure.timing.race import RaceProtocol
from rlplace.measure.timing.threads import usable_cores
from rlplace.report.console import as_html, as_text, results_table
from rlplace.say import Say
from rlplace.search.methods import find
from rlplace.search.task import Budget, Failure
from rlplace.session.calibrate import cut_words
from rlplace.session.facts import MethodResult
from rlplace.training.config import TrainConfig
from rlplace.training.forecast import LEAST_RACE_S, LOAD_S_PER_OP, limit_s, race_within


@dataclass(frozen=True)
class Table:
    """Rows as `rlplace train --json` prints them, and the best placement among them.

    Attributes:
        rows: one a method.
        best: the method whose placement the run hands back.
        plans: by method.
    """

    rows: tuple[dict[str, Any], ...]
    best: str
    plans: dict[str, Plan]

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
        """The best placement beside one device and plain PyTorch, in a line; says so where it is not worth it."""
        placed_s = self.row(self.best)["step_time_s"] if self.best else math.inf
        others = {"one device": self._step_s("single"), "eager": self._step_s("eager")}
        told = [f"{name} {format_seconds(step_s)}" for name, step_s in others.items() if math.isfinite(step_s)]
        eager = next((row for row in self.rows if row["method"] == "eager"), {})
        if (alone_s := eager.get("one_thread_s")) is not None:
            name = "eager on one thread"
            if math.isfinite(others["eager"]):
                told[-1] += f" (one thread {format_seconds(alone_s)})"
            else:
                told.append(f"{name} {format_seconds(alone_s)}")
            others[name] = alone_s
        words = ", ".join([f"placed {format_seconds(placed_s)}", *told])
        least = min(others, key=lambda name: others[name])
        return words if placed_s < others[least] else f"{words}: not worth it, {least} takes no longer"

    def _step_s(self, method: str) -> float:
        """Of a row; infinite where there is none, or it was not timed."""
        found = (row["step_time_s"] for row in self.rows if row["method"] == method)
        return next((step_s for step_s in found if step_s is not None), math.inf)

    def row(self, method: str) -> dict[str, Any]:
        """The row of `method`."""
        return next(row for row in self.rows if row["method"] == method)

    def to_dict(self) -> dict[str, Any]:
        """The object that `--json` prints and `result.json` holds."""
        step_time_s = self.row(self.best)["step_time_s"] if self.best else None
        return {"schema": 1, "rows": list(self.rows), "best": {"method": self.best, "step_time_s": step_time_s}}


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
        measure: measures plans and what else there is in one race.
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
    ran = [row for row in rows if row["placement"] and row["status"] == "ok"]
    best = min(ran, key=lambda row: row["step_time_s"])["method"] if ran else ""
    return Table(tuple(rows), best, placed)


def measure_table(
    problem: Problem,
    evaluator: Evaluator,
    entries: Mapping[str, MethodResult],
    config: TrainConfig,
    say: Say,
    left_s: float = math.inf,
) -> Table:
    """The table of `entries`, every plan measured in one race, or simulated where the host is.

    Args:
        problem: that is placed.
        evaluator: runs plans.
        entries: by method.
        config: of the run.
        say: told if time cuts the race short.
        left_s: seconds for it, where all of the run has a limit: with few, fewer entries are raced for fewer rounds.
    """
    rounds, most_s, warmup = config.search.table_rounds, limit_s(config.budget_s), RaceProtocol().warmup
    eager, one_thread, why = _eager(problem, evaluator)
    if math.isfinite(left_s) and evaluator.is_measured:
        step_s, load_s = float(problem.costs.op_time_s.sum(axis=0).min()), LOAD_S_PER_OP * problem.graph.num_ops
        count = len({entry.plan.fingerprint for entry in entries.values() if entry.plan is not None})
        room_s, warmup = max(left_s - 2 * step_s, LEAST_RACE_S), 1  # a timeline follows
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
    """The entries, but at most so many distinct plans: of what was searched, then of one device, then of the others."""
    ranked = sorted(entries, key=lambda method: (not entries[method].is_searched, method != "single"))
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
        tried = entry.num_scored or entry.num_measured
        why = entry.why or ("found no feasible placement" if tried else "tried no allowed placement")
        status, why = ("skipped", why) if failed is None else ("error", failed.why)
        return {**row, "step_time_s": None, "spread_s": None, "status": status, "why": why}
    row |= _figures(outcome)
    if failed is not None and outcome.ok:
        row["why"] = f"its best until it raised {failed.why}"
    return row


def _figures(outcome: Measurement) -> dict[str, Any]:
    return {
        "step_time_s": outcome.step_time_s if outcome.ok else None,
        "spread_s": outcome.spread_s if outcome.ok else None,
        "samples": len(outcome.samples_s),
        "status": outcome.status,
        **({"why": outcome.why} if outcome.why else {}),
    }


HEURISTICS = ("single", "blocks", "round-robin", "expert", "eft", "heft")
EVALUATIONS = 64
WARM_UP = "portfolio"
WARM_UP_EVALUATIONS = 400
"""Enough for every kernel of `portfolio` to be called: those of heuristics, which few evaluations leave out, and of
annealing, the last."""


def place_quickly(problem: Problem, simulator: Simulator, name: str) -> MethodResult:
    """What a heuristic places, in a moment."""
    try:
        found = find(problem, name, simulator, Budget(EVALUATIONS))
    except UserError:
        raise
    except Exception as error:  # whatever it is: one that failed is one row, not the run
        return MethodResult(failure=Failure.of(error))
    if found.devices is None:
        why = "pins and exclusions leave it no placement" if not found.evaluations else "found no feasible placement"
        return MethodResult(num_scored=found.evaluations, why=why)
    history = found.history if problem.host.is_simulated else ()  # a measured row is not followed by simulated steps
    return MethodResult(simulator.plan(found.devices), found.evaluations, history=history)


def compile_kernels(problem: Problem, simulator: Simulator) -> None:
    """Runs a short search: kernels are compiled, or read from disk, before the clock of any method starts."""
    with contextlib.suppress(Exception):  # its own row will say so
        find(problem, WARM_UP, simulator, Budget(WARM_UP_EVALUATIONS))


def num_rows(methods: tuple[str, ...]) -> int:
    """What the final table measures with these methods: the reference, and plain PyTorch with all threads and one."""
    return len({*HEURISTICS, *methods}) + 3
