"""Pictures in files, drawn by matplotlib: curves, scatter plots, bars, and a step as lanes.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlplace.errors import InvalidValue
from rlplace.files import write_bytes_atomic
from rlplace.graphs import OpGraph
from rlplace.measure import Host, Timeline
from rlplace.process_settings import unseen
from rlplace.report.chrome_trace import TRANSFER, Slice, Trace, covered_s
from rlplace.report.plots import (
    FEW_SEEDS,
    PHASE_COLORS,
    SERIES_COLORS,
    Curve,
    Plot,
    agreement,
    best_so_far,
    blended,
    luminance,
)
from rlplace.say import NOTHING, clean, format_bytes, format_seconds

with unseen("matplotlibrc"):
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
    from matplotlib.transforms import Bbox


DPI = 150
INK, FAINT_INK, GRID = "#1F2933", "#5B6773", "#DDE2E7"
_BAND = "#E9EDF1"
_DASHES, _MARKERS = ("-", "--", ":", "-."), ("o", "s", "^", "D", "v", "P", "X", "*")
_CURVES_IN, _SCATTER_IN, _LEGEND_MARGIN_IN = (12.0, 5.6), (7.2, 7.0), 0.1


def new_figure(
    width_in: float, height_in: float, title: str, left_in: float, top_in: float, size: float = 13.5
) -> Figure:
    """A white figure with a title, in which `$` starts no formula."""
    figure = Figure(figsize=(width_in, height_in), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    look: dict[str, Any] = {"fontsize": size, "fontweight": "bold", "color": INK, "parse_math": False}
    figure.text(left_in / width_in, 1 - top_in / height_in, title, ha="left", va="top", **look)
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
    where any were, each of them a point, and the best simulated step of these a thin line; else those scored. Step
    times are over that of the best single device; in ms where a curve has none.
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
    else:
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
            look["marker"] = _MARKERS[number % len(_MARKERS)]
            axes.scatter(one.x, one.y, s=38, alpha=0.9, linewidths=0.6, edgecolors="white", **look)
            continue
        x = np.maximum(one.x, plot.x.low)
        axes.step(x, one.y, where="post", linestyle=_dash(number), linewidth=1.7, **look)
        if one.low is not None and one.high is not None:
            axes.fill_between(x, one.low, one.high, step="post", color=one.color, alpha=0.16, linewidth=0, zorder=2)
        for simulated, measured in (pairs.T for pairs in one.tried):
            count = np.arange(1, len(measured) + 1)
            axes.step(count, simulated, where="post", linewidth=0.7, color=one.color, zorder=2)
            axes.scatter(count, measured, s=14, alpha=0.6, linewidths=0, color=one.color, zorder=2.5)
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
LIGHTEST = 0.62
"""Part of white in the colour of the last micro-batch."""
JOINED = 0.004
"""A break of up to this part of the step does not end a run of ops ..."""
BUSY = 0.6
"""... which is one as long as its own ops take this part of it: others may take turns with them."""

_LANE, _HATCH = "#F1F3F5", "////"
_WIDTH_IN, _RIGHT_IN = 14.0, 0.35
_TOP_IN, _BOTTOM_IN = 1.0, 0.62
"""Above the lanes, and below them."""
_DEVICE_IN, _DIRECTION_IN, _GAP_IN = 0.62, 0.27, 0.07
_MOST_LANES_IN, _MOST_DIRECTIONS, _LEAST_LABELLED_IN = 16.0, 20, 0.2
_LABEL_PT, _NUMBER_PT, _CHARACTER = 7.5, 10.0, 0.62 / 72
"""Sizes of texts on bars, and the width of a character in inches, at one point."""


@dataclass
class Row:
    """A lane of the chart; ops on gangs apart; `bottom` and `height` in inches."""

    name: str
    is_device: bool
    items: list[Slice] = field(default_factory=list)
    gang_items: list[Slice] = field(default_factory=list)
    bottom: float = 0.0
    height: float = 0.0


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
    save_figure(path, _figure(timeline, graph, host, title))


def timeline_frame(timeline: Timeline, graph: OpGraph, host: Host, title: str) -> NDArray[np.uint8]:
    """(height, width, 3) pixels of the chart of `save_timeline_png`, white below.

    The height is that of the tallest chart that a placement on this host can have, so that frames make a film.

    Raises:
        InvalidValue: a timeline of another graph.
    """
    figure = _figure(timeline, graph, host, title)
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


def _figure(timeline: Timeline, graph: OpGraph, host: Host, title: str) -> Figure:
    trace, count = Trace.of_timeline(timeline, graph, host), graph.num_micro_batches
    rows, step_ms = rows_of(trace, host), timeline.step_s * 1e3 or 1.0
    lanes_in = _lay_out(rows)
    height_in = _TOP_IN + lanes_in + _BOTTOM_IN
    left_in = 0.45 + 0.085 * max(max(len(row.name) for row in rows), len("100 % busy"))
    chart_in = _WIDTH_IN - left_in - _RIGHT_IN
    figure = new_figure(_WIDTH_IN, height_in, title or "One step", 0.25, 0.26, size=15)
    axes = figure.add_axes((left_in / _WIDTH_IN, _BOTTOM_IN / height_in, chart_in / _WIDTH_IN, lanes_in / height_in))
    axes.set(xlim=(0.0, step_ms), ylim=(0.0, lanes_in))
    for row in rows:
        _draw_row(axes, row, count, timeline.step_s, step_ms / chart_in)
    copies = [one for row in rows if not row.is_device for one in row.items]
    facts = f"{timeline.source} · {len(trace.ops):,} ops · {len(copies):,} transfers"
    colors = {phase: color for phase, color in PHASE_COLORS.items() if phase != TRANSFER or copies}
    patches = [Patch(facecolor=color, label=phase) for phase, color in colors.items()]
    if copies:
        facts += f" of {format_bytes(sum(one.num_bytes for one in copies))} in all"
    if count > 1:
        facts += f" · {count} micro-batches, numbered from 0, later ones lighter"
    if any(row.gang_items for row in rows):
        looks: dict[str, Any] = {"facecolor": FAINT_INK, "edgecolor": "white", "linewidth": 0, "hatch": _HATCH}
        patches.append(Patch(**looks, label="on several devices"))
    figure.text(0.25 / _WIDTH_IN, 1 - 0.60 / height_in, facts, ha="left", va="top", fontsize=10, color=FAINT_INK)
    figure.legend(
        handles=patches,
        loc="upper right",
        bbox_to_anchor=(1 - _RIGHT_IN / _WIDTH_IN, 1 - 0.2 / height_in),
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
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 2.5, 5, 10]))
    quiet_time_axis(axes, "time since the step began, ms")
    axes.axvline(step_ms, color=INK, linewidth=1.6, zorder=5, clip_on=False)
    axes.annotate(
        f"step {format_seconds(timeline.step_s)}",
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


def rows_of(trace: Trace, host: Host) -> list[Row]:
    """A row for each device except gangs, in order, then one for each direction used.

    Where there are too many directions to read, one for each sender.
    """
    rows = {device.name: Row(device.name, True) for device in host.devices if not device.members}
    members = {device.name: device.members for device in host.devices if device.members}
    for one in trace.ops:
        if (name := trace.device_of(one)) in rows:
            rows[name].items.append(one)
        for member in members.get(name, ()):
            rows[member].gang_items.append(one)
    order = {device.name: place for place, device in enumerate(host.devices)}
    # a transfer over several links once
    transfers = {(one.ends, one.tensor, one.start_s): one for one in trace.slices if one.kind == TRANSFER}
    is_many = len({one.ends for one in transfers.values()}) > _MOST_DIRECTIONS
    for one in sorted(transfers.values(), key=lambda one: [order[end] for end in one.ends]):
        name = f"{one.ends[0]} → {'others' if is_many else one.ends[1]}"
        rows.setdefault(name, Row(name, False)).items.append(one)
    return list(rows.values())


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
    num_directions = min(len(wired), max(_MOST_DIRECTIONS, len({source for source, _ in wired})))
    rows = [Row(device.name, True) for device in host.devices if not device.members]
    return _TOP_IN + _lay_out([*rows, *(Row("", False) for _ in range(num_directions))]) + _BOTTOM_IN


def _draw_row(axes: Axes, row: Row, num_micro_batches: int, step_s: float, inch_ms: float) -> None:
    """Draws a lane; `inch_ms` milliseconds are an inch."""
    axes.axhspan(row.bottom, row.bottom + row.height, color=_LANE, linewidth=0, zorder=0)
    middle = row.bottom + row.height / 2
    _draw_bars(axes, row, row.items, num_micro_batches, inch_ms)
    if not row.is_device:
        label_beside(axes, 0.0, middle, row.name, size=min(9.0, 56 * row.height), color=FAINT_INK)
        return
    _draw_bars(axes, row, row.gang_items, num_micro_batches, inch_ms, hatch=_HATCH)
    ops = [*row.items, *row.gang_items]
    texts = [(one.start_s, one.end_s, _short_name(one), one) for one in row.items]
    size, beside_in = _LABEL_PT, 0.08
    if num_micro_batches > 1:
        texts = [(start_s, end_s, str(one.micro_batch), one) for start_s, end_s, one in runs(ops, step_s)]
        size, beside_in = _NUMBER_PT, 0.04
    at: dict[str, Any] = {"ha": "center", "va": "center", "zorder": 4, "clip_on": True, "parse_math": False}
    for start_s, end_s, text, one in texts if row.height > _LEAST_LABELLED_IN else ():
        if (end_s - start_s) * 1e3 / inch_ms > len(text) * size * _CHARACTER + beside_in:
            ink = INK if is_light(shade(PHASE_COLORS[one.kind], one.micro_batch, num_micro_batches)) else "white"
            axes.text((start_s + end_s) * 500, middle, text, fontsize=size, color=ink, **at)
    busy = f"{covered_s(ops) / (step_s or 1.0):.0%} busy".replace("%", " %")
    label_beside(axes, 0.0, middle + 0.19 * row.height, row.name, size=10.5, weight="bold")
    label_beside(axes, 0.0, middle - 0.21 * row.height, busy, size=9, color=FAINT_INK)


def _draw_bars(
    axes: Axes, row: Row, items: Sequence[Slice], num_micro_batches: int, inch_ms: float, hatch: str | None = None
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
    shades = num_micro_batches if row.is_device else 1
    colors = [shade(PHASE_COLORS[one.kind], one.micro_batch, shades) for one in items]
    looks: dict[str, Any] = {"edgecolors": "white", "linewidths": 0, "hatch": hatch, "zorder": 3}
    axes.add_collection(PolyCollection(list(corners), facecolors=colors, **looks), autolim=False)


def _short_name(op: Slice) -> str:
    """The op's target without namespace and overload."""
    return clean(op.target).split(".")[:2][-1].removeprefix("_").removesuffix("_backward")


@dataclass
class _Run:
    first: Slice
    end_s: float
    busy_s: float = 0.0


def runs(ops: Iterable[Slice], step_s: float) -> list[tuple[float, float, Slice]]:
    """Where a device works for one micro-batch and phase, but for short breaks: start and end in seconds, first op.

    Args:
        ops: of one device; those that all micro-batches share are in no run.
        step_s: of the whole step.
    """
    found, last = list[_Run](), dict[tuple[int, str], _Run]()
    for op in sorted((op for op in ops if op.micro_batch >= 0), key=lambda one: (one.start_s, one.end_s)):
        run = last.get((op.micro_batch, op.kind))
        if run is None or op.start_s - run.end_s > JOINED * step_s:
            run = last[op.micro_batch, op.kind] = _Run(op, op.start_s)
            found.append(run)
        run.end_s = max(run.end_s, op.end_s)
        run.busy_s += op.seconds
    spans = [(run.first.start_s, run.end_s, run) for run in found]
    return [(start_s, end_s, run.first) for start_s, end_s, run in spans if run.busy_s >= BUSY * (end_s - start_s)]


def shade(color: str, micro_batch: int, num_micro_batches: int) -> str:
    """`color` mixed with white, the more the later the micro-batch; as it is for ops that all of them share.

    >>> shade("#0072B2", 0, 4), shade("#000000", 3, 4)
    ('#0072B2', '#9E9E9E')
    """
    if micro_batch <= 0 or num_micro_batches < 2:
        return color
    share = LIGHTEST * micro_batch / (num_micro_batches - 1)
    return blended({"own": 1 - share, "white": share}, {"own": color, "white": "#FFFFFF"})


def is_light(color: str) -> bool:
    """Whether dark text reads better on it: the luminance of a grey of half the brightness."""
    return luminance(color) > luminance("#808080")
