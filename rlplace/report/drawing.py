"""Pictures in files, drawn by matplotlib, which obeys no `matplotlibrc` of the current folder.

That file may be a stranger's: it can make texts LaTeX's, and older versions of matplotlib evaluate parts of it.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rlplace.errors import InvalidValue
from rlplace.files import write_bytes_atomic
from rlplace.format import NOTHING
from rlplace.process import unseen
from rlplace.report.plots import FEW_SEEDS, SERIES_COLORS, Curve, Plot, agreement, best_so_far

with unseen("matplotlibrc"):
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
    from matplotlib.transforms import Bbox

__all__ = ["Axes", "Figure", "MaxNLocator", "Patch", "PolyCollection"]  # what `timeline` draws with

DPI = 150
INK, FAINT_INK, GRID = "#1F2933", "#5B6773", "#DDE2E7"
_BAND, _BEST, _OTHER, _EAGER = "#E9EDF1", "#0072B2", "#9CC3DB", "#D55E00"
_DASHES, _MARKERS = ("-", "--", ":", "-."), ("o", "s", "^", "D", "v", "P", "X", "*")
_CURVES_IN, _SCATTER_IN, _FIELD_IN, _ROW_IN, _AROUND_ROWS_IN = (12.0, 5.6), (7.2, 7.0), 10.0, 0.36, 1.5
_NAMES_IN, _WORDS_IN, _LEGEND_MARGIN_IN = 1.35, 2.0, 0.1


def new_figure(
    width_in: float, height_in: float, title: str, left_in: float, top_in: float, size: float = 13.5
) -> Figure:
    """A white figure with a title, in which `$` starts no formula."""
    figure = Figure(figsize=(width_in, height_in), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    at = left_in / width_in, 1 - top_in / height_in
    figure.text(*at, title, ha="left", va="top", fontsize=size, fontweight="bold", color=INK, parse_math=False)
    return figure


def save_figure(path: str | os.PathLike[str], figure: Figure, **options: Any) -> None:
    """Writes a figure as PNG, whole or not at all.

    Raises:
        FileProblem: the file cannot be written.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, **options)
    write_bytes_atomic(path, buffer.getvalue())


def save_best_so_far_png(
    path: str | os.PathLike[str], curves: Sequence[Curve], *, title: str, kind: str = "simulated"
) -> None:
    """Writes a picture of the best step time so far: over placements on the left, over seconds on the right.

    Each method is a line, the median over its seeds, and a band between their quartiles. Placements are those measured
    where any were, else those scored. Step times are over that of the best single device; in ms where a curve has none.
    An axis on which the curves span more than two decades is logarithmic.

    Args:
        path: of the PNG file.
        curves: one a method and seed; a method that never found anything is left out.
        title: above the picture.
        kind: of the step times: `simulated` or `measured`.

    Raises:
        InvalidValue: a history without four columns.
        FileProblem: the file cannot be written.
    """
    is_ratio = all(math.isfinite(curve.single_s) and curve.single_s > 0 for curve in curves)
    spent = "measured" if any(curve.spent[1] for curve in curves) else "evaluations"
    levels = {"one device": 1.0} if is_ratio else {}
    plots = [best_so_far(curves, axis, kind=kind, is_ratio=is_ratio, levels=levels) for axis in (spent, "seconds")]
    width_in, height_in = _CURVES_IN
    figure = new_figure(width_in, height_in, title, 0.07 * width_in, 0.035 * height_in)
    panels = [figure.add_axes((left, 0.115, 0.355, 0.745)) for left in (0.07, 0.455)]
    for panel, plot in zip(panels, plots, strict=True):
        _draw(panel, plot)
        panel.set_ylim(min(one.y.low for one in plots), max(one.y.high for one in plots))
    panels[1].set_ylabel("")
    panels[1].tick_params(labelleft=False)
    series = plots[0].series
    if not series:
        panels[0].text(0.5, 0.5, "no placement was found", transform=panels[0].transAxes, ha="center", color=FAINT_INK)
    if any(one.low is not None for one in series):
        note = f"median over seeds, and between their quartiles (fewer than {FEW_SEEDS} seeds: least to greatest)"
        figure.text(0.07, 0.905, note, fontsize=9.5, color=FAINT_INK, ha="left", va="top")
    if series:
        ranked = sorted(enumerate(series), key=lambda pair: float(pair[1].y[-1]))
        legend = figure.legend(
            [Line2D([], [], color=one.color, ls=_dash(number), linewidth=1.7) for number, one in ranked],
            [f"{one.name}  {one.y[-1]:.3g}" for _, one in ranked],
            loc="upper left",
            bbox_to_anchor=(0.82, 0.875),
            fontsize=9,
            labelcolor=INK,
            frameon=False,
            title="method, and where it ends",
            title_fontsize=9,
        )
        legend.get_title().set_color(FAINT_INK)
        for text in legend.get_texts():
            text.set_parse_math(False)
        width_in = max(width_in, legend.get_window_extent().x1 / figure.dpi + _LEGEND_MARGIN_IN)
    save_figure(path, figure, bbox_inches=Bbox.from_extents(0.0, 0.0, width_in, height_in))


def save_fidelity_png(
    path: str | os.PathLike[str],
    simulated_s: ArrayLike,
    measured_s: ArrayLike,
    kinds: Sequence[str],
    metrics: Mapping[str, float | None],
    title: str = "Simulated and measured step times",
) -> None:
    """Writes a scatter plot of simulated over measured step times, with the line y = x and a band of ±10 %.

    Points that were not timed on both sides are left out, and the plot says how many. Axes are logarithmic where step
    times differ by more than five times.

    Args:
        path: of the PNG file.
        simulated_s: (B,) seconds.
        measured_s: (B,) seconds.
        kinds: B kinds of placement (`random`, `blocks`, ...), each with a colour and a marker.
        metrics: name to figure, listed in the plot: `spearman`, `median_abs_rel_error`, ...
        title: above the plot.

    Raises:
        InvalidValue: lengths differ.
        FileProblem: the file cannot be written.
    """
    simulated, measured = np.asarray(simulated_s, dtype=np.float64), np.asarray(measured_s, dtype=np.float64)
    for name, length in (("measured_s", measured.size), ("kinds", len(kinds))):
        if length != simulated.size:
            raise InvalidValue(
                name, f"{length} entries", f"{simulated.size}, one for each simulated step time", where="fidelity plot"
            )
    pairs = np.stack((simulated, measured), axis=-1)
    is_timed = (np.isfinite(pairs) & (pairs > 0)).all(axis=-1)
    of_kind = {kind: pairs[is_timed & (np.array(kinds) == kind)] for kind in dict.fromkeys(kinds)}
    width_in, height_in = _SCATTER_IN
    figure = new_figure(width_in, height_in, title, 0.115 * width_in, 0.035 * height_in)
    axes = figure.add_axes((0.115, 0.095, 0.85, 0.815))
    _draw(axes, agreement(of_kind))
    legend = axes.legend(
        loc="upper left",
        fontsize=9.5,
        labelcolor=INK,
        frameon=True,
        edgecolor="none",
        facecolor="white",
        framealpha=0.85,
        handletextpad=0.5,
        borderaxespad=0.6,
    )
    legend.set_zorder(4)
    for text in legend.get_texts():
        text.set_parse_math(False)
    lines = [f"{name.replace('_', ' ')}  {_metric(name, value)}" for name, value in metrics.items()]
    axes.text(
        0.98,
        0.03,
        "\n".join(lines if is_timed.all() else [*lines, f"failed, left out  {np.count_nonzero(~is_timed)}"]),
        transform=axes.transAxes,
        ha="right",
        va="bottom",
        fontsize=9.5,
        color=INK,
        linespacing=1.5,
        zorder=4,
        parse_math=False,
        bbox={"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 3.0},
    )
    save_figure(path, figure)


def _metric(name: str, value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value:.1%}".replace("%", " %") if name.endswith(("_error", "_regret")) else f"{value:.3f}"


def _dash(number: int) -> str:
    return _DASHES[number // len(SERIES_COLORS) % len(_DASHES)]


def _draw(axes: Axes, plot: Plot) -> None:
    """Draws a plot on axes that have nothing yet."""
    if plot.tolerance:
        line, share = np.array([plot.x.low, plot.x.high]), plot.tolerance
        label = f"± {share:.0%}".replace("%", " %")
        axes.fill_between(line, line * (1 - share), line * (1 + share), color=_BAND, linewidth=0, zorder=1, label=label)
        axes.plot(line, line, color=FAINT_INK, linewidth=1.2, zorder=2)
    for number, one in enumerate(plot.series):
        look: dict[str, Any] = {"color": one.color, "label": one.name, "zorder": 3}
        if plot.mark == "points":
            marker = _MARKERS[number % len(_MARKERS)]
            axes.scatter(one.x, one.y, s=38, alpha=0.9, linewidths=0.6, edgecolors="white", marker=marker, **look)
            continue
        x = np.maximum(one.x, plot.x.low)
        axes.step(x, one.y, where="post", linestyle=_dash(number), linewidth=1.7, **look)
        if one.low is not None and one.high is not None:
            axes.fill_between(x, one.low, one.high, step="post", color=one.color, alpha=0.16, linewidth=0, zorder=2)
    if plot.series:
        for level in plot.levels.values():
            axes.axhline(level, color=FAINT_INK, linewidth=0.8, zorder=1.5)
    axes.set(xscale="log" if plot.x.is_log else "linear", yscale="log" if plot.y.is_log else "linear")
    axes.set(xlim=(plot.x.low, plot.x.high), ylim=(plot.y.low, plot.y.high))
    for shown, axis in ((plot.x, axes.xaxis), (plot.y, axes.yaxis)):
        axis.set_label_text(shown.title, fontsize=10, color=FAINT_INK)
        if shown.is_log:
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if shown.high < 100 * shown.low else (1.0,)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID)
    axes.tick_params(which="both", length=0, labelsize=9, labelcolor=FAINT_INK)
    axes.grid(color=GRID, linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)


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
    step_s = {
        row["method"]: float(row["step_time_s"])
        for row in result["rows"]
        if row.get("status", "ok") == "ok" and row.get("step_time_s")
    }
    rows = [row for row in result["rows"] if row["method"] in step_s and row.get("placement", True)]
    placed = sorted(rows, key=lambda row: -step_s[row["method"]])
    if not placed:
        raise InvalidValue(
            "rows", f"{len(result['rows'])} rows", "at least one with a step time", where="field picture"
        )
    height_in = _AROUND_ROWS_IN + _ROW_IN * len(placed)
    figure = new_figure(_FIELD_IN, height_in, title, 0.2, 0.2)
    width = 1 - (_NAMES_IN + _WORDS_IN) / _FIELD_IN
    axes = figure.add_axes((_NAMES_IN / _FIELD_IN, 0.62 / height_in, width, 1 - 1.4 / height_in))
    best, single_s, eager_s = (result.get("best") or {}).get("method"), step_s.get("single"), step_s.get("eager")
    longest_ms = (eager_s or 0.0) * 1e3
    for place, row in enumerate(placed):
        name, step_ms, spread_ms = row["method"], step_s[row["method"]] * 1e3, float(row.get("spread_s") or 0.0) * 1e3
        longest_ms, weight = max(longest_ms, step_ms + spread_ms), "bold" if name == best else "normal"
        axes.barh(place, step_ms, height=0.66, color=_BEST if name == best else _OTHER, linewidth=0, zorder=2)
        if spread_ms:
            axes.plot([step_ms - spread_ms, step_ms + spread_ms], [place] * 2, color=INK, linewidth=1.3, zorder=4)
        words = f"{step_ms:.1f} ms" + (f"   {step_s[name] / single_s:.2f}×" if single_s else "")
        label_beside(axes, 1.0, place, words, shift=12, weight=weight)
        label_beside(axes, 0.0, place, f"{'★ ' if name == best else ''}{name}", weight=weight)
    if eager_s is not None:
        axes.axvline(eager_s * 1e3, color=_EAGER, linewidth=1.6, linestyle=(0, (4, 2)), zorder=3)
        axes.annotate(
            f"eager PyTorch, {eager_s * 1e3:.1f} ms",
            (eager_s * 1e3, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=9.5,
            color=_EAGER,
        )
    axes.set(xlim=(0.0, longest_ms * 1.03), ylim=(-0.6, len(placed) - 0.4))
    kind = "measured" if result.get("measured") else "simulated"
    quiet_time_axis(axes, f"{kind} step, ms: less is better; beside it, over the best single device")
    save_figure(path, figure)


def quiet_time_axis(axes: Axes, label: str) -> None:
    """Leaves of the axes' frame the time axis alone, with a grid."""
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_yticks([])
    axes.tick_params(axis="x", length=0, pad=6, labelsize=9, labelcolor=FAINT_INK)
    axes.grid(axis="x", color=GRID, linewidth=0.7, zorder=0)
    axes.set_axisbelow(True)
    axes.set_xlabel(label, fontsize=9.5, color=FAINT_INK, labelpad=6)


def label_beside(
    axes: Axes,
    x: float,
    y: float,
    text: str,
    *,
    shift: float = -9,
    size: float = 10,
    color: str = INK,
    weight: str = "normal",
) -> None:
    """Writes text beside the chart, at height `y` of the data: left of x = 0, or right of x = 1."""
    axes.annotate(
        text,
        (x, y),
        xycoords=("axes fraction", "data"),
        xytext=(shift, 0),
        textcoords="offset points",
        ha="right" if shift < 0 else "left",
        va="center",
        fontsize=size,
        color=color,
        fontweight=weight,
        parse_math=False,
    )
