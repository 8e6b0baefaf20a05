"""What all pictures are drawn with: matplotlib, which obeys no `matplotlibrc` of the current folder.

That file may be a stranger's: it can make texts LaTeX's, and older versions of matplotlib evaluate parts of it.

The best step time so far of searches, over what they had spent: the figures of it, and a picture.

How well simulated step times agree with measured ones, as a picture.

The table of a run as a picture: a bar for each method, its spread, and plain PyTorch as a line.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlplace.errors import InvalidValue
from rlplace.files import write_bytes_atomic
from rlplace.process import unseen

with unseen("matplotlibrc"):
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
    from matplotlib.transforms import Bbox

__all__ = [
    "Axes",
    "Axis",
    "Bbox",
    "Figure",
    "FigureCanvasAgg",
    "FuncFormatter",
    "Line2D",
    "LogLocator",
    "MaxNLocator",
    "NullFormatter",
    "Patch",
    "PolyCollection",
]


COLUMNS = ("evaluations", "measured", "seconds", "step_time_s")
"""Of a history, as `--json` and `result.json` hold it; the first three are what a search spends."""
AXIS_WORDS = {"evaluations": "placements scored", "measured": "placements measured", "seconds": "search time, seconds"}
LINE_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
"""Okabe and Ito's palette (2008) without its yellow, in order of first use; then again with another dash."""
LINE_STYLES = ("-", "--", ":", "-.")
FEW_SEEDS = 4
"""With fewer seeds than that the band is from the least to the greatest."""

_INK, _FAINT_INK, _GRID = "#1F2933", "#5B6773", "#DDE2E7"
_SIZE_IN, _DPI = (12.0, 5.6), 150
_LEGEND_MARGIN_IN = 0.1
_LOG_X_FROM_RATIO, _LOG_Y_FROM_RATIO = 100.0, 5.0

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Curve:
    """One run of one method.

    Attributes:
        method: its name; runs of the same name are seeds of one method.
        history: (K, 4) `COLUMNS`, a row wherever the best improved; the first three columns never fall.
        spent: evaluations, placements measured and seconds in all.
        single_s: step time on the best single device; not finite where there is none.
    """

    method: str
    history: ArrayLike
    spent: tuple[float, float, float]
    single_s: float = math.nan

    def steps(self, axis: str, *, is_ratio: bool) -> tuple[Floats, Floats]:
        """(K,) what was spent of `axis`, and (K,) step times over `single_s`, or in ms.

        Raises:
            InvalidValue: a history without four columns.
        """
        rows = np.asarray(self.history, dtype=np.float64)
        if not rows.size:
            return np.empty(0), np.empty(0)
        if rows.ndim != 2 or rows.shape[1] != len(COLUMNS):
            expected = f"(K, {len(COLUMNS)}): {', '.join(COLUMNS)}"
            raise InvalidValue("history", rows.shape, expected, where=f"curve of {self.method!r}")
        return rows[:, COLUMNS.index(axis)], rows[:, -1] / self.single_s if is_ratio else rows[:, -1] * 1e3


@dataclass(frozen=True, eq=False)
class Band:
    """The runs of one method, put together; (P,) each, constant from each point to the next.

    Attributes:
        x: what was spent.
        middle: median over the runs; infinite where half of them or more had found nothing.
        low: lower quartile, or the least of fewer than `FEW_SEEDS` runs.
        high: upper quartile, or the greatest.
        num_runs: how many.
    """

    x: Floats
    middle: Floats
    low: Floats
    high: Floats
    num_runs: int


def band_of(runs: Sequence[tuple[Floats, Floats]], end: float) -> Band:
    """Runs as (K,) x and (K,) best value each, on a grid of all their x and `end`; a value holds until the next.

    Example:
        >>> band = band_of([(np.array([1.0, 3.0]), np.array([8.0, 4.0])), (np.array([2.0]), np.array([6.0]))], 4.0)
        >>> band.x.tolist(), band.middle.tolist()
        ([1.0, 2.0, 3.0, 4.0], [inf, 7.0, 5.0, 5.0])
    """
    grid = np.unique(np.concatenate([np.array([end]), *(x for x, _ in runs)]))
    values = np.sort([_held(x, y, grid) for x, y in runs], axis=0)
    shares = (0.0, 1.0) if len(runs) < FEW_SEEDS else (0.25, 0.75)
    low, middle, high = (_quantile(values, share) for share in (shares[0], 0.5, shares[1]))
    return Band(grid, middle, low, high, len(runs))


def bands_of(curves: Sequence[Curve], axis: str, *, is_ratio: bool) -> dict[str, Band]:
    """The band of each method, in order of first use; all end where the last of them does.

    Args:
        curves: of any number of methods and seeds.
        axis: one of the first three `COLUMNS`.
        is_ratio: step times over the best single device's; in ms otherwise.
    """
    steps = [curve.steps(axis, is_ratio=is_ratio) for curve in curves]
    end = max((curve.spent[COLUMNS.index(axis)] for curve in curves), default=0.0)
    end = max([end, *(float(x[-1]) for x, _ in steps if x.size)])
    runs: dict[str, list[tuple[Floats, Floats]]] = {}
    for curve, run in zip(curves, steps, strict=True):
        runs.setdefault(curve.method, []).append(run)
    return {method: band_of(of_method, end) for method, of_method in runs.items()}


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
    buffer, figure = io.BytesIO(), _draw(curves, title, kind)
    figure.savefig(buffer, format="png", dpi=_DPI, bbox_inches=_whole(figure))
    write_bytes_atomic(path, buffer.getvalue())


def _whole(figure: Figure) -> Bbox:
    """The figure in inches, wider where the legend's names need it."""
    width, height = figure.get_size_inches()
    ends = [legend.get_window_extent().x1 / figure.dpi + _LEGEND_MARGIN_IN for legend in figure.legends]
    return Bbox.from_extents(0.0, 0.0, max([width, *ends]), height)


def _held(x: Floats, y: Floats, grid: Floats) -> Floats:
    """(P,) the last of `y` at or before each point of `grid`; infinite before the first."""
    return np.concatenate(([math.inf], y))[np.searchsorted(x, grid, side="right")]


def _quantile(values: Floats, share: float) -> Floats:
    """(P,) of sorted values (S, P), between two of them linearly; `numpy.quantile` has no answer beside infinities."""
    place = share * (len(values) - 1)
    below = int(place)
    lower: Floats = values[below]
    if place == below:
        return lower
    upper: Floats = values[below + 1]
    return lower * (below + 1 - place) + upper * (place - below)


def _draw(curves: Sequence[Curve], title: str, kind: str) -> Figure:
    figure = Figure(figsize=_SIZE_IN, dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    is_ratio = all(math.isfinite(curve.single_s) and curve.single_s > 0 for curve in curves)
    is_measured = any(curve.spent[1] for curve in curves)
    panels: list[Axes] = []
    styles = _styles(curves)
    for number, axis in enumerate(("measured" if is_measured else "evaluations", "seconds")):
        panel = figure.add_axes((0.07 + 0.385 * number, 0.115, 0.355, 0.745), sharey=panels[0] if panels else None)
        panels.append(panel)
        every = bands_of(curves, axis, is_ratio=is_ratio)
        bands = {method: band for method, band in every.items() if np.isfinite(band.middle).any()}
        _lines(panel, bands, styles)
        panel.set_xlabel(AXIS_WORDS[axis], fontsize=10, color=_FAINT_INK)
        _finish(panel)
    panels[0].set_ylabel(
        f"best {kind} step so far, {'over the best single device' if is_ratio else 'ms'}", fontsize=10, color=_FAINT_INK
    )
    panels[1].tick_params(labelleft=False)
    if not bands:
        panels[0].text(0.5, 0.5, "no placement was found", transform=panels[0].transAxes, ha="center", color=_FAINT_INK)
    if is_ratio and bands:
        for panel in panels:
            panel.axhline(1.0, color=_FAINT_INK, linewidth=0.8, zorder=1.5)
    _legend(figure, bands, styles)
    figure.text(
        0.07,
        0.965,
        title,
        fontsize=13.5,
        fontweight="bold",
        color=_INK,
        ha="left",
        va="top",
        parse_math=False,
    )
    if any(band.num_runs > 1 for band in bands.values()):
        note = f"median over seeds, and between their quartiles (fewer than {FEW_SEEDS} seeds: least to greatest)"
        figure.text(0.07, 0.905, note, fontsize=9.5, color=_FAINT_INK, ha="left", va="top")
    return figure


def _styles(curves: Sequence[Curve]) -> dict[str, tuple[str, str]]:
    """A colour and a dash for each method, no two alike for as many as there are of both."""
    names = dict.fromkeys(curve.method for curve in curves)
    return {
        name: (LINE_COLORS[k % len(LINE_COLORS)], LINE_STYLES[k // len(LINE_COLORS) % len(LINE_STYLES)])
        for k, name in enumerate(names)
    }


def _lines(panel: Axes, bands: Mapping[str, Band], styles: Mapping[str, tuple[str, str]]) -> None:
    every_x = np.concatenate([band.x for band in bands.values()] or [np.empty(0)])
    every_y = np.concatenate([band.middle for band in bands.values()] or [np.empty(0)])
    is_log = _spans(every_x[every_x > 0], _LOG_X_FROM_RATIO)
    least = float(every_x[every_x > 0].min()) if is_log else 0.0
    for method, band in bands.items():
        color, dash = styles[method]
        found = np.isfinite(band.middle)
        x = np.maximum(band.x[found], least)
        panel.step(x, band.middle[found], where="post", color=color, linestyle=dash, linewidth=1.7, zorder=3)
        if band.num_runs > 1:
            highest = np.where(np.isfinite(band.high[found]), band.high[found], band.middle[found].max())
            panel.fill_between(x, band.low[found], highest, step="post", color=color, alpha=0.16, linewidth=0, zorder=2)
    if is_log:
        panel.set_xscale("log")
        _log_ticks(panel.xaxis, (1.0,))
    else:
        panel.set_xlim(left=0.0)
    if _spans(every_y[np.isfinite(every_y)], _LOG_Y_FROM_RATIO):
        panel.set_yscale("log")
        _log_ticks(panel.yaxis, (1.0, 2.0, 5.0))


def _spans(values: Floats, ratio: float) -> bool:
    return bool(values.size) and float(values.max()) > ratio * float(values.min())


def _log_ticks(axis: Axis, subs: tuple[float, ...]) -> None:
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _finish(panel: Axes) -> None:
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        panel.spines[side].set_color(_GRID)
    panel.tick_params(which="both", length=0, labelsize=9, labelcolor=_FAINT_INK)
    panel.grid(color=_GRID, linewidth=0.6, zorder=0)
    panel.set_axisbelow(True)


def _legend(figure: Figure, bands: Mapping[str, Band], styles: Mapping[str, tuple[str, str]]) -> None:
    """Methods with the value they end at, best first."""
    if not bands:
        return
    ranked = sorted(bands, key=lambda method: float(bands[method].middle[-1]))
    lines = [Line2D([], [], color=styles[name][0], ls=styles[name][1], linewidth=1.7) for name in ranked]
    words = [f"{name}  {bands[name].middle[-1]:.3g}" for name in ranked]
    legend = figure.legend(
        lines,
        words,
        loc="upper left",
        bbox_to_anchor=(0.82, 0.875),
        fontsize=9,
        labelcolor=_INK,
        frameon=False,
        title="method, and where it ends",
        title_fontsize=9,
    )
    legend.get_title().set_color(_FAINT_INK)
    for text in legend.get_texts():
        text.set_parse_math(False)


KIND_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
"""Okabe and Ito's palette (2008), in order of first use."""
KIND_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
BAND = 0.1

_INK, _FAINT_INK, _GRID = "#1F2933", "#5B6773", "#DDE2E7"
_SCATTER_IN, _DPI = (7.2, 7.0), 150
_LOG_FROM_RATIO = 5.0


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
    simulated_ms = np.asarray(simulated_s, dtype=np.float64) * 1e3
    measured_ms = np.asarray(measured_s, dtype=np.float64) * 1e3
    for name, length in (("measured_s", measured_ms.size), ("kinds", len(kinds))):
        if length != simulated_ms.size:
            raise InvalidValue(
                name,
                f"{length} entries",
                f"{simulated_ms.size}, one for each simulated step time",
                where="fidelity plot",
            )
    buffer = io.BytesIO()
    _draw_scatter(simulated_ms, measured_ms, list(kinds), metrics, title).savefig(buffer, format="png", dpi=_DPI)
    write_bytes_atomic(path, buffer.getvalue())


def _draw_scatter(
    simulated_ms: NDArray[np.float64],
    measured_ms: NDArray[np.float64],
    kinds: list[str],
    metrics: Mapping[str, float | None],
    title: str,
) -> Figure:
    figure = Figure(figsize=_SCATTER_IN, dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.115, 0.095, 0.85, 0.815))
    is_timed = np.isfinite(simulated_ms) & np.isfinite(measured_ms) & (simulated_ms > 0) & (measured_ms > 0)
    both = np.concatenate((simulated_ms[is_timed], measured_ms[is_timed]))
    low, high = (float(both.min()), float(both.max())) if both.size else (0.5, 1.0)
    is_log = high > _LOG_FROM_RATIO * low
    margin = (high / low) ** 0.07 if is_log else 0.0
    pad = 0.07 * (high - low) or 0.1 * high
    ends = (low / margin, high * margin) if is_log else (max(low - pad, 0.0), high + pad)
    if is_log:
        _log_axes(axes)
    axes.set_xlim(ends)
    axes.set_ylim(ends)
    line = np.array(ends)
    axes.fill_between(
        line,
        line * (1 - BAND),
        line * (1 + BAND),
        color="#E9EDF1",
        linewidth=0,
        zorder=1,
        label=f"± {BAND:.0%}".replace("%", " %"),
    )
    axes.plot(line, line, color=_FAINT_INK, linewidth=1.2, zorder=2)
    for number, kind in enumerate(dict.fromkeys(kinds)):
        chosen = is_timed & (np.array(kinds) == kind)
        axes.scatter(
            measured_ms[chosen],
            simulated_ms[chosen],
            s=38,
            zorder=3,
            label=kind,
            alpha=0.9,
            linewidths=0.6,
            edgecolors="white",
            color=KIND_COLORS[number % len(KIND_COLORS)],
            marker=KIND_MARKERS[number % len(KIND_MARKERS)],
        )
    num_left_out = int(np.count_nonzero(~is_timed))
    _finish_scatter(figure, axes, metrics, title, num_left_out)
    return figure


def _log_axes(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def _finish_scatter(
    figure: Figure, axes: Axes, metrics: Mapping[str, float | None], title: str, num_left_out: int
) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_GRID)
    axes.tick_params(which="both", length=0, labelsize=9, labelcolor=_FAINT_INK)
    axes.grid(color=_GRID, linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.set_xlabel("measured step, ms", fontsize=10, color=_FAINT_INK)
    axes.set_ylabel("simulated step, ms", fontsize=10, color=_FAINT_INK)
    figure.text(
        0.115,
        0.965,
        title,
        fontsize=13.5,
        fontweight="bold",
        color=_INK,
        ha="left",
        va="top",
        parse_math=False,
    )
    legend = axes.legend(
        loc="upper left",
        fontsize=9.5,
        labelcolor=_INK,
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
    lines = [f"{name.replace('_', ' ')}  {_figure_text(name, value)}" for name, value in metrics.items()]
    lines += [f"failed, left out  {num_left_out}"] if num_left_out else []
    axes.text(
        0.98,
        0.03,
        "\n".join(lines),
        transform=axes.transAxes,
        ha="right",
        va="bottom",
        fontsize=9.5,
        color=_INK,
        linespacing=1.5,
        zorder=4,
        parse_math=False,
        bbox={"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 3.0},
    )


def _figure_text(name: str, value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.1%}".replace("%", " %") if name.endswith(("_error", "_regret")) else f"{value:.3f}"


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
    _draw_field(placed, eager, result, title).savefig(buffer, format="png", dpi=_DPI)
    write_bytes_atomic(path, buffer.getvalue())


def _draw_field(
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
    _finish_field(axes, placed, eager, str("measured" if result.get("measured") else "simulated"))
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


def _finish_field(axes: Axes, placed: Sequence[Mapping[str, Any]], eager: Mapping[str, Any] | None, kind: str) -> None:
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
