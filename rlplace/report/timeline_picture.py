"""A timeline as a picture: one lane for each device, one for each direction in which tensors were sent."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.files import write_bytes_atomic
from rlplace.graphs.opgraph import PHASES, OpGraph
from rlplace.measure.hosts.host import Host
from rlplace.measure.timeline import Timeline
from rlplace.report.format import format_bytes, format_seconds
from rlplace.report.micro_batch_marks import is_light, op_colors, runs
from rlplace.report.timeline_lanes import BOTTOM_IN, TOP_IN, Lane, copies_of, lanes_of, lay_out
from rlplace.say import clean

PHASE_COLORS = {"forward": "#0072B2", "backward": "#E69F00", "update": "#009E73"}
"""Of Okabe and Ito's palette (2008), told apart with every common kind of colour blindness."""
TRANSFER_COLOR = "#CC79A7"

_INK, _FAINT_INK, _LANE, _GRID = "#1F2933", "#5B6773", "#F1F3F5", "#DDE2E7"
_WIDTH_IN, _DPI = 14.0, 150
_RIGHT_IN = 0.35
_LABEL_PT = 7.5
_NUMBER_PT = 10.0
_LABEL_COLORS = ("white", _INK, "white")  # on forward, backward, update


def save_timeline_png(
    path: str | os.PathLike[str], timeline: Timeline, graph: OpGraph, host: Host, title: str = ""
) -> None:
    """Writes a Gantt chart of one step, coloured by phase, whole or not at all.

    Where the batch is cut, later micro-batches are lighter, and bars have their numbers, from 0, instead of targets.
    Each device's label says for what share of the step it was busy. An op on a gang is drawn, hatched, on each member.

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
    buffer = io.BytesIO()
    draw_timeline(timeline, graph, host, title).savefig(buffer, format="png", dpi=_DPI)
    write_bytes_atomic(path, buffer.getvalue())


def draw_timeline(timeline: Timeline, graph: OpGraph, host: Host, title: str) -> Figure:
    """The chart of `save_timeline_png`, as a figure of matplotlib.

    Raises:
        InvalidValue: a timeline of another graph.
    """
    if len(timeline.op_device) != graph.num_ops:
        raise InvalidValue(
            "op_device", f"{len(timeline.op_device)} entries", f"{graph.num_ops}, one for each op", where="timeline"
        )
    step_s = timeline.step_s
    lanes = lanes_of(timeline, graph, host)
    lanes_in = lay_out(lanes)
    height_in = TOP_IN + lanes_in + BOTTOM_IN
    left_in = 0.45 + 0.085 * max(max(len(lane.name) for lane in lanes), len("100 % busy"))
    figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    chart_in = _WIDTH_IN - left_in - _RIGHT_IN
    axes = figure.add_axes((left_in / _WIDTH_IN, BOTTOM_IN / height_in, chart_in / _WIDTH_IN, lanes_in / height_in))
    axes.set_xlim(0.0, step_s * 1e3 or 1.0)
    axes.set_ylim(0.0, lanes_in)
    width_ms = (step_s * 1e3 or 1.0) / chart_in  # of one inch
    for lane in lanes:
        _draw_lane(axes, lane, timeline, graph, step_s, width_ms)
    num_ops = int(np.count_nonzero(~graph.is_source))
    copies = copies_of(timeline, host)
    facts = f"{timeline.source} · {num_ops:,} ops · {len(copies):,} transfers"
    if copies:
        sent_bytes = float(graph.tensor_bytes[timeline.transfer_tensor[copies]].sum())
        facts += f" of {format_bytes(sent_bytes)} in all"
    if graph.num_micro_batches > 1:
        facts += f" · {graph.num_micro_batches} micro-batches, numbered from 0, later ones lighter"
    patches = [Patch(facecolor=color, label=phase) for phase, color in PHASE_COLORS.items()]
    if copies:
        patches.append(Patch(facecolor=TRANSFER_COLOR, label="transfer"))
    if any(lane.gang_items for lane in lanes):
        patches.append(
            Patch(facecolor=_FAINT_INK, edgecolor="white", linewidth=0, hatch="////", label="on several devices")
        )
    _head(figure, title or "One step", facts, patches)
    _mark_time(axes, step_s)
    return figure


def _draw_lane(axes: Axes, lane: Lane, timeline: Timeline, graph: OpGraph, step_s: float, width_ms: float) -> None:
    axes.axhspan(lane.bottom, lane.bottom + lane.height, color=_LANE, linewidth=0, zorder=0)
    middle = lane.bottom + lane.height / 2
    if not lane.is_device:
        colors = np.full(timeline.transfer_tensor.size, TRANSFER_COLOR, dtype=object)
        _draw_bars(axes, lane.items, timeline.transfer_start_s, timeline.transfer_end_s, colors, lane, width_ms)
        _lane_text(axes, middle, lane.name, size=min(9.0, 56 * lane.height), color=_FAINT_INK)
        return
    start_s, end_s = timeline.op_start_s, timeline.op_end_s
    colors = op_colors(graph, [PHASE_COLORS[phase] for phase in PHASES])
    _draw_bars(axes, lane.items, start_s, end_s, colors, lane, width_ms)
    _draw_bars(axes, lane.gang_items, start_s, end_s, colors, lane, width_ms, hatch="////")
    if graph.num_micro_batches > 1:
        _number_runs(axes, lane, timeline, graph, colors, width_ms)
    else:
        for op, text in _op_labels(lane, timeline, graph, width_ms):
            center_ms = (start_s[op] + end_s[op]) * 500
            _bar_text(axes, center_ms, middle, text, _LABEL_COLORS[graph.phases[op]], _LABEL_PT)
    busy = _busy_s([*lane.items, *lane.gang_items], start_s, end_s) / step_s if step_s else 0.0
    _lane_text(axes, middle + 0.19 * lane.height, lane.name, size=10.5, color=_INK, weight="bold")
    _lane_text(axes, middle - 0.21 * lane.height, f"{busy:.0%} busy".replace("%", " %"), size=9, color=_FAINT_INK)


def _draw_bars(
    axes: Axes,
    items: list[int],
    start_s: NDArray[np.float64],
    end_s: NDArray[np.float64],
    colors: NDArray[np.object_],
    lane: Lane,
    width_ms: float,
    hatch: str | None = None,
) -> None:
    """Draws a lane's items: wide ones stop short of the next, and no transfer is too thin to be seen."""
    if not items:
        return
    index = np.array(items, dtype=np.int64)
    pixel_ms = width_ms / _DPI
    start, end = start_s[index] * 1e3, end_s[index] * 1e3
    end = np.where(end - start >= 4 * pixel_ms, end - pixel_ms, end)
    if not lane.is_device:
        end = np.maximum(end, start + 2 * pixel_ms)
    corners = np.empty((index.size, 4, 2))
    corners[:, :2, 0], corners[:, 2:, 0] = start[:, None], end[:, None]
    corners[:, [0, 3], 1] = lane.bottom + 0.04 * lane.height
    corners[:, 1:3, 1] = lane.bottom + 0.96 * lane.height
    bars = PolyCollection(
        list(corners), facecolors=list(colors[index]), edgecolors="white", linewidths=0, hatch=hatch, zorder=3
    )
    axes.add_collection(bars, autolim=False)


def _busy_s(items: list[int], start_s: NDArray[np.float64], end_s: NDArray[np.float64]) -> float:
    """Seconds covered by at least one of the items."""
    if not items:
        return 0.0
    order = np.array(items)[np.argsort(start_s[items], kind="stable")]
    covered_until = np.concatenate(([-np.inf], np.maximum.accumulate(end_s[order])[:-1]))
    return float(np.maximum(end_s[order] - np.maximum(start_s[order], covered_until), 0.0).sum())


def _number_runs(
    axes: Axes, lane: Lane, timeline: Timeline, graph: OpGraph, colors: NDArray[np.object_], width_ms: float
) -> None:
    """Writes the number of a micro-batch on what it keeps busy without a break, where that is wide enough."""
    if lane.height <= 0.2:
        return
    for start_s, end_s, op in runs([*lane.items, *lane.gang_items], timeline, graph):
        text = str(graph.micro_batch[op])
        if (end_s - start_s) * 1e3 / width_ms > len(text) * _NUMBER_PT * 0.62 / 72 + 0.04:
            ink = _INK if is_light(colors[op]) else "white"
            _bar_text(axes, (start_s + end_s) * 500, lane.bottom + lane.height / 2, text, ink, _NUMBER_PT)


def _bar_text(axes: Axes, x_ms: float, y: float, text: str, color: str, size: float) -> None:
    axes.text(
        x_ms,
        y,
        text,
        ha="center",
        va="center",
        fontsize=size,
        color=color,
        zorder=4,
        clip_on=True,
        parse_math=False,
    )


def _op_labels(lane: Lane, timeline: Timeline, graph: OpGraph, width_ms: float) -> list[tuple[int, str]]:
    """The target of each op whose bar is wide enough to hold it."""
    labels = []
    for op in lane.items:
        parts = clean(graph.targets[op]).split(".")
        text = parts[1] if len(parts) > 1 else parts[0]
        text = text.removeprefix("_").removesuffix("_backward")
        width_in = float(timeline.op_end_s[op] - timeline.op_start_s[op]) * 1e3 / width_ms
        if width_in > len(text) * _LABEL_PT * 0.62 / 72 + 0.08 and lane.height > 0.2:
            labels.append((op, text))
    return labels


def _lane_text(axes: Axes, y: float, text: str, *, size: float, color: str, weight: str = "normal") -> None:
    axes.annotate(
        text,
        (0.0, y),
        xycoords=("axes fraction", "data"),
        xytext=(-9, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=size,
        color=color,
        fontweight=weight,
        parse_math=False,
    )


def _head(figure: Figure, title: str, facts: str, patches: Sequence[Patch]) -> None:
    """Title and facts on the left, legend on the right."""
    height_in = figure.get_figheight()
    left, right = 0.25 / _WIDTH_IN, 1 - _RIGHT_IN / _WIDTH_IN
    figure.text(
        left,
        1 - 0.26 / height_in,
        title,
        ha="left",
        va="top",
        fontsize=15,
        color=_INK,
        fontweight="bold",
        parse_math=False,
    )
    figure.text(left, 1 - 0.60 / height_in, facts, ha="left", va="top", fontsize=10, color=_FAINT_INK)
    figure.legend(
        handles=patches,
        loc="upper right",
        bbox_to_anchor=(right, 1 - 0.2 / height_in),
        ncols=len(patches),
        frameon=False,
        fontsize=10,
        labelcolor=_INK,
        handlelength=1.1,
        handleheight=1.0,
        columnspacing=1.6,
        handletextpad=0.5,
        borderaxespad=0.0,
        borderpad=0.1,
    )


def _mark_time(axes: Axes, step_s: float) -> None:
    """The time axis, and a mark at the step's end."""
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 2.5, 5, 10]))
    axes.tick_params(axis="x", length=0, pad=6, labelsize=9, labelcolor=_FAINT_INK)
    axes.grid(axis="x", color=_GRID, linewidth=0.8, zorder=1)
    axes.set_axisbelow(True)
    axes.set_xlabel("time since the step began, ms", fontsize=9.5, color=_FAINT_INK, labelpad=6)
    axes.axvline(step_s * 1e3 or 1.0, color=_INK, linewidth=1.6, zorder=5, clip_on=False)
    axes.annotate(
        f"step {format_seconds(step_s)}",
        (1.0, 1.0),
        xycoords="axes fraction",
        xytext=(0, 5),
        color=_INK,
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=11,
        fontweight="bold",
    )
