"""The table of a run as a picture: a bar for each method, its spread, and plain PyTorch as a line."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

from rlplace.errors import InvalidValue
from rlplace.files import write_bytes_atomic
from rlplace.report.drawing import Axes, Figure, FigureCanvasAgg

_INK, _FAINT_INK, _GRID = "#1F2933", "#5B6773", "#DDE2E7"
_BEST, _OTHER, _EAGER = "#0072B2", "#9CC3DB", "#D55E00"
_WIDTH_IN, _ROW_IN, _AROUND_IN, _DPI = 10.0, 0.36, 1.5, 150
_NAMES_IN, _WORDS_IN = 1.35, 2.0


def save_field_png(path: str | os.PathLike[str], result: Mapping[str, Any], *, title: str) -> None:
    """Writes the rows of `result.json` as horizontal bars, fastest first, the winner marked.

    A line over a bar's end is its spread: half the interquartile range to both sides. Plain PyTorch is a line across
    all of them. Rows that were not timed are left out.

    Args:
        path: of the PNG file.
        result: with `rows`, `best` and `measured`, as `result.json` holds them.
        title: above the bars.

    Raises:
        InvalidValue: no row has a step time.
        FileProblem: the file cannot be written.
    """
    timed = [row for row in result["rows"] if row.get("status", "ok") == "ok" and row.get("step_time_s")]
    placed = sorted((row for row in timed if row.get("placement", True)), key=lambda row: -float(row["step_time_s"]))
    if not placed:
        raise InvalidValue(
            "rows", f"{len(result['rows'])} rows", "at least one with a step time", where="field picture"
        )
    eager = next((row for row in timed if row["method"] == "eager"), None)
    buffer = io.BytesIO()
    _draw(placed, eager, result, title).savefig(buffer, format="png", dpi=_DPI)
    write_bytes_atomic(path, buffer.getvalue())


def _draw(
    placed: Sequence[Mapping[str, Any]], eager: Mapping[str, Any] | None, result: Mapping[str, Any], title: str
) -> Figure:
    height_in = _AROUND_IN + _ROW_IN * len(placed)
    figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    box = (_NAMES_IN / _WIDTH_IN, 0.62 / height_in, 1 - (_NAMES_IN + _WORDS_IN) / _WIDTH_IN, 1 - 1.4 / height_in)
    axes = figure.add_axes(box)
    best = (result.get("best") or {}).get("method")
    single_s = next((float(row["step_time_s"]) for row in placed if row["method"] == "single"), None)
    for place, row in enumerate(placed):
        step_ms, spread_ms = float(row["step_time_s"]) * 1e3, float(row.get("spread_s") or 0.0) * 1e3
        is_best = row["method"] == best
        axes.barh(place, step_ms, height=0.66, color=_BEST if is_best else _OTHER, linewidth=0, zorder=2)
        if spread_ms:
            axes.plot([step_ms - spread_ms, step_ms + spread_ms], [place] * 2, color=_INK, linewidth=1.3, zorder=4)
        words = f"{step_ms:.1f} ms" + (f"   {float(row['step_time_s']) / single_s:.2f}×" if single_s else "")
        _beside(axes, 1.0, 12, place, words, "left", is_best)
        _beside(axes, 0.0, -9, place, f"{'★ ' if is_best else ''}{row['method']}", "right", is_best)
    _finish(axes, placed, eager, str("measured" if result.get("measured") else "simulated"))
    figure.text(
        0.2 / _WIDTH_IN,
        1 - 0.2 / height_in,
        title,
        fontsize=13.5,
        fontweight="bold",
        color=_INK,
        va="top",
        parse_math=False,
    )
    return figure


def _finish(axes: Axes, placed: Sequence[Mapping[str, Any]], eager: Mapping[str, Any] | None, kind: str) -> None:
    longest_s = max(float(row["step_time_s"]) + float(row.get("spread_s") or 0.0) for row in placed)
    if eager is not None:
        eager_ms = float(eager["step_time_s"]) * 1e3
        longest_s = max(longest_s, eager_ms / 1e3)
        axes.axvline(eager_ms, color=_EAGER, linewidth=1.6, linestyle=(0, (4, 2)), zorder=3)
        axes.annotate(
            f"eager PyTorch, {eager_ms:.1f} ms",
            (eager_ms, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=9.5,
            color=_EAGER,
        )
    axes.set_xlim(0.0, longest_s * 1e3 * 1.03)
    axes.set_ylim(-0.6, len(placed) - 0.4)
    axes.set_yticks([])
    axes.set_xlabel(f"{kind} step, ms: less is better; beside it, over the best single device", fontsize=9.5)
    axes.xaxis.label.set_color(_FAINT_INK)
    axes.tick_params(axis="x", length=0, labelsize=9, labelcolor=_FAINT_INK)
    axes.grid(axis="x", color=_GRID, linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _beside(axes: Axes, x: float, shift: float, place: int, text: str, side: str, is_best: bool) -> None:
    axes.annotate(
        text,
        (x, place),
        xycoords=("axes fraction", "data"),
        xytext=(shift, 0),
        textcoords="offset points",
        ha=side,
        va="center",
        fontsize=10,
        color=_INK,
        fontweight="bold" if is_best else "normal",
        parse_math=False,
    )
