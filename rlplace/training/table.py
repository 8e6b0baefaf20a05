"""The final table: every method's placement, measured in turn in one race, and plain PyTorch beside them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from rlplace.errors import InvalidValue
from rlplace.format import format_seconds
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.measurement import Measurement
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.timing.eager_step import EagerRecipe, Other, check_has_values
from rlplace.measure.timing.race import RaceProtocol
from rlplace.measure.timing.threads import usable_cores
from rlplace.report.printed import as_html, as_text, results_table
from rlplace.say import Say
from rlplace.search.task import BestSoFar, Failure
from rlplace.session.calibrate import cut_words
from rlplace.training.config import TrainConfig
from rlplace.training.forecast import LEAST_RACE_S, LOAD_S_PER_OP, limit_s, race_within


@dataclass(frozen=True)
class Entry:
    """What a method brings to the table.

    Attributes:
        method: its name.
        plan: what it proposes; None for a row that is no placement.
        placements: how many placements it tried.
        facts: more keys of its row (`measured`, ...).
        why: the reason for having no plan.
        history: the best step time so far wherever it improved; empty where the host was not asked on the way.
        failure: what it raised; a plan is then the best that it had found. None for all others.
    """

    method: str
    plan: Plan | None
    placements: int = 1
    facts: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    history: tuple[BestSoFar, ...] = ()
    failure: Failure | None = None


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
    entries: list[Entry],
    eager: Other | None,
    eager_why: str,
    measure: Callable[[list[Plan], list[Other]], list[Measurement]],
    one_thread: Other | None = None,
) -> Table:
    """The table of `entries`; equal plans share one measurement.

    Args:
        entries: one a method.
        eager: plain PyTorch; None skips that row.
        eager_why: why it is skipped.
        measure: measures plans and what else there is in one race.
        one_thread: plain PyTorch with one thread, a figure in the row of plain PyTorch; None leaves it out.
    """
    distinct: dict[str, int] = {}
    plans: list[Plan] = []
    for entry in entries:
        if entry.plan is not None and entry.plan.fingerprint not in distinct:
            distinct[entry.plan.fingerprint] = len(plans)
            plans.append(entry.plan)
    outcomes = measure(plans, [other for other in (eager, one_thread) if other is not None])
    rows = []
    for entry in entries:
        outcome = None if entry.plan is None else outcomes[distinct[entry.plan.fingerprint]]
        rows.append(_row(entry, outcome))
    eager_row = {"method": "eager", "placement": False, "placements": 0, "history": []}
    if eager is None:
        rows.append({**eager_row, "step_time_s": None, "spread_s": None, "status": "skipped", "why": eager_why})
    else:
        rows.append({**eager_row, **_figures(outcomes[len(plans)])})
        if one_thread is not None and outcomes[-1].ok:
            rows[-1]["one_thread_s"] = outcomes[-1].step_time_s
    placed = [row for row in rows if row["placement"] and row["status"] == "ok"]
    best = min(placed, key=lambda row: row["step_time_s"])["method"] if placed else ""
    return Table(tuple(rows), best, {entry.method: entry.plan for entry in entries if entry.plan is not None})


def measure_table(
    problem: Problem,
    evaluator: Evaluator,
    entries: list[Entry],
    config: TrainConfig,
    say: Say,
    left_s: float = math.inf,
) -> Table:
    """The table of `entries`, every plan measured in one race, or simulated where the host is.

    Args:
        problem: that is placed.
        evaluator: runs plans.
        entries: one a method.
        config: of the run.
        say: told if time cuts the race short.
        left_s: seconds for it, where all of the run has a limit: with few, fewer entries are raced for fewer rounds.
    """
    rounds, most_s, warmup = config.search.table_rounds, limit_s(config.budget_s), RaceProtocol().warmup
    eager, one_thread, why = _eager(problem, evaluator)
    if math.isfinite(left_s) and evaluator.is_measured:
        step_s, load_s = float(problem.costs.op_time_s.sum(axis=0).min()), LOAD_S_PER_OP * problem.graph.num_ops
        count = len({entry.plan.fingerprint for entry in entries if entry.plan is not None})
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


def _the_first(entries: list[Entry], most: int) -> list[Entry]:
    """The entries, but at most so many distinct plans: of what was searched, then of one device, then of the others."""
    ranked = sorted(entries, key=lambda entry: (not entry.facts, entry.method != "single"))
    plans = dict.fromkeys(entry.plan.fingerprint for entry in ranked if entry.plan is not None)
    kept = {*list(plans)[:most]}
    why = "no time was left to race it"
    return [
        entry if entry.plan is None or entry.plan.fingerprint in kept else replace(entry, plan=None, why=why)
        for entry in entries
    ]


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


def _row(entry: Entry, outcome: Measurement | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "method": entry.method,
        "placement": True,
        "placements": entry.placements,
        "history": [best.to_list() for best in entry.history],
        **entry.facts,
    }
    failed = entry.failure
    if failed is not None:
        row["traceback"] = failed.traceback
    if outcome is None:
        status, why = ("skipped", entry.why) if failed is None else ("error", failed.why)
        return {**row, "step_time_s": None, "spread_s": None, "status": status, "why": why}
    row |= _figures(outcome)
    if failed is not None and outcome.ok:
        row["why"] = f"its best until it raised {failed.why}"
    return row


def _figures(outcome: Measurement) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "step_time_s": outcome.step_time_s if outcome.ok else None,
        "spread_s": outcome.spread_s if outcome.ok else None,
        "samples": len(outcome.samples_s),
        "status": outcome.status,
    }
    if outcome.why:
        figures["why"] = outcome.why
    return figures
