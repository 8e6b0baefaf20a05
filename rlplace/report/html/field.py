"""The table of the run: every method's placement, and plain PyTorch beside them."""

from __future__ import annotations

import math

from rlplace.report.format import NOTHING, format_ms
from rlplace.report.html.run_data import Row, RunData
from rlplace.report.html.tags import Raw, Section, paragraph, table

NO_PLACEMENT_NOTE = "† no placement: timed for comparison, cannot be handed back."


def field_section(data: RunData) -> Section:
    """Rows as the run printed them: placements first, fastest first, what failed last."""
    rows = sorted(
        data.rows,
        key=lambda row: (not row.placement, row.step_s or math.inf, row.method != data.best, row.method),
    )
    longest = max((_high(row) for row in rows), default=0.0)
    single_s, eager_s = data.step_s("single"), data.step_s("eager")
    cells: list[list[object]] = []
    styles: dict[int, str] = {}
    for index, row in enumerate(rows):
        is_best = row.method == data.best and row.placement
        mark = " ★" if is_best else "" if row.placement else " †"
        styles[index] = "best" if is_best else "" if row.placement else "apart"
        cells.append(
            [
                f"{row.method}{mark}",
                NOTHING if row.step_s is None else format_ms(row.step_s),
                f"± {format_ms(row.spread_s)}" if row.step_s and row.spread_s else "",
                Raw(_bar(row, longest)),
                _over(row.step_s, single_s),
                _over(row.step_s, eager_s),
                f"{row.placements:,}" if row.placements else "",
                f"{row.measured:,}" if row.measured else "",
                _note(row),
            ]
        )
    if not any(row.step_s and row.spread_s for row in rows):
        how = "simulated" if not data.is_measured else "measured"
        lead = f"Step times are {how}; less is better."
    else:
        lead = (
            "Median step time of every row, and half the interquartile range of its samples, all measured in turn in "
            "one race. A lead within the spread is no lead."
        )
    heads = ["method", "step, ms", "", "", "of one device", "of eager", "placements", "measured", "notes"]
    body = table(heads, cells, numbers=(1, 2, 4, 5, 6, 7), styles=styles, minor=(3, 5, 6, 7, 8))
    if any(not row.placement for row in rows):
        body += paragraph(NO_PLACEMENT_NOTE, "note")
    return Section("field", "The field", lead, body)


def _high(row: Row) -> float:
    return (row.step_s or 0.0) + (row.spread_s or 0.0)


def _bar(row: Row, longest: float) -> str:
    """The step time as a bar, its spread as a line over the end; empty where it was not timed."""
    if row.step_s is None or longest <= 0:
        return ""
    width, spread = 100 * row.step_s / longest, 100 * (row.spread_s or 0.0) / longest
    whisker = f'<i style="left:{max(width - spread, 0):.2f}%;width:{min(2 * spread, 100):.2f}%"></i>' if spread else ""
    return f'<span class="bar"><b style="width:{width:.2f}%"></b>{whisker}</span>'


def _over(step_s: float | None, other_s: float | None) -> str:
    return f"{step_s / other_s:.2f}×" if step_s and other_s else ""


def _note(row: Row) -> str:
    if row.status == "ok":
        return row.why
    return f"{row.status}: {row.why}" if row.why else row.status
