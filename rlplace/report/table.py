"""The final table: what each method's placement measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from rlplace.report.format import NOTHING, format_ms

NO_PLACEMENT_NOTE = "† no placement: measured for comparison, cannot be handed back"


def results_table(rows: Sequence[Mapping[str, object]], *, best: str | None = None, title: str | None = None) -> Table:
    """Rows of `result.json` as a table, fastest first, what failed last.

    Rows that are no placement (`"placement": false`) form a section of their own below, with a note. The ratio is to
    the row called `single`.

    Args:
        rows: with `method`, `step_time_s`, `spread_s`, `placements`, `placement`, `status`, and `measured` and `why`
            where they apply.
        best: the method to mark as winner; by default the fastest placement.
        title: above the table.
    """
    placements = sorted((row for row in rows if row.get("placement", True)), key=_order)
    others = sorted((row for row in rows if not row.get("placement", True)), key=_order)
    if best is None:
        best = next((str(row["method"]) for row in placements if math.isfinite(_step_time_s(row))), None)
    single_s = next((_step_time_s(row) for row in rows if row["method"] == "single"), math.inf)
    table = Table(
        title=title,
        title_style="bold",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
    )
    table.add_column("method", no_wrap=True)
    table.add_column("step, ms", justify="right", no_wrap=True)
    table.add_column("", justify="left", no_wrap=True)
    table.add_column("vs single", justify="right", no_wrap=True)
    table.add_column("placements", justify="right", no_wrap=True)
    table.add_column("notes", overflow="fold")
    for row in placements:
        is_best = row["method"] == best
        table.add_row(*_cells(row, single_s, mark=" ★" if is_best else ""), style="bold green" if is_best else None)
    if others:
        table.add_section()
        for row in others:
            table.add_row(*_cells(row, single_s, mark=" †"), style="dim")
        table.caption = NO_PLACEMENT_NOTE
    return table


def _cells(row: Mapping[str, object], single_s: float, *, mark: str) -> list[Text]:
    step_time_s, spread_s = _step_time_s(row), _number(row.get("spread_s"))
    ratio = step_time_s / single_s if single_s > 0 else math.inf
    is_timed = math.isfinite(step_time_s)
    tried = row.get("placements")
    status, why = str(row.get("status", "ok")), str(row.get("why") or "")
    notes = [f"{row['measured']:,} measured"] if row.get("measured") else []
    if row.get("one_thread_s") is not None:
        notes.append(f"one thread {format_ms(_number(row['one_thread_s']))}")
    if status != "ok":
        notes.append(f"{status}: {why}" if why else status)
    elif why:
        notes.append(why)
    return [
        Text(f"{row['method']}{mark}"),
        Text(format_ms(step_time_s)),
        Text(f"± {format_ms(spread_s)}" if is_timed and math.isfinite(spread_s) else ""),
        Text(f"{ratio:.2f}×" if is_timed and math.isfinite(single_s) else NOTHING),
        Text(f"{tried:,}" if isinstance(tried, int) and tried else ""),
        Text("; ".join(notes)),
    ]


def _order(row: Mapping[str, object]) -> float:
    return _step_time_s(row)


def _step_time_s(row: Mapping[str, object]) -> float:
    """The row's step time, infinite where it failed or was not timed."""
    step_time_s = _number(row.get("step_time_s"))
    return step_time_s if row.get("status", "ok") == "ok" and not math.isnan(step_time_s) else math.inf


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.inf
