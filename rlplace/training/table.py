"""The final table: every method's placement, measured in turn in one race, and plain PyTorch beside them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlplace.errors import InvalidValue
from rlplace.measure.evaluator import Evaluator
from rlplace.measure.measurement import Measurement
from rlplace.measure.plan import Plan
from rlplace.measure.problem import Problem
from rlplace.measure.run.eager.eager_recipe import EagerRecipe, Other
from rlplace.measure.run.eager.eager_step import check_has_values
from rlplace.measure.run.race import RaceProtocol
from rlplace.report.printed import as_html, as_text
from rlplace.report.table import results_table
from rlplace.runs.durations import cut_words, limit_s
from rlplace.say import Say
from rlplace.search.best_so_far import BestSoFar
from rlplace.search.failure import Failure
from rlplace.training.config import TrainConfig


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
) -> Table:
    """The table of `entries`; equal plans share one measurement.

    Args:
        entries: one a method.
        eager: plain PyTorch; None skips that row.
        eager_why: why it is skipped.
        measure: measures plans and what else there is in one race.
    """
    distinct: dict[str, int] = {}
    plans: list[Plan] = []
    for entry in entries:
        if entry.plan is not None and entry.plan.fingerprint not in distinct:
            distinct[entry.plan.fingerprint] = len(plans)
            plans.append(entry.plan)
    outcomes = measure(plans, [] if eager is None else [eager])
    rows = []
    for entry in entries:
        outcome = None if entry.plan is None else outcomes[distinct[entry.plan.fingerprint]]
        rows.append(_row(entry, outcome))
    eager_row = {"method": "eager", "placement": False, "placements": 0, "history": []}
    if eager is None:
        rows.append({**eager_row, "step_time_s": None, "spread_s": None, "status": "skipped", "why": eager_why})
    else:
        rows.append({**eager_row, **_figures(outcomes[-1])})
    placed = [row for row in rows if row["placement"] and row["status"] == "ok"]
    best = min(placed, key=lambda row: row["step_time_s"])["method"] if placed else ""
    return Table(tuple(rows), best, {entry.method: entry.plan for entry in entries if entry.plan is not None})


def measure_table(problem: Problem, evaluator: Evaluator, entries: list[Entry], config: TrainConfig, say: Say) -> Table:
    """The table of `entries`, every plan measured in one race, or simulated where the host is.

    Args:
        problem: that is placed.
        evaluator: runs plans.
        entries: one a method.
        config: of the run.
        say: told if time cuts the race short.
    """
    rounds, deadline_s = config.search.table_rounds, time.monotonic() + limit_s(config.budget_s)
    protocol = RaceProtocol(max_rounds=rounds, min_rounds=rounds, hopeless=float("inf"))
    eager, why = _eager(problem, evaluator)

    def measure(plans: list[Plan], others: list[Other]) -> list[Measurement]:
        outcomes = evaluator.measure_plans(plans, protocol, others=others, deadline_s=deadline_s)
        ran = min((len(outcome.samples_s) for outcome in outcomes if outcome.ok), default=rounds)
        if evaluator.is_measured and ran < rounds:
            say(cut_words("the final table", ran, rounds))
        return outcomes

    return fill_table(entries, eager, why, measure)


def _eager(problem: Problem, evaluator: Evaluator) -> tuple[EagerRecipe | None, str]:
    """Plain PyTorch as something to race against, and why not where it cannot."""
    if not evaluator.is_measured:
        return None, "the host is simulated"
    try:
        check_has_values(problem.graph)
    except InvalidValue as error:
        return None, str(error)
    return EagerRecipe(), ""


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
