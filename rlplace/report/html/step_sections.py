"""The sections on one step: its timeline, its modules by time and device, and the memory of each device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlplace.measure import Device
from rlplace.report.chrome_trace import TRANSFER, Slice, Trace
from rlplace.report.drawing import memory_figure, svg_of, timeline_figure
from rlplace.report.html.markup import Section, escaped, legend, paragraph, picture, stacked
from rlplace.report.html.run_data import RunData
from rlplace.report.lanes import PHASES, Parts
from rlplace.report.plots import OTHER_COLOR, device_colors, memory_over_time
from rlplace.say import format_bytes, format_ms, format_seconds

MOST_BARS = 4000
"""More ops and transfers than that are joined with their neighbours: no screen shows them one by one."""
MODULE_COLORS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#8C6D46", "#9A8FC1")
"""After Paul Tol's `bright` scheme (2021)."""
OUTSIDE = "(outside modules)"
OTHERS = "others"


def timeline_section(data: RunData) -> Section | None:
    """The timeline, its bars by phase and by module; None for a run without a trace."""
    trace = data.trace
    if trace is None or not trace.ops:
        return None
    num_transfers = len({(one.name, one.start_s, one.ends) for one in trace.slices if one.kind == TRANSFER})
    typical = ", a typical one" if data.ending.is_measured else ""
    lead = (
        f"One {trace.kind or data.kind} step of {format_seconds(trace.step_s)}{typical}: {len(trace.ops):,} ops "
        f"and {num_transfers:,} transfers."
    )
    views = {}
    for label, parts in (("by phase", PHASES), ("by module", parts_of_model(trace))):
        figure = timeline_figure(trace, data.devices, data.num_micro_batches, parts=parts, most_bars=MOST_BARS)
        used = {parts.part_of(one) for one in trace.slices}
        colors = {name: color for name, color in parts.colors.items() if name in used}
        views[label] = legend(colors) + svg_of(figure, label.replace(" ", "-"))
    how = paragraph("Drag to zoom, double-click to see all of it again.", "note minor")
    note = paragraph(
        f"{len(trace.slices):,} ops and transfers are drawn as about {MOST_BARS:,} bars: short neighbours as one, "
        "which says how many it stands for. timeline.json has all of them.",
        "note",
    )
    body = picture("timeline-figure", "Timeline of one step", views) + how
    body += note if len(trace.slices) > MOST_BARS else ""
    return Section("timeline", "Timeline", lead, body)


_DEEPEST_PART = 5
_DOMINATES = 0.6
"""While one part takes more than this of the time, the model is cut one level deeper ..."""
_ENOUGH = 5
"""... unless it falls into as many parts already."""


def parts_of_model(trace: Trace) -> Parts:
    """The parts of the model in a step, those that take longest with a colour of their own; and its transfers."""
    for depth in range(1, _DEEPEST_PART + 1):
        seconds = defaultdict[str, float](float)
        for op in trace.ops:
            seconds[_part(op, depth)] += op.seconds
        if len(seconds) >= _ENOUGH or max(seconds.values()) <= _DOMINATES * sum(seconds.values()):
            break
    ranked = sorted(seconds, key=lambda name: (-seconds[name], name))
    colors = dict(zip(ranked, MODULE_COLORS))

    def part_of(one: Slice) -> str:
        part = TRANSFER if one.kind == TRANSFER else _part(one, depth)
        return part if part in colors or one.kind == TRANSFER else OTHERS

    return Parts({**colors, OTHERS: OTHER_COLOR, TRANSFER: PHASES.colors[TRANSFER]}, part_of)


def _part(op: Slice, depth: int) -> str:
    return ".".join(op.module.split(".")[:depth]) or OUTSIDE


MOST_NODES = 1500
_MOST_DEPTH = 12


@dataclass
class Node:
    """A module: the seconds of its ops and those below it, by device."""

    name: str
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
    """The tree of modules; None for a run without a trace."""
    trace = data.trace
    if trace is None or not any(op.seconds for op in trace.ops):
        return None
    used = {trace.device_of(op) for op in trace.ops}
    colors = device_colors(lane.owner for lane in trace.lanes if lane.owner in used)
    lead = (
        "Every module of the model: the length of its bar is the time of its ops (forward, backward and update), the "
        "colours are the devices that they run on. Click on a module to look inside."
    )
    root = tree(trace)
    every = [root]
    for node in every:
        every += node.children.values()
    least_s = sorted((node.total_s for node in every), reverse=True)[: MOST_NODES + 1][-1]
    body = f'{legend(colors)}<div class="modules">{_inside(root, root.total_s, colors, least_s)}</div>'
    return Section("modules", "Placement", lead, body)


def tree(trace: Trace) -> Node:
    """The modules of a step, from the model itself down."""
    root = Node("")
    for op in trace.ops:
        device = trace.device_of(op)
        root.add(device, op)
        node = root
        for part in (op.module.split(".") if op.module else [OUTSIDE])[:_MOST_DEPTH]:
            node = node.children.setdefault(part, Node(part))
            node.add(device, op)
    return root


def _inside(parent: Node, step_s: float, colors: Mapping[str, str], least_s: float) -> str:
    """The modules below one, those that take longest first; a module that is alone stands open."""
    shown = [node for node in parent.children.values() if node.total_s >= max(least_s, 1e-12)]
    longest_s = max((node.total_s for node in shown), default=0.0)
    lines = []
    for node in sorted(shown, key=lambda node: -node.total_s):
        shares = ", ".join(f"{name} {seconds / node.total_s:.0%}" for name, seconds in node.seconds.items())
        bar = stacked([(colors[name], seconds) for name, seconds in node.seconds.items()], node.total_s / longest_s)
        figures = (f"{node.num_ops:,} ops", f"{format_ms(node.total_s)} ms", f"{node.total_s / step_s:.1%}")
        line = f"<span>{escaped(node.name)}</span>{bar}"
        line += "".join(f'<span class="number">{figure}</span>' for figure in figures)
        below = _inside(node, step_s, colors, least_s)
        is_open, title = " open" if len(shown) == 1 else "", f' title="{escaped(shares)}"'
        folded = f"<details{is_open}><summary{title}>{line}</summary>{below}</details>"
        lines.append(folded if below else f"<div{title}>{line}</div>")
    return "".join(lines)


def memory_section(data: RunData) -> Section | None:
    """Lines of memory over time; None where memory was not followed."""
    trace = data.trace
    if trace is None or not any(trace.memory.values()):
        return None
    memory = {name: points for name, points in trace.memory.items() if points}
    lead = "What each device holds during the step: parameters, gradients, optimizer state, activations and copies."
    rooms = [device.memory_bytes for device in data.devices if device.name in memory]
    plot = memory_over_time(memory, trace.step_s, rooms)
    shown = svg_of(memory_figure(plot, "Memory of each device"), "memory")
    body = picture("memory-figure", "Memory of each device over the step", {"": shown})
    body += paragraph(pools, "note") if (pools := _pools(data.devices)) else ""
    return Section("memory", "Memory", lead, body)


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
