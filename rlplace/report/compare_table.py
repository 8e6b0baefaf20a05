"""The comparison as people read it: fastest first, the winner and the bound marked, what is no placement apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from rlplace.report.format import NOTHING, format_bytes, format_ms, format_seconds

NO_PLACEMENT_NOTE = "† no placement: for comparison, cannot be handed back"


def compare_table(comparison: Mapping[str, Any]) -> Table:
    """What `rlplace compare --json` prints, as a table for a terminal.

    Args:
        comparison: with `rows`, `objective`, `best` and the bound.
    """
    best, bound_ms = comparison["best"], _bound_ms(comparison)
    rows = sorted(comparison["rows"], key=lambda row: (*_order(row)[:2], not _is(row, best), *_order(row)[2:]))
    has_seeds = len({row["seed"] for row in rows}) > 1
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, caption_justify="left")
    table.add_column("method", no_wrap=True)
    if has_seeds:
        table.add_column("seed", justify="right", no_wrap=True)
    table.add_column(_heading(comparison), justify="right", no_wrap=True)
    if comparison.get("measured"):
        table.add_column("", justify="left", no_wrap=True)
        table.add_column("simulated", justify="right", no_wrap=True)
    if comparison.get("truth"):
        table.add_column("as known", justify="right", no_wrap=True)
        table.add_column("measured", justify="right", no_wrap=True)
    for heading in ("over\nbound", "evaluations", "found\nin", "peak\nmemory"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("notes", overflow="fold")
    is_apart = False
    for row in rows:
        if not row["placement"] and not is_apart:
            table.add_section()
            is_apart = True
        is_best = _is(row, best)
        style = "bold green" if is_best and row["placement"] else "dim" if not row["placement"] else None
        table.add_row(*_cells(row, comparison, is_best=is_best, has_seeds=has_seeds), style=style)
    table.add_section()
    blank = [Text("")] * has_seeds
    table.add_row(Text("lower bound"), *blank, Text(format_ms(bound_ms / 1e3)), style="cyan")
    notes = [f"bound: {comparison['lower_bound']}"] + ([NO_PLACEMENT_NOTE] if is_apart else [])
    if comparison.get("truth"):
        notes.append(f"truth: {comparison['truth']}; `as known` is what the simulator says that knows nothing of it")
    table.caption = "\n".join(notes)
    return table


def _cells(row: Mapping[str, Any], comparison: Mapping[str, Any], *, is_best: bool, has_seeds: bool) -> list[Text]:
    mark = " ★" if is_best and row["placement"] else "" if row["placement"] else " †"
    value_ms, gap = _value_ms(row), row["gap_to_bound"]
    cells = [Text(f"{row['method']}{mark}")]
    if has_seeds:
        cells.append(Text(str(row["seed"])))
    cells.append(Text(format_ms(value_ms / 1e3)))
    if comparison.get("measured"):
        spread_s, simulated_s = row.get("spread_s"), row.get("simulated_s")
        cells.append(Text("" if spread_s is None else f"± {format_ms(spread_s)}"))
        cells.append(Text(NOTHING if simulated_s is None else format_ms(simulated_s)))
    if comparison.get("truth"):
        simulated_s = row["simulated_s"]
        cells.append(Text(NOTHING if simulated_s is None else format_ms(simulated_s)))
        cells.append(Text(f"{row['measured']}"))
    cells.append(Text(NOTHING if gap is None else f"{gap:+.1%}"))
    cells.append(Text(f"{row['evaluations']:,}" if row["evaluations"] else ""))
    cells.append(Text(format_seconds(row["plan_s"]) if row["plan_s"] else ""))
    cells.append(Text(format_bytes(max(row["peak_bytes"])) if row["peak_bytes"] else ""))
    why = row.get("why", "")
    status = "" if row["status"] == "ok" else row["status"]
    cells.append(Text(": ".join(part for part in (status, why) if part)))
    return cells


def _order(row: Mapping[str, Any]) -> tuple[bool, float, str, int]:
    return not row["placement"], _value_ms(row), row["method"], row["seed"]


def _is(row: Mapping[str, Any], best: Mapping[str, Any] | None) -> bool:
    return best is not None and (row["method"], row["seed"]) == (best["method"], best["seed"])


def _heading(comparison: Mapping[str, Any]) -> str:
    words = {"latency": "step, ms", "throughput": "step, ms", "max-load": "load, ms", "piece-latency": "ms"}
    return words[comparison["objective"]]


def _value_ms(row: Mapping[str, Any]) -> float:
    if row["status"] != "ok":
        return math.inf
    value = row["value_ms"] if row["value_ms"] is not None else row["step_time_s"]
    if value is None:
        return math.inf
    return float(value) if row["value_ms"] is not None else float(value) * 1e3


def _bound_ms(comparison: Mapping[str, Any]) -> float:
    if comparison["lower_bound_ms"] is not None:
        return float(comparison["lower_bound_ms"])
    return float(comparison["lower_bound_s"]) * 1e3
