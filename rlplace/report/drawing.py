"""Pictures, drawn by matplotlib into files and into the page of a run: curves, scatter plots, and a step as lanes.

matplotlib obeys no `matplotlibrc` of the current folder here. That file may be a stranger's: it can make texts LaTeX's,
and older versions of matplotlib evaluate parts of it.

A step has one lane for each device, one for each direction in which tensors were sent; it is also drawn as a frame of a
film, of one size for one host, and as text for a terminal. Where the batch is cut, each micro-batch has a shade, and
its number on its bars.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlplace.errors import InvalidValue
from rlplace.files import write_bytes_atomic
from rlplace.graphs import OpGraph
from rlplace.measure import Device, Host, Timeline
from rlplace.process_settings import unseen
from rlplace.report.chrome_trace import TRANSFER, Slice, Trace, covered_s
from rlplace.report.lanes import (
    MOST_DIRECTIONS,
    PHASES,
    Parts,
    Row,
    is_light,
    join,
    rows_of,
    runs,
    shade,
    short_name,
    words_of,
)
from rlplace.report.plots import (
    FEW_SEEDS,
    SERIES_COLORS,
    Curve,
    Plot,
    agreement,
    best_so_far,
    readable,
)
from rlplace.say import NOTHING, format_bytes, format_seconds

with unseen("matplotlibrc"):
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
    from matplotlib.transforms import Bbox


DPI = 150
INK, FAINT_INK, GRID = "#1F2933", "#5B6773", "#DDE2E7"
_BAND, _LANE = "#E9EDF1", "#F1F3F5"
_ON_LIGHT, _ON_DARK = "#0D1317", "#FEFEFE"
"""Texts on bars, which are the same on a dark page."""
_PAGE_COLORS = {
    INK: "ink",
    FAINT_INK: "faint",
    GRID: "grid",
    _BAND: "soft",
    _LANE: "page",
    "#FFFFFF": "card",
    "#000000": "ink",
}
"""Colours that are those of the page around a picture: variables of its style, which know light and dark."""
_DASHES, _MARKERS = ("-", "--", ":", "-."), ("o", "s", "^", "D", "v", "P", "X", "*")
_CURVES_IN, _SCATTER_IN, _MEMORY_IN, _LEGEND_MARGIN_IN = (12.0, 5.6), (7.2, 7.0), (12.0, 3.6), 0.1
_MOST_TOLD = 800
"""Series of more points say nothing about each of them."""


def new_figure(
    width_in: float, height_in: float, title: str, left_in: float, top_in: float, size: float = 13.5
) -> Figure:
    """A white figure with a title, in which `$` starts no formula."""
    figure = Figure(figsize=(width_in, height_in), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    look: dict[str, Any] = {"fontsize": size, "fontweight": "bold", "color": INK, "parse_math": False}
    figure.text(left_in / width_in, 1 - top_in / height_in, title, ha="left", va="top", **look)
    return figure


def save_figure(path: str | os.PathLike[str], figure: Figure) -> None:
    """Writes a figure as PNG, whole or not at all; it is as wide as its legend needs.

    Raises:
        FileProblem: the file cannot be written.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, bbox_inches=_needed(figure))
    write_bytes_atomic(path, buffer.getvalue())


def _needed(figure: Figure) -> Bbox | None:
    """The figure and its legends, where one of them is wider."""
    width_in, height_in = figure.get_size_inches()
    ends = [legend.get_window_extent().x1 / figure.dpi + _LEGEND_MARGIN_IN for legend in figure.legends]
    return Bbox.from_extents(0.0, 0.0, max(ends), height_in) if max(ends, default=0.0) > width_in else None


def svg_of(figure: Figure, name: str) -> str:
    """A figure as an `<svg>` element, in the colours and the font of the page that it becomes a part of.

    Marks with a text have it as a `<title>`: browsers show it when a reader points at the mark.

    Args:
        figure: its marks' texts are given to matplotlib as addresses, which it would make links of.
        name: before every id of the element, so that ids stay unique on a page with several.
    """

    def of_page(tag: re.Match[str]) -> str:
        text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", re.sub(r' ?font-family: [^;"]*;?', "", tag[0]))
        return re.sub("#[0-9a-f]{6}", lambda color: colors.get(color[0], color[0]), text)

    colors = {color.lower(): f"var(--{variable})" for color, variable in _PAGE_COLORS.items()}
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, bbox_inches=_needed(figure))
    markup = re.sub(r"^.*?(?=<svg)|<metadata>.*?</metadata>|<!--.*?-->", "", buffer.getvalue(), flags=re.DOTALL)
    told = re.sub(
        r"<a xlink:href=([\"'])(.*?)\1 target=\"_blank\">(.*?)</a>",
        r"<g><title>\2</title>\3</g>",
        markup,
        flags=re.DOTALL,
    )
    return re.sub(r"<[^>]+>", of_page, told)


def save_best_so_far_png(
    path: str | os.PathLike[str], curves: Sequence[Curve], *, title: str, kind: str = "simulated"
) -> None:
    """Writes the picture of `best_so_far_figure` as PNG, whole or not at all.

    Raises:
        InvalidValue: a history without four columns.
        FileProblem: the file cannot be written.
    """
    save_figure(path, best_so_far_figure(curves, title=title, kind=kind))


def best_so_far_figure(
    curves: Sequence[Curve], *, title: str, kind: str, levels_ms: Mapping[str, float] | None = None
) -> Figure:
    """A picture of the best step time so far: over placements on the left, over seconds on the right.

    Each method is a line, the median over its seeds, and a band between their quartiles. Placements are those measured
    where any were, each of them a point, and the best simulated step of these a thin line; else those scored. Step
    times are over that of the best single device; in ms where a curve has none.
    An axis on which the curves span more than two decades is logarithmic.

    Args:
        curves: one a method and seed; a method that never found anything is left out.
        title: above the picture.
        kind: of the step times: `simulated` or `measured`.
        levels_ms: step times to compare with, by name, where they are in ms.

    Raises:
        InvalidValue: a history without four columns.
    """
    is_ratio = all(math.isfinite(curve.single_s) and curve.single_s > 0 for curve in curves)
    spent = "measured" if any(curve.spent[1] for curve in curves) else "evaluations"
    levels = {"one device": 1.0} if is_ratio else levels_ms
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
    notes = {
        f"median over seeds, between quartiles (fewer than {FEW_SEEDS} seeds: extremes)": any(
            one.low is not None for one in series
        ),
        "points: placements measured; thin line: the best simulated step of these": any(one.tried for one in series),
    }
    shown = "; ".join(note for note, is_shown in notes.items() if is_shown)
    figure.text(0.07, 0.905, shown, fontsize=9.5, color=FAINT_INK, ha="left", va="top")
    if not series:
        panels[0].text(0.5, 0.5, "no placement was found", transform=panels[0].transAxes, ha="center", color=FAINT_INK)
        return figure
    ranked = sorted(enumerate(series), key=lambda pair: float(pair[1].y[-1]))
    legend = figure.legend(
        [Line2D([], [], color=one.color, ls=_dash(number), linewidth=1.7) for number, one in ranked],
        [f"{readable(one.name)}  {one.y[-1]:.3g}" for _, one in ranked],
        loc="upper left",
        bbox_to_anchor=(0.82, 0.875),
        fontsize=9,
        labelcolor=INK,
        frameon=False,
        title="method, and where it ends",
        title_fontsize=9,
    )
    legend.get_title().set_color(FAINT_INK)
    _without_formulas(legend)
    return figure


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
    lines = [f"{name.replace('_', ' ')}  {_metric(name, value)}" for name, value in metrics.items()]
    left_out = [] if is_timed.all() else [f"failed, left out  {np.count_nonzero(~is_timed)}"]
    save_figure(path, fidelity_figure(of_kind, title, [*lines, *left_out]))


def fidelity_figure(pairs: Mapping[str, ArrayLike], title: str, notes: Sequence[str] = ()) -> Figure:
    """A scatter plot of simulated over measured step times, with the line y = x and a band of ±10 %.

    Args:
        pairs: by kind of placement, (P, 2) simulated and measured seconds.
        title: above the plot.
        notes: lines in a corner.
    """
    width_in, height_in = _SCATTER_IN
    figure = new_figure(width_in, height_in, title, 0.115 * width_in, 0.035 * height_in)
    axes = figure.add_axes((0.115, 0.095, 0.85, 0.815))
    _draw(axes, agreement(pairs))
    _legend_inside(axes)
    look: dict[str, Any] = {"fontsize": 9.5, "color": INK, "linespacing": 1.5, "zorder": 4, "parse_math": False}
    box = {"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 3.0} if notes else None
    axes.text(0.98, 0.03, "\n".join(notes), transform=axes.transAxes, ha="right", va="bottom", bbox=box, **look)
    return figure


def memory_figure(plot: Plot, title: str) -> Figure:
    """A picture of `memory_over_time`."""
    width_in, height_in = _MEMORY_IN
    figure = new_figure(width_in, height_in, title, 0.07 * width_in, 0.035 * height_in)
    axes = figure.add_axes((0.07, 0.155, 0.91, 0.725))
    _draw(axes, plot)
    _legend_inside(axes)
    return figure


def _legend_inside(axes: Axes) -> None:
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
    _without_formulas(legend)


def _without_formulas(legend: Legend) -> None:
    for text in legend.get_texts():
        text.set_parse_math(False)


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
        # with two addresses at least: matplotlib forgets that of a collection of one
        told: dict[str, Any] = {"urls": [*one.told, ""]} if 0 < len(one.told) <= _MOST_TOLD else {}
        look: dict[str, Any] = {"color": one.color, "label": readable(one.name), "zorder": 3}
        if plot.mark == "points":
            look["marker"] = _MARKERS[number % len(_MARKERS)]
            axes.scatter(one.x, one.y, s=38, alpha=0.9, linewidths=0.6, edgecolors="white", **look, **told)
            continue
        x = np.maximum(one.x, plot.x.low)
        axes.step(x, one.y, where="post", linestyle=_dash(number), linewidth=1.7, **look)
        if told:  # nothing is seen of these points, but a reader can point at them
            axes.scatter(x[: len(one.told)], one.y[: len(one.told)], s=60, alpha=0.0, linewidths=0, zorder=3, **told)
        if one.low is not None and one.high is not None:
            axes.fill_between(x, one.low, one.high, step="post", color=one.color, alpha=0.16, linewidth=0, zorder=2)
        for simulated, measured in (pairs.T for pairs in one.tried):
            count = np.arange(1, len(measured) + 1)
            axes.step(count, simulated, where="post", linewidth=0.7, color=one.color, zorder=2)
            axes.scatter(count, measured, s=14, alpha=0.6, linewidths=0, color=one.color, zorder=2.5)
    levels = sorted(plot.levels.items(), key=lambda item: item[1]) if plot.series else []
    for place, (name, level) in enumerate(levels):
        axes.axhline(level, color=FAINT_INK, linewidth=0.8, zorder=1.5)
        # names at either end in turn: those of lines that are close to each other stay apart
        end, ha, shift = (1.0, "right", -2) if place % 2 == 0 else (0.0, "left", 2)
        at: dict[str, Any] = {
            "xycoords": ("axes fraction", "data"),
            "xytext": (shift, 2),
            "textcoords": "offset points",
        }
        if plot.y.low <= level <= plot.y.high:
            axes.annotate(name, (end, level), ha=ha, va="bottom", fontsize=8, color=FAINT_INK, parse_math=False, **at)
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


FRAME_DPI = 75
TEXT_COLUMNS = 60
"""Characters of a device's lane."""
_HATCH = "////"
_WIDTH_IN, _RIGHT_IN = 14.0, 0.35
_TOP_IN, _UNTITLED_IN, _BOTTOM_IN = 1.0, 0.3, 0.62
"""Above the lanes, with and without a title, and below them."""
_DEVICE_IN, _DIRECTION_IN, _GAP_IN = 0.62, 0.27, 0.07
_MOST_LANES_IN, _LEAST_LABELLED_IN = 16.0, 0.2
_LABEL_PT, _NUMBER_PT, _CHARACTER = 7.5, 10.0, 0.62 / 72
"""Sizes of texts on bars, and the width of a character in inches, at one point."""


def save_timeline_png(
    path: str | os.PathLike[str], timeline: Timeline, graph: OpGraph, host: Host, title: str = ""
) -> None:
    """Writes a Gantt chart of one step, coloured by phase, whole or not at all.

    Where the batch is cut, later micro-batches are lighter, and bars have their numbers, from 0, instead of targets.
    Each device's label says its busy share of the step. An op on a gang is drawn, hatched, on each member.

    Args:
        path: of the PNG file.
        timeline: of one step.
        graph: the graph it is of.
        host: the host it is on.
        title: above the chart.

    Raises:
        InvalidValue: a timeline of another graph.
        FileProblem: the file cannot be written.
    """
    save_figure(path, _titled(timeline, graph, host, title))


def timeline_frame(timeline: Timeline, graph: OpGraph, host: Host, title: str) -> NDArray[np.uint8]:
    """(height, width, 3) pixels of the chart of `save_timeline_png`, white below.

    The height is that of the tallest chart that a placement on this host can have, so that frames make a film.

    Raises:
        InvalidValue: a timeline of another graph.
    """
    figure = _titled(timeline, graph, host, title)
    figure.set_dpi(FRAME_DPI)
    figure.canvas.draw()
    pixels: NDArray[np.uint8] = np.asarray(figure.canvas.buffer_rgba())[..., :3]  # type: ignore[attr-defined]
    missing = max(int(np.ceil(_tallest_in(host) * FRAME_DPI)) - len(pixels), 0)
    return np.pad(pixels, ((0, missing), (0, 0), (0, 0)), constant_values=255)


def timeline_text(timeline: Timeline, graph: OpGraph, host: Host, title: str) -> str:
    """The chart in characters: a line for each device except gangs, `#` where it is busy, with its busy share.

    Example:
        Last placement: 3 ms
        cuda:0 |########################################....................|  67 % busy
        cuda:1 |........................................####################|  33 % busy
        step 3.00 ms, simulated
    """
    names, lines = [device.name for device in host.devices if not device.members], [title]
    edges_s = np.linspace(0.0, timeline.step_s or 1.0, TEXT_COLUMNS + 1)
    for name in names:
        of_device = [d for d, device in enumerate(host.devices) if device.name == name or name in device.members]
        ops = np.flatnonzero(np.isin(timeline.op_device, of_device) & ~graph.is_source)
        start_s, end_s = timeline.op_start_s[ops], timeline.op_end_s[ops]  # they do not overlap
        busy = np.diff([np.clip(edge - start_s, 0.0, end_s - start_s).sum() for edge in edges_s]) / np.diff(edges_s)
        lane = "".join("#" if share >= 0.5 else "+" if share > 0 else "." for share in busy)
        lines.append(f"{name:<{max(map(len, names))}} |{lane}| {busy.mean() * 100:3.0f} % busy")
    return "\n".join([*lines, f"step {format_seconds(timeline.step_s)}, {timeline.source}"])


def _titled(timeline: Timeline, graph: OpGraph, host: Host, title: str) -> Figure:
    trace = Trace.of_timeline(timeline, graph, host)
    return timeline_figure(trace, host.devices, graph.num_micro_batches, title=title or "One step")


def timeline_figure(
    trace: Trace,
    devices: Sequence[Device],
    num_micro_batches: int,
    *,
    title: str = "",
    parts: Parts = PHASES,
    most_bars: int | None = None,
) -> Figure:
    """The chart of `save_timeline_png`.

    Args:
        trace: of one step.
        devices: of its host, in order; gangs among them.
        num_micro_batches: that the step's batch is cut into.
        title: above the chart, beside a legend; without one, both are left out.
        parts: that bars have the colours of.
        most_bars: for readers who can point at a bar: each says what it is, and neighbours that are too short to be
            seen are joined until there are no more than about that many.
    """
    rows, step_ms = rows_of(trace, devices), trace.step_s * 1e3 or 1.0
    busy = [covered_s([*row.items, *row.gang_items]) for row in rows]
    if most_bars is not None:
        join(rows, trace.step_s, most_bars)
    lanes_in, top_in = _lay_out(rows), _TOP_IN if title else _UNTITLED_IN
    height_in = top_in + lanes_in + _BOTTOM_IN
    left_in = 0.45 + 0.085 * max(max((len(row.name) for row in rows), default=0), len("100 % busy"))
    chart_in = _WIDTH_IN - left_in - _RIGHT_IN
    figure = new_figure(_WIDTH_IN, height_in, title, 0.25, 0.26, size=15)
    axes = figure.add_axes((left_in / _WIDTH_IN, _BOTTOM_IN / height_in, chart_in / _WIDTH_IN, lanes_in / height_in))
    axes.set(xlim=(0.0, step_ms), ylim=(0.0, lanes_in))
    for row, busy_s in zip(rows, busy, strict=True):
        _draw_row(axes, row, busy_s, num_micro_batches, trace.step_s, step_ms / chart_in, parts, most_bars is not None)
    if title:
        _draw_facts(figure, trace, rows, num_micro_batches, parts)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 2.5, 5, 10]))
    quiet_time_axis(axes, "time since the step began, ms")
    axes.axvline(step_ms, color=INK, linewidth=1.6, zorder=5, clip_on=False)
    axes.annotate(
        f"step {format_seconds(trace.step_s)}",
        (1.0, 1.0),
        xycoords="axes fraction",
        xytext=(0, 5),
        color=INK,
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=11,
        fontweight="bold",
    )
    return figure


def _draw_facts(figure: Figure, trace: Trace, rows: Sequence[Row], num_micro_batches: int, parts: Parts) -> None:
    """Draws a line on the step below the title, and the legend beside it."""
    width_in, height_in = figure.get_size_inches()
    copies = [one for row in rows if not row.is_device for one in row.items]
    facts = f"{trace.kind} · {len(trace.ops):,} ops · {len(copies):,} transfers"
    colors = {part: color for part, color in parts.colors.items() if part != TRANSFER or copies}
    patches = [Patch(facecolor=color, label=part) for part, color in colors.items()]
    if copies:
        facts += f" of {format_bytes(sum(one.num_bytes for one in copies))} in all"
    if num_micro_batches > 1:
        facts += f" · {num_micro_batches} micro-batches, numbered from 0, later ones lighter"
    if any(row.gang_items for row in rows):
        looks: dict[str, Any] = {"facecolor": FAINT_INK, "edgecolor": "white", "linewidth": 0, "hatch": _HATCH}
        patches.append(Patch(**looks, label="on several devices"))
    figure.text(0.25 / width_in, 1 - 0.60 / height_in, facts, ha="left", va="top", fontsize=10, color=FAINT_INK)
    figure.legend(
        handles=patches,
        loc="upper right",
        bbox_to_anchor=(1 - _RIGHT_IN / width_in, 1 - 0.2 / height_in),
        ncols=len(patches),
        frameon=False,
        fontsize=10,
        labelcolor=INK,
        handlelength=1.1,
        handleheight=1.0,
        columnspacing=1.6,
        handletextpad=0.5,
        borderaxespad=0.0,
        borderpad=0.1,
    )


def _lay_out(rows: Sequence[Row]) -> float:
    """Stacks the rows from the top, lower where there are many; returns their height in all, in inches."""
    for row in rows:
        row.height = _DEVICE_IN if row.is_device else _DIRECTION_IN
    total = sum(row.height + _GAP_IN for row in rows) + _GAP_IN
    scale = min(1.0, _MOST_LANES_IN / total)
    top = (total - _GAP_IN) * scale
    for row in rows:
        row.height *= scale
        row.bottom = top - row.height
        top = row.bottom - _GAP_IN * scale
    return total * scale


def _tallest_in(host: Host) -> float:
    """Height in inches of the tallest chart of a timeline on this host: one with tensors sent over every route."""
    wired = {(route.source, route.destination) for route in host.routes if route.links}
    num_directions = min(len(wired), max(MOST_DIRECTIONS, len({source for source, _ in wired})))
    rows = [Row(device.name, True) for device in host.devices if not device.members]
    return _TOP_IN + _lay_out([*rows, *(Row("", False) for _ in range(num_directions))]) + _BOTTOM_IN


def _draw_row(
    axes: Axes,
    row: Row,
    busy_s: float,
    num_micro_batches: int,
    step_s: float,
    inch_ms: float,
    parts: Parts,
    is_told: bool,
) -> None:
    """Draws a lane; `inch_ms` milliseconds are an inch."""
    axes.axhspan(row.bottom, row.bottom + row.height, color=_LANE, linewidth=0, zorder=0)
    middle = row.bottom + row.height / 2
    count = num_micro_batches if row.is_device else 1
    _draw_bars(axes, row, row.items, count, inch_ms, parts, is_told)
    if not row.is_device:
        label_beside(axes, 0.0, middle, row.name, size=min(9.0, 56 * row.height), color=FAINT_INK)
        return
    _draw_bars(axes, row, row.gang_items, count, inch_ms, parts, is_told, hatch=_HATCH)
    texts = [(one.start_s, one.end_s, short_name(one), one) for one in row.items]
    size, beside_in = _LABEL_PT, 0.08
    if num_micro_batches > 1:
        ops = [*row.items, *row.gang_items]
        texts = [(start_s, end_s, str(one.micro_batch), one) for start_s, end_s, one in runs(ops, step_s)]
        size, beside_in = _NUMBER_PT, 0.04
    at: dict[str, Any] = {"ha": "center", "va": "center", "zorder": 4, "clip_on": True, "parse_math": False}
    for start_s, end_s, text, one in texts if row.height > _LEAST_LABELLED_IN else ():
        if (end_s - start_s) * 1e3 / inch_ms > len(text) * size * _CHARACTER + beside_in:
            fill = shade(parts.color(one), one.micro_batch, num_micro_batches)
            ink = _ON_LIGHT if is_light(fill) else _ON_DARK
            axes.text((start_s + end_s) * 500, middle, text, fontsize=size, color=ink, **at)
    busy = f"{busy_s / (step_s or 1.0):.0%} busy".replace("%", " %")
    label_beside(axes, 0.0, middle + 0.19 * row.height, row.name, size=10.5, weight="bold")
    label_beside(axes, 0.0, middle - 0.21 * row.height, busy, size=9, color=FAINT_INK)


def _draw_bars(
    axes: Axes,
    row: Row,
    items: Sequence[Slice],
    shades: int,
    inch_ms: float,
    parts: Parts,
    is_told: bool,
    hatch: str | None = None,
) -> None:
    """Draws a lane's items: wide ones stop short of the next, and no transfer is too thin to be seen."""
    if not items:
        return
    pixel_ms = inch_ms / DPI
    start, end = np.array([(one.start_s, one.end_s) for one in items]).T * 1e3
    end = np.where(end - start >= 4 * pixel_ms, end - pixel_ms, end)
    end = end if row.is_device else np.maximum(end, start + 2 * pixel_ms)
    low, high = (np.full(len(items), row.bottom + share * row.height) for share in (0.04, 0.96))
    corners = np.stack((start, low, start, high, end, high, end, low), axis=-1).reshape(-1, 4, 2)
    colors = [shade(parts.color(one), one.micro_batch, shades) for one in items]
    looks: dict[str, Any] = {"edgecolors": "white", "linewidths": 0, "hatch": hatch, "zorder": 3}
    if is_told:  # with two addresses at least: matplotlib forgets that of a collection of one
        looks["urls"] = [*map(words_of, items), ""]
    axes.add_collection(PolyCollection(list(corners), facecolors=colors, **looks), autolim=False)
