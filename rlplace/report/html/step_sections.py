"""The sections on one step: its timeline, its modules by time and device, and the memory of each device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, repeat
from typing import Any

from rlplace.measure import Device
from rlplace.report.chrome_trace import TRANSFER, Slice, Trace, covered_s
from rlplace.report.html.figure import (
    CARD,
    DEVICE_COLORS,
    FAINT,
    GRID,
    INK,
    MODULE_COLORS,
    OTHER_COLOR,
    Figure,
    Section,
    Variant,
    axis,
    base_layout,
    details,
    discrete_scale,
    paragraph,
    plot_text,
    readable,
    table,
)
from rlplace.report.html.run_data import RunData
from rlplace.report.plots import PHASE_COLORS, blended, luminance
from rlplace.say import format_bytes, format_ms, format_seconds

MOST_BARS = 4000
"""More slices than that are merged with their neighbours: no screen shows them one by one."""
_FIRST_GRAIN, _COLORS_MIX_FROM = 1 / 20_000, 1 / 2_000
_DEVICE_PX, _LINK_PX, _AROUND_PX = 56, 26, 84
_MOST_LANES, _LABEL_CHARACTERS, _FILLED = 40, 22, 0.84


@dataclass(frozen=True, slots=True)
class Bar:
    """Slices of one lane that are drawn as one.

    Attributes:
        first: the longest of them, which gives the bar its colours.
        start_s, end_s: from the first's start to the last's end.
        count: how many.
        busy_s: their sum.
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
    num_transfers = len({(one.name, one.start_s, one.ends) for one in trace.slices if one.kind == TRANSFER})
    typical = ", a typical one" if data.ending.is_measured else ""
    lead = (
        f"One {trace.kind or data.kind} step of {format_seconds(trace.step_s)}{typical}: {len(trace.ops):,} ops "
        f"and {num_transfers:,} transfers."
    )
    note = paragraph(
        f"{len(trace.slices):,} ops and transfers are drawn as {shown:,} bars: short neighbours as one, which says "
        "how many it stands for. timeline.json has all of them.",
        "note",
    )
    figure = _figure(trace, bars)
    how = paragraph("Drag to zoom, double-click to see all of it again.", "note minor")
    body = figure.place + how + (note if shown < len(trace.slices) else "") + _table(trace)
    return Section("timeline", "Timeline", lead, body, (figure,))


def merged(trace: Trace, most: int = MOST_BARS) -> dict[int, list[Bar]]:
    """The bars of each lane, at most about `most` in all.

    Neighbours are merged where both of them, and the gap between them, are shorter than a grain of the step; the grain
    grows until there are few enough. While it is below the resolution of a screen, only ops of one phase and one part
    of the model are merged.
    """
    groups, share = module_groups(trace.ops), 0.0
    bars = _merged(trace, -1.0, groups.are_alike)
    while sum(map(len, bars.values())) > most and share < 1.0:
        share = 2 * share or _FIRST_GRAIN
        is_same = (lambda a, b: True) if share > _COLORS_MIX_FROM else groups.are_alike
        bars = _merged(trace, share * trace.step_s, is_same)
    return bars


def _merged(trace: Trace, grain_s: float, is_same: Callable[[Slice, Slice], bool]) -> dict[int, list[Bar]]:
    bars: dict[int, list[Bar]] = defaultdict(list)
    for one in trace.slices:
        row, last = bars[one.lane], bars[one.lane][-1] if bars[one.lane] else None
        if (
            last is not None
            and max(one.start_s - last.end_s, one.seconds, last.end_s - last.start_s) <= grain_s
            and is_same(last.first, one)
        ):
            longer = one if one.seconds > last.first.seconds else last.first
            row[-1] = Bar(longer, last.start_s, max(last.end_s, one.end_s), last.count + 1, last.busy_s + one.seconds)
        else:
            row.append(Bar(one, one.start_s, one.end_s, 1, one.seconds))
    return bars


def _figure(trace: Trace, bars: Mapping[int, list[Bar]]) -> Figure:
    lanes = [k for k, lane in enumerate(trace.lanes) if bars.get(k) or lane.is_device][:_MOST_LANES]
    shown = [bars.get(lane, []) for lane in lanes]
    heights = [_DEVICE_PX if trace.lanes[lane].is_device else _LINK_PX for lane in lanes]
    centers = [sum(heights[:place]) + height / 2 for place, height in enumerate(heights)]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": plot_text(trace.lanes[lane].name),
            "y": [center] * len(row),
            "base": [_ms(bar.start_s) for bar in row],
            "x": [_ms(bar.end_s - bar.start_s) for bar in row],
            "width": _FILLED * height,
            "hovertext": [_words(bar) for bar in row],
            "hovertemplate": "%{hovertext}<extra></extra>",
            "marker": {"color": [0] * len(row), "line": {"width": 0}},
        }
        for lane, center, height, row in zip(lanes, centers, heights, shown, strict=True)
    ]
    layout = base_layout(
        barmode="overlay",
        bargap=0,
        margin={"l": 70, "r": 12, "t": 6, "b": 44},
        xaxis=axis("ms since the step began", range=[0, trace.step_s * 1e3], minallowed=0),
        yaxis=axis(
            "",
            tickvals=centers,
            ticktext=[plot_text(trace.lanes[lane].name.replace("->", "→"), _LABEL_CHARACTERS) for lane in lanes],
            range=[sum(heights), 0],
            fixedrange=True,
            gridcolor="rgba(0,0,0,0)",
        ),
    )
    used, groups = {one.kind for one in trace.slices}, module_groups(trace.ops)
    phases = {phase: color for phase, color in PHASE_COLORS.items() if phase in used}
    names = [*groups.names, *([OTHERS] if groups.has_others else [])]
    parts = dict(zip(names, (*MODULE_COLORS[: len(groups.names)], OTHER_COLOR)))
    sent = {TRANSFER: PHASE_COLORS[TRANSFER]} if TRANSFER in used else {}
    variants = [
        _coloured("by phase", shown, lambda one: one.kind, phases),
        _coloured(
            "by module", shown, lambda one: TRANSFER if one.kind == TRANSFER else groups.name_of(one), parts | sent
        ),
    ]
    return Figure(
        "timeline-figure",
        "Timeline of one step",
        traces,
        layout,
        sum(heights) + _AROUND_PX,
        variants,
    )


def _coloured(
    label: str, shown: Sequence[Sequence[Bar]], part_of: Callable[[Slice], str], colors: Mapping[str, str]
) -> Variant:
    """Bars in the colours of their parts, by name; parts without one in `OTHER_COLOR`."""
    places, scale = {name: place for place, name in enumerate(colors)}, discrete_scale([*colors.values(), OTHER_COLOR])
    restyle: dict[str, list[Any]] = {
        "marker.color": [[places.get(part_of(bar.first), len(colors)) for bar in row] for row in shown],
        **{f"marker.{name}": [value] * len(shown) for name, value in scale.items()},
    }
    return Variant(label, restyle, legend=[(readable(name), color) for name, color in colors.items()])


def _words(bar: Bar) -> str:
    """The hover text of a bar."""
    one = bar.first
    when = f"{format_ms(bar.start_s)} to {format_ms(bar.end_s)} ms"
    if bar.count > 1:
        head = f"<b>{bar.count:,} {'transfers' if one.kind == TRANSFER else 'ops'}</b>"
        most = f"longest: {plot_text(one.name)}" + (f" in {plot_text(one.module)}" if one.module else "")
        return "<br>".join((head, most, f"{format_seconds(bar.busy_s)}, {when}"))
    part = f", micro-batch {one.micro_batch}" if one.micro_batch >= 0 else ""
    lines = (
        f"<b>{plot_text(one.name)}</b>",
        f"{' → '.join(map(plot_text, one.ends))}, {format_bytes(one.num_bytes)}" if one.ends else plot_text(one.target),
        *([plot_text(one.module)] if one.module else []),
        f"{plot_text(one.kind)}{part}: {format_seconds(one.seconds)}, {when}",
    )
    return "<br>".join(lines)


def _table(trace: Trace) -> str:
    by_owner: dict[str, list[Slice]] = {lane.owner: [] for lane in trace.lanes if lane.is_device}
    for one in trace.ops:
        by_owner.setdefault(trace.device_of(one), []).append(one)
    rows = []
    for name, ops in by_owner.items():
        busy_s = covered_s(ops)
        phases = [sum(one.seconds for one in ops if one.kind == phase) for phase in ("forward", "backward", "update")]
        rows.append([name, f"{len(ops):,}", f"{busy_s / trace.step_s:.0%}", format_ms(busy_s), *map(format_ms, phases)])
    heads = ["device", "ops", "busy", "busy, ms", "forward", "backward", "update"]
    return table(heads, rows, numbers=range(1, 7), minor=(4, 5, 6))


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)


MOST_NODES = 1500
_MOST_DEPTH, _SHOWN_DEPTH, _MOST_ROWS = 12, 4, 20
_TREEMAP_PX = 460
_LIGHT_FROM = 0.183


@dataclass
class Node:
    """A module: the seconds of its ops and those below it, by device."""

    path: str
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    num_ops: int = 0
    children: dict[str, Node] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        """Seconds on all devices."""
        return sum(self.seconds.values())

    def add(self, device: str, op: Slice) -> None:
        """Counts an op."""
        self.seconds[device] += op.seconds
        self.num_ops += 1


def modules_section(data: RunData) -> Section | None:
    """The map of modules and a table of the largest; None for a run without a trace."""
    trace = data.trace
    if trace is None or not any(op.seconds for op in trace.ops):
        return None
    used = {trace.device_of(op) for op in trace.ops}
    devices = colored(lane.owner for lane in trace.lanes if lane.owner in used)
    figure = _treemap(tree(trace), devices)
    lead = (
        "Every module of the model: its area is the time of its ops (forward, backward and update), its colour the "
        "device that they run on. A blend of colours is a module on several devices; click on it to look inside."
    )
    body = figure.place + details("The largest modules as a table", _modules_table(trace, devices))
    return Section("modules", "Placement", lead, body, (figure,))


def colored(names: Iterable[str]) -> dict[str, str]:
    """Devices, each once, with their colours."""
    return dict(zip(dict.fromkeys(names), chain(DEVICE_COLORS, repeat(OTHER_COLOR))))


def tree(trace: Trace) -> Node:
    """The modules of a step, from the model itself down."""
    root = Node("")
    for op in trace.ops:
        device = trace.device_of(op)
        root.add(device, op)
        node = root
        for part in (op.module.split(".") if op.module else [OUTSIDE])[:_MOST_DEPTH]:
            node = node.children.setdefault(part, Node(f"{node.path}.{part}" if node.path else part))
            node.add(device, op)
    return root


def text_color(fill: str) -> str:
    """Dark or white, whichever has more contrast on `fill`; the page's ink on a colour of the page.

    Source: relative luminance and contrast of WCAG 2.1.

    >>> text_color("#DDCC77"), text_color("#332288"), text_color("@grid")
    ('#0D1317', '#FFFFFF', '@ink')
    """
    return INK if fill.startswith("@") else "#0D1317" if luminance(fill) > _LIGHT_FROM else "#FFFFFF"


def _treemap(root: Node, colors: Mapping[str, str]) -> Figure:
    nodes = _nodes(root)
    index = {id(node): place for place, (node, _) in enumerate(nodes)}
    fills = [  # that of the page where the parts inside are in view anyway
        GRID
        if not node.path or (node.children and node.path.count(".") < _SHOWN_DEPTH - 3)
        else blended(node.seconds, colors)
        for node, _ in nodes
    ]
    trace = {
        "type": "treemap",
        "ids": [str(place) for place in range(len(nodes))],
        "parents": ["" if parent is None else str(index[id(parent)]) for _, parent in nodes],
        "labels": [plot_text(node.path.rpartition(".")[2] or "the step") for node, _ in nodes],
        "values": [round(node.total_s * 1e3, 6) for node, _ in nodes],
        "hovertext": [_module_words(node, root.total_s) for node, _ in nodes],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "branchvalues": "remainder" if len(nodes) == 1 else "total",
        "maxdepth": _SHOWN_DEPTH,
        "marker": {
            "colors": fills,
            "line": {"color": CARD, "width": 1},
            "pad": {"t": 18, "l": 3, "r": 3, "b": 3},
        },
        "tiling": {"pad": 1},
        "pathbar": {"thickness": 22, "textfont": {"color": INK}},
        "textfont": {"size": 12, "color": [text_color(color) for color in fills]},
    }
    legend = [(readable(name), color) for name, color in colors.items()]
    layout = {"margin": {"l": 0, "r": 0, "t": 0, "b": 0}, "uniformtext": {"minsize": 9, "mode": "hide"}}
    return Figure(
        "modules-figure", "Modules by time and device", [trace], layout, _TREEMAP_PX, [Variant("", legend=legend)]
    )


def _nodes(root: Node) -> list[tuple[Node, Node | None]]:
    """Parents before children, those that take longest if there are too many; a module alone with one is passed by."""
    every: list[tuple[Node, Node | None]] = [(root, None)]
    for node, _ in every:
        every += [(child, node) for child in node.children.values() if child.total_s > 0]
    if len(every) <= MOST_NODES:
        return every
    least_s = sorted((node.total_s for node, _ in every), reverse=True)[MOST_NODES - 1]
    return [(node, parent) for node, parent in every if node.total_s >= least_s][: MOST_NODES + 1]


def _module_words(node: Node, total_s: float) -> str:
    ranked = sorted(node.seconds.items(), key=lambda item: -item[1])
    lines = (
        f"<b>{plot_text(node.path or 'the step')}</b>",
        f"{node.num_ops:,} ops, {format_ms(node.total_s)} ms, {node.total_s / total_s:.1%} of all work",
        *(f"{plot_text(name)}: {seconds / (node.total_s or 1):.0%}" for name, seconds in ranked),
    )
    return "<br>".join(lines)


def _modules_table(trace: Trace, devices: Mapping[str, str]) -> str:
    groups = module_groups(trace.ops, most=_MOST_ROWS)
    found: dict[str, Node] = {}
    for op in trace.ops:
        name = groups.name_of(op)
        found.setdefault(name, Node(name)).add(trace.device_of(op), op)
    total_s = sum(node.total_s for node in found.values())
    rows: list[Sequence[object]] = [
        [
            name,
            f"{found[name].num_ops:,}",
            format_ms(found[name].total_s),
            f"{found[name].total_s / total_s:.1%}",
            *(f"{found[name].seconds.get(device, 0.0) / (found[name].total_s or 1.0):.0%}" for device in devices),
        ]
        for name in groups.names
    ]
    heads = ["module", "ops", "ms", "share", *devices]
    return table(heads, rows, numbers=range(1, len(heads)), minor=(1,))


OUTSIDE = "(outside modules)"
OTHERS = "others"
_DEEPEST_GROUP = 5
_DOMINATES = 0.6
"""While one part takes more than this of the time, the model is cut one level deeper ..."""
_ENOUGH = 5
"""... unless it falls into as many parts already."""


@dataclass(frozen=True)
class ModuleGroups:
    """Parts of a model.

    Attributes:
        names: of the parts with a colour of their own, those that take longest first.
        depth: components of a module's path that name its part.
        has_others: whether there are parts without a colour.
    """

    names: tuple[str, ...]
    depth: int
    has_others: bool

    def name_of(self, op: Slice) -> str:
        """The part that an op belongs to."""
        return ".".join(op.module.split(".")[: self.depth]) or OUTSIDE

    def are_alike(self, a: Slice, b: Slice) -> bool:
        """Whether two ops have one phase and one part."""
        return a.kind == b.kind and self.name_of(a) == self.name_of(b)


def module_groups(ops: Sequence[Slice], most: int = len(MODULE_COLORS)) -> ModuleGroups:
    """The parts of the model that `ops` are of; at most `most` of them by name."""
    for depth in range(1, _DEEPEST_GROUP + 1):
        groups, seconds = ModuleGroups((), depth, has_others=False), defaultdict[str, float](float)
        for op in ops:
            seconds[groups.name_of(op)] += op.seconds
        if len(seconds) >= _ENOUGH or max(seconds.values(), default=0.0) <= _DOMINATES * sum(seconds.values()):
            break
    ranked = sorted(seconds, key=lambda name: (-seconds[name], name))
    return ModuleGroups(tuple(ranked[:most]), depth, len(ranked) > most)


MOST_POINTS = 800
"""Of a device's line; of more, the highest in each stretch are kept, so that peaks stay."""
_NEAR = 0.25
"""From this share of the capacity on, its line is in the picture at first."""
_MEMORY_PX = 300
_UNITS = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "bytes"))

Points = Sequence[tuple[float, int]]


def memory_section(data: RunData) -> Section | None:
    """Lines of memory over time and a table of peaks; None where memory was not followed."""
    trace = data.trace
    if trace is None or not any(trace.memory.values()):
        return None
    figure = _memory_figure(trace, data.devices)
    lead = "What each device holds during the step: parameters, gradients, optimizer state, activations and copies."
    peaks = {name: max(value for _, value in points) for name, points in trace.memory.items()}
    rooms = {device.name: device.memory_bytes for device in data.devices if device.memory_bytes > 0}
    rows = [
        [
            name,
            format_bytes(peak),
            *((format_bytes(rooms[name]), f"{peak / rooms[name]:.0%}") if name in rooms else ("", "")),
        ]
        for name, peak in peaks.items()
    ]
    note = paragraph(pools, "note") if (pools := _pools(data.devices)) else ""
    body = figure.place + table(["device", "peak", "capacity", "peak of it"], rows, numbers=(1, 2, 3)) + note
    return Section("memory", "Memory", lead, body, (figure,))


def thinned(points: Points, step_s: float, most: int = MOST_POINTS) -> list[tuple[float, int]]:
    """The points of a line that holds each value until the next; of too many, the highest in each stretch of time."""
    if len(points) <= most or step_s <= 0:
        return list(points)
    stretches = groupby(points, lambda point: min(int(point[0] / step_s * most), most))
    kept = [max(some, key=lambda point: point[1]) for _, some in stretches]
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def _memory_figure(trace: Trace, devices: Sequence[Device]) -> Figure:
    memory, step_s = trace.memory, trace.step_s
    peak = max(value for points in memory.values() for _, value in points)
    scale, unit = next(((scale, unit) for scale, unit in _UNITS if peak >= scale), _UNITS[-1])
    colors = colored(name for name in (*(lane.owner for lane in trace.lanes), *memory) if memory.get(name))
    lines = {name: [*thinned(memory[name], step_s), (step_s, memory[name][-1][1])] for name in colors}
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": plot_text(name),
            "x": [_ms(time_s) for time_s, _ in line],
            "y": [round(value / scale, 5) for _, value in line],
            "line": {"shape": "hv", "width": 1.6, "color": colors[name]},
            "hovertemplate": "%{fullData.name}: %{y:.4g} " + unit + "<extra></extra>",
        }
        for name, line in lines.items()
    ]
    rooms = sorted({device.memory_bytes for device in devices if device.name in colors and device.memory_bytes})
    data += [
        {
            "type": "scatter",
            "mode": "lines+text",
            "name": "capacity",
            "x": [0, step_s * 1e3],
            "y": [room / scale] * 2,
            "text": [f"  capacity {format_bytes(room)}", ""],
            "textposition": "bottom right",
            "textfont": {"size": 11, "color": FAINT},
            "line": {"dash": "dash", "width": 1.4, "color": FAINT},
            "hoverinfo": "skip",
        }
        for room in rooms
    ]
    top = peak / scale * 1.08 or 1.0
    ends = {"fit": top, "with the capacity": max([top, *(room / scale * 1.05 for room in rooms)])}
    legend = [(readable(name), color) for name, color in colors.items()]
    variants = [Variant(label, relayout={"yaxis.range": [0, end]}, legend=legend) for label, end in ends.items()]
    shown = variants[:1] if not rooms else variants[::-1] if peak >= _NEAR * rooms[0] else variants
    layout = base_layout(
        hovermode="x",
        xaxis=axis("milliseconds since the step began", range=[0, step_s * 1e3], minallowed=0),
        yaxis=axis(unit, range=shown[0].relayout["yaxis.range"], minallowed=0, fixedrange=True),
    )
    return Figure("memory-figure", "Memory of each device over the step", data, layout, _MEMORY_PX, shown)


def _pools(devices: Sequence[Device]) -> str:
    """Which devices share one memory, in words."""
    pools: dict[str, list[Device]] = defaultdict(list)
    for device in devices:
        if device.memory_pool and not device.members:
            pools[device.memory_pool].append(device)
    return " ".join(
        f"{', '.join(device.name for device in members)} share one memory of {format_bytes(members[0].memory_bytes)}."
        for members in pools.values()
        if len(members) > 1
    )
