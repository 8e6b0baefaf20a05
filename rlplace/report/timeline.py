"""A timeline as a picture: one lane for each device, one for each direction in which tensors were sent.

A timeline as a frame of a film, of one size for one host, and as text for a terminal.

The lanes of a timeline's picture: which there are, what is drawn in each, and how tall they are.

How a timeline's picture tells micro-batches apart: a shade for each, and its number on what it keeps busy.
"""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InvalidValue
from rlplace.files import write_bytes_atomic
from rlplace.format import format_bytes, format_seconds
from rlplace.graphs.opgraph import PHASES, OpGraph
from rlplace.measure.hosts.host import Host
from rlplace.measure.plan import Timeline
from rlplace.report.drawing import Axes, Figure, FigureCanvasAgg, MaxNLocator, Patch, PolyCollection
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


FRAME_DPI = 75
TEXT_COLUMNS = 60
"""Characters of a device's lane."""


def timeline_frame(timeline: Timeline, graph: OpGraph, host: Host, title: str) -> NDArray[np.uint8]:
    """(height, width, 3) pixels of the chart of `save_timeline_png`, white below.

    The height is that of the tallest chart that a placement on this host can have, so that frames make a film.

    Raises:
        InvalidValue: a timeline of another graph.
    """
    figure = draw_timeline(timeline, graph, host, title)
    figure.set_dpi(FRAME_DPI)
    figure.canvas.draw()
    pixels: NDArray[np.uint8] = np.asarray(figure.canvas.buffer_rgba())[..., :3]  # type: ignore[attr-defined]
    height, width, _ = pixels.shape
    frame = np.full((max(int(np.ceil(tallest_in(host) * FRAME_DPI)), height), width, 3), 255, dtype=np.uint8)
    frame[:height] = pixels
    return frame


def timeline_text(timeline: Timeline, graph: OpGraph, host: Host, title: str) -> str:
    """The chart in characters: a line for each device that is no gang, `#` where it is busy, with its busy share.

    Example:
        Last placement: 3 ms
        cuda:0 |########################################....................|  67 % busy
        cuda:1 |........................................####################|  33 % busy
        step 3.00 ms, simulated
    """
    step_s = timeline.step_s
    names = [device.name for device in host.devices if not device.members]
    width = max(map(len, names))
    lines = [title]
    for name in names:
        runs = [d for d, device in enumerate(host.devices) if device.name == name or name in device.members]
        ops = np.flatnonzero(np.isin(timeline.op_device, runs) & ~graph.is_source)
        busy = _busy_columns(timeline.op_start_s[ops], timeline.op_end_s[ops], step_s)
        lane = "".join("#" if share >= 0.5 else "+" if share > 0 else "." for share in busy)
        lines.append(f"{name:<{width}} |{lane}| {busy.mean() * 100:3.0f} % busy")
    lines.append(f"step {format_seconds(step_s)}, {timeline.source}")
    return "\n".join(lines)


def _busy_columns(start_s: NDArray[np.float64], end_s: NDArray[np.float64], step_s: float) -> NDArray[np.float64]:
    """(TEXT_COLUMNS,) the share of each column of time that ops, which do not overlap, keep busy."""
    if not step_s:
        return np.zeros(TEXT_COLUMNS)
    edges_s = np.linspace(0.0, step_s, TEXT_COLUMNS + 1)
    order = np.argsort(start_s, kind="stable")
    starts, lengths = start_s[order], (end_s - start_s)[order]
    before_s = np.array([np.clip(edge - starts, 0.0, lengths).sum() for edge in edges_s])
    shares: NDArray[np.float64] = np.diff(before_s) / np.diff(edges_s)
    return shares


TOP_IN, BOTTOM_IN = 1.0, 0.62
"""Above the lanes, and below them."""
_DEVICE_IN, _DIRECTION_IN, _GAP_IN = 0.62, 0.27, 0.07
_MOST_LANES_IN, _MOST_DIRECTIONS = 16.0, 20


@dataclass
class Lane:
    """A row of the chart; ops or transfers by index, those of gangs apart; `bottom` and `height` in inches."""

    name: str
    is_device: bool
    items: list[int] = field(default_factory=list)
    gang_items: list[int] = field(default_factory=list)
    bottom: float = 0.0
    height: float = 0.0


def lanes_of(timeline: Timeline, graph: OpGraph, host: Host) -> list[Lane]:
    """A lane for each device that is no gang, in order, then one for each direction used.

    Where there are too many directions to read, one for each sender.
    """
    names = [device.name for device in host.devices]
    lanes = {index: Lane(device.name, True) for index, device in enumerate(host.devices) if not device.members}
    for op, device in enumerate(timeline.op_device.tolist()):
        if graph.is_source[op]:
            continue
        if device in lanes:
            lanes[device].items.append(op)
            continue
        for member in host.devices[device].members:
            lanes[host.device_index[member]].gang_items.append(op)
    directions: dict[tuple[int, int], list[int]] = defaultdict(list)
    for transfer in copies_of(timeline, host):
        source, destination = timeline.transfer_source[transfer], timeline.transfer_destination[transfer]
        directions[int(source), int(destination)].append(transfer)
    if len(directions) <= _MOST_DIRECTIONS:
        sent = [Lane(f"{names[a]} → {names[b]}", False, items) for (a, b), items in sorted(directions.items())]
        return [*lanes.values(), *sent]
    senders: dict[int, Lane] = {}
    for (source, _), items in sorted(directions.items()):
        senders.setdefault(source, Lane(f"{names[source]} → others", False)).items.extend(items)
    return [*lanes.values(), *senders.values()]


def copies_of(timeline: Timeline, host: Host) -> list[int]:
    """The transfers that use a link: a hand-over between a gang and its member copies nothing."""
    index = host.device_index
    wired = {(index[route.source], index[route.destination]) for route in host.routes if route.links}
    ends = zip(timeline.transfer_source.tolist(), timeline.transfer_destination.tolist(), strict=True)
    return [transfer for transfer, pair in enumerate(ends) if pair in wired]


def lay_out(lanes: Sequence[Lane]) -> float:
    """Stacks the lanes from the top, lower where there are many; returns their height in all, in inches."""
    for lane in lanes:
        lane.height = _DEVICE_IN if lane.is_device else _DIRECTION_IN
    total = sum(lane.height + _GAP_IN for lane in lanes) + _GAP_IN
    scale = min(1.0, _MOST_LANES_IN / total)
    top = total * scale - _GAP_IN * scale
    for lane in lanes:
        lane.height *= scale
        lane.bottom = top - lane.height
        top = lane.bottom - _GAP_IN * scale
    return total * scale


def tallest_in(host: Host) -> float:
    """Height in inches of the tallest chart of a timeline on this host: one with tensors sent over every route."""
    wired = {(route.source, route.destination) for route in host.routes if route.links}
    senders = {source for source, _ in wired}
    num_directions = len(wired) if len(wired) <= _MOST_DIRECTIONS else max(_MOST_DIRECTIONS, len(senders))
    lanes = [Lane(device.name, True) for device in host.devices if not device.members]
    return TOP_IN + lay_out([*lanes, *(Lane("", False) for _ in range(num_directions))]) + BOTTOM_IN


LIGHTEST = 0.62
"""Part of white in the colour of the last micro-batch."""
JOINED = 0.004
"""A break of up to this part of the step does not end a run of ops ..."""
BUSY = 0.6
"""... which is one as long as its own ops take this part of it: others may take turns with them."""


@dataclass
class _Run:
    op: int
    start_s: float
    end_s: float
    busy_s: float = 0.0


def shade(color: str, micro_batch: int, num_micro_batches: int) -> str:
    """`color` mixed with white, the more the later the micro-batch; as it is for ops that all of them share.

    >>> shade("#0072B2", 0, 4), shade("#000000", 3, 4)
    ('#0072B2', '#9E9E9E')
    """
    if micro_batch <= 0 or num_micro_batches < 2:
        return color
    share = LIGHTEST * micro_batch / (num_micro_batches - 1)
    mixed = (round(int(color[i : i + 2], 16) * (1 - share) + 255 * share) for i in (1, 3, 5))
    return "#" + "".join(f"{part:02X}" for part in mixed)


def op_colors(graph: OpGraph, phase_colors: Sequence[str]) -> NDArray[np.object_]:
    """(N,) the colour of each op: its phase's, in the shade of its micro-batch.

    Args:
        graph: N ops.
        phase_colors: a colour for each phase.
    """
    count = graph.num_micro_batches
    table = np.array([[shade(color, k, count) for k in range(-1, count)] for color in phase_colors], dtype=object)
    colors: NDArray[np.object_] = table[graph.phases, graph.micro_batch + 1]
    return colors


def runs(items: Sequence[int], timeline: Timeline, graph: OpGraph) -> list[tuple[float, float, int]]:
    """Where a device works for one micro-batch and phase, but for short breaks: start and end in seconds, and an op.

    Args:
        items: ops of one device.
        timeline: when they run.
        graph: the graph that they are of; ops that all micro-batches share are in no run.
    """
    gap_s = JOINED * float(timeline.op_end_s.max(initial=0.0))
    found: list[_Run] = []
    last: dict[tuple[int, int], _Run] = {}
    for op in sorted(items, key=lambda item: (timeline.op_start_s[item], timeline.op_end_s[item])):
        if graph.micro_batch[op] < 0:
            continue
        label = int(graph.micro_batch[op]), int(graph.phases[op])
        start_s, end_s = float(timeline.op_start_s[op]), float(timeline.op_end_s[op])
        run = last.get(label)
        if run is None or start_s - run.end_s > gap_s:
            run = last[label] = _Run(op, start_s, start_s)
            found.append(run)
        run.end_s = max(run.end_s, end_s)
        run.busy_s += end_s - start_s
    return [(run.start_s, run.end_s, run.op) for run in found if run.busy_s >= BUSY * (run.end_s - run.start_s)]


def is_light(color: str) -> bool:
    """Whether dark text reads better on it (relative luminance, ITU-R BT.709)."""
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.5
