"""The step as an interactive timeline: a lane for each device and link, zoomed and panned along time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlplace.format import format_bytes, format_ms, format_seconds
from rlplace.report.html.figure import (
    MODULE_COLORS,
    OTHER_COLOR,
    PHASE_COLORS,
    Figure,
    Section,
    Variant,
    axis,
    base_layout,
    discrete_scale,
    paragraph,
    plot_text,
    readable,
    table,
)
from rlplace.report.html.modules import OTHERS, module_groups
from rlplace.report.html.run_data import RunData
from rlplace.report.html.trace import TRANSFER, Slice, Trace, covered_s

MOST_BARS = 4000
"""More slices than that are merged with their neighbours: no screen shows them one by one."""
_FIRST_GRAIN = 1 / 20_000
_COLORS_MIX_FROM = 1 / 2_000
_DEVICE_PX, _LINK_PX, _AROUND_PX = 56, 26, 84
_LEAST_WIDTH_PX = 640
"""Less would cut the title of the axis, and leave the lanes no more room than their names."""
_MOST_LANES = 40
_LABEL_CHARACTERS = 22
_FILLED = 0.84


@dataclass(frozen=True, slots=True)
class Bar:
    """Slices of one lane that are drawn as one.

    Attributes:
        first: the longest of them, which gives the bar its colours.
        start_s, end_s: from the first's start to the last's end.
        count: how many.
        busy_s: what they take together.
    """

    first: Slice
    start_s: float
    end_s: float
    count: int
    busy_s: float


def timeline_section(data: RunData) -> Section | None:
    """The timeline and a table of the devices in it; None for a run without a trace."""
    trace = data.trace
    if trace is None or not trace.ops:
        return None
    bars = merged(trace)
    shown = sum(map(len, bars.values()))
    typical = ", a typical one" if data.is_measured else ""
    lead = (
        f"One {trace.kind or data.kind} step of {format_seconds(trace.step_s)}{typical}: {len(trace.ops):,} ops "
        f"and {_num_transfers(trace):,} transfers. Drag to zoom, double-click to see all of it again."
    )
    note = ""
    if shown < len(trace.slices):
        note = paragraph(
            f"{len(trace.slices):,} ops and transfers are drawn as {shown:,} bars: short neighbours as one, which says "
            "how many it stands for. timeline.json has all of them.",
            "note",
        )
    return Section(
        "timeline", "Timeline", lead, _figure(trace, bars).place + note + _table(trace), (_figure(trace, bars),)
    )


def merged(trace: Trace, most: int = MOST_BARS) -> dict[int, list[Bar]]:
    """The bars of each lane, at most about `most` in all.

    Neighbours are merged where both of them, and what is between them, are shorter than a grain of the step; the grain
    grows until there are few enough. While it is below what a screen resolves, only ops of one phase and one part of
    the model are merged.
    """
    rows: dict[int, list[Slice]] = defaultdict(list)
    for one in trace.slices:
        rows[one.lane].append(one)
    groups = module_groups(trace.ops)
    share, bars = 0.0, {lane: [_bar(one) for one in row] for lane, row in rows.items()}
    while sum(map(len, bars.values())) > most and share < 1.0:
        share = 2 * share or _FIRST_GRAIN
        is_same = (lambda a, b: True) if share > _COLORS_MIX_FROM else groups.are_alike
        bars = {lane: _merge_row(row, share * trace.step_s, is_same) for lane, row in rows.items()}
    return bars


def _merge_row(row: Sequence[Slice], grain_s: float, is_same: Callable[[Slice, Slice], bool]) -> list[Bar]:
    bars: list[Bar] = []
    for one in row:
        last = bars[-1] if bars else None
        if (
            last is not None
            and one.start_s - last.end_s <= grain_s
            and one.seconds <= grain_s
            and last.end_s - last.start_s <= grain_s
            and is_same(last.first, one)
        ):
            longer = one if one.seconds > last.first.seconds else last.first
            bars[-1] = Bar(longer, last.start_s, max(last.end_s, one.end_s), last.count + 1, last.busy_s + one.seconds)
        else:
            bars.append(_bar(one))
    return bars


def _bar(one: Slice) -> Bar:
    return Bar(one, one.start_s, one.end_s, 1, one.seconds)


def _figure(trace: Trace, bars: Mapping[int, list[Bar]]) -> Figure:
    lanes = [k for k, lane in enumerate(trace.lanes) if bars.get(k) or lane.is_device][:_MOST_LANES]
    shown = [bars.get(lane, []) for lane in lanes]
    heights = [_DEVICE_PX if trace.lanes[lane].is_device else _LINK_PX for lane in lanes]
    centers = [sum(heights[:place]) + height / 2 for place, height in enumerate(heights)]
    traces = [
        _lane_trace(trace.lanes[lane].name, center, height, row)
        for lane, center, height, row in zip(lanes, centers, heights, shown, strict=True)
    ]
    layout = base_layout(
        barmode="overlay",
        bargap=0,
        margin={"l": 70, "r": 12, "t": 6, "b": 44},
        xaxis=axis("milliseconds since the step began", range=[0, trace.step_s * 1e3], minallowed=0),
        yaxis=axis(
            "",
            tickvals=centers,
            ticktext=[plot_text(trace.lanes[lane].name.replace("->", "→"), _LABEL_CHARACTERS) for lane in lanes],
            range=[sum(heights), 0],
            fixedrange=True,
            gridcolor="rgba(0,0,0,0)",
        ),
    )
    variants = [_by_phase(trace, shown), _by_module(trace, shown)]
    height = sum(heights) + _AROUND_PX
    return Figure("timeline-figure", "Timeline of one step", traces, layout, height, variants, _LEAST_WIDTH_PX)


def _by_phase(trace: Trace, shown: Sequence[Sequence[Bar]]) -> Variant:
    used, phases = {one.kind for one in trace.slices}, list(PHASE_COLORS)

    def color_of(one: Slice) -> int:
        return phases.index(one.kind) if one.kind in PHASE_COLORS else len(phases)

    legend = [(phase, color) for phase, color in PHASE_COLORS.items() if phase in used]
    return _coloured("by phase", shown, color_of, [*PHASE_COLORS.values(), OTHER_COLOR], legend)


def _by_module(trace: Trace, shown: Sequence[Sequence[Bar]]) -> Variant:
    groups = module_groups(trace.ops)
    colors = [*MODULE_COLORS[: len(groups.names)], OTHER_COLOR, PHASE_COLORS[TRANSFER]]

    def color_of(one: Slice) -> int:
        return len(colors) - 1 if one.kind == TRANSFER else groups.index(one)

    names = [*groups.names, OTHERS] if groups.has_others else groups.names
    legend = [*zip(map(readable, names), colors)]
    if any(one.kind == TRANSFER for one in trace.slices):
        legend.append((TRANSFER, PHASE_COLORS[TRANSFER]))
    return _coloured("by module", shown, color_of, colors, legend)


def _lane_trace(name: str, center: float, height: int, bars: Sequence[Bar]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": plot_text(name),
        "y": [center] * len(bars),
        "base": [_ms(bar.start_s) for bar in bars],
        "x": [_ms(bar.end_s - bar.start_s) for bar in bars],
        "width": _FILLED * height,
        "hovertext": [_words(bar) for bar in bars],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "marker": {"color": [0] * len(bars), "line": {"width": 0}},
    }


def _coloured(
    label: str,
    shown: Sequence[Sequence[Bar]],
    color_of: Callable[[Slice], int],
    colors: Sequence[str],
    legend: Sequence[tuple[str, str]],
) -> Variant:
    restyle: dict[str, list[Any]] = {"marker.color": [[color_of(bar.first) for bar in row] for row in shown]}
    restyle |= {f"marker.{name}": [value] * len(shown) for name, value in discrete_scale(colors).items()}
    return Variant(label, restyle, legend=legend)


def _words(bar: Bar) -> str:
    """What a bar says when it is pointed at."""
    one = bar.first
    when = f"{format_ms(bar.start_s)} to {format_ms(bar.end_s)} ms"
    if bar.count > 1:
        head = f"<b>{bar.count:,} {'transfers' if one.kind == TRANSFER else 'ops'}</b>"
        most = f"longest: {plot_text(one.name)}" + (f" in {plot_text(one.module)}" if one.module else "")
        return "<br>".join((head, most, f"{format_seconds(bar.busy_s)}, {when}"))
    lines = [f"<b>{plot_text(one.name)}</b>"]
    if one.ends:
        lines.append(f"{plot_text(one.ends[0])} → {plot_text(one.ends[1])}, {format_bytes(one.num_bytes)}")
    else:
        lines.append(plot_text(one.target))
    if one.module:
        lines.append(plot_text(one.module))
    part = f", micro-batch {one.micro_batch}" if one.micro_batch >= 0 else ""
    lines.append(f"{plot_text(one.kind)}{part}: {format_seconds(one.seconds)}, {when}")
    return "<br>".join(lines)


def _table(trace: Trace) -> str:
    rows: list[list[object]] = []
    by_owner: dict[str, list[Slice]] = {lane.owner: [] for lane in trace.lanes if lane.is_device}
    for one in trace.ops:
        by_owner.setdefault(trace.device_of(one), []).append(one)
    for name, ops in by_owner.items():
        busy_s = covered_s(ops)
        phases = [sum(one.seconds for one in ops if one.kind == phase) for phase in ("forward", "backward", "update")]
        rows.append([name, f"{len(ops):,}", f"{busy_s / trace.step_s:.0%}", format_ms(busy_s), *map(format_ms, phases)])
    heads = ["device", "ops", "busy", "busy, ms", "forward", "backward", "update"]
    return table(heads, rows, numbers=range(1, 7), minor=(4, 5, 6))


def _num_transfers(trace: Trace) -> int:
    """Each once, also where it holds several links."""
    return len({(one.name, one.start_s, one.ends) for one in trace.slices if one.kind == TRANSFER})


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)
