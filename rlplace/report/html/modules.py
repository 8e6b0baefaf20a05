"""The placement on the tree of modules: area is time, colour is the device.

The parts of a model that figures colour and count: its modules, at the depth at which they tell something.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlplace.format import format_ms
from rlplace.report.html.figure import (
    CARD,
    DEVICE_COLORS,
    GRID,
    INK,
    MODULE_COLORS,
    OTHER_COLOR,
    Figure,
    Section,
    Variant,
    details,
    plot_text,
    readable,
    table,
)
from rlplace.report.html.run_data import RunData
from rlplace.report.html.trace import Slice, Trace

MOST_NODES = 1500
_MOST_DEPTH = 12
_SHOWN_DEPTH = 4
_MOST_ROWS = 20
_HEIGHT_PX = 460
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
    devices = devices_of(trace)
    figure = _figure(tree(trace), devices)
    lead = (
        "Every module of the model: its area is the time of its ops (forward, backward and update), its colour the "
        "device that they run on. A blend of colours is a module on several devices; click on it to look inside."
    )
    body = figure.place + details("The largest modules as a table", _table(trace, devices))
    return Section("modules", "Placement", lead, body, (figure,))


def devices_of(trace: Trace) -> dict[str, str]:
    """Every device that runs an op, and its colour, in order of display."""
    used = {trace.device_of(op) for op in trace.ops}
    names = dict.fromkeys(lane.owner for lane in trace.lanes if lane.owner in used)
    return {name: DEVICE_COLORS[k] if k < len(DEVICE_COLORS) else OTHER_COLOR for k, name in enumerate(names)}


def tree(trace: Trace) -> Node:
    """The modules of a step, from the model itself down."""
    root = Node("")
    for op in trace.ops:
        device = trace.device_of(op)
        root.add(device, op)
        node = root
        for part in (op.module.split(".") if op.module else [OUTSIDE])[:_MOST_DEPTH]:
            path = f"{node.path}.{part}" if node.path else part
            node = node.children.setdefault(part, Node(path))
            node.add(device, op)
    return root


def blended(shares: Mapping[str, float], colors: Mapping[str, str]) -> str:
    """The colours of devices, mixed by what each takes.

    Example:
        >>> blended({"a": 1.0, "b": 1.0}, {"a": "#000000", "b": "#FFFFFF"})
        '#808080'
    """
    total = sum(shares.values()) or 1.0
    parts = [
        sum(share / total * int(colors[name][place : place + 2], 16) for name, share in shares.items())
        for place in (1, 3, 5)
    ]
    return "#" + "".join(f"{int(part + 0.5):02X}" for part in parts)


def text_color(fill: str) -> str:
    """Dark or white, whichever has more contrast on `fill`; the page's ink on a colour of the page.

    Source: relative luminance and contrast of WCAG 2.1.

    >>> text_color("#DDCC77"), text_color("#332288"), text_color("@grid")
    ('#0D1317', '#FFFFFF', '@ink')
    """
    if fill.startswith("@"):
        return INK
    parts = [int(fill[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#0D1317" if luminance > _LIGHT_FROM else "#FFFFFF"


def _color(node: Node, colors: Mapping[str, str]) -> str:
    """That of the page where the parts inside are in view anyway, else that of the devices."""
    is_open = (node.children and node.path.count(".") < _SHOWN_DEPTH - 3) or not node.path
    return GRID if is_open else blended(node.seconds, colors)


def _figure(root: Node, colors: Mapping[str, str]) -> Figure:
    nodes = _nodes(root)
    index = {id(node): place for place, (node, _) in enumerate(nodes)}
    fills = [_color(node, colors) for node, _ in nodes]
    trace = {
        "type": "treemap",
        "ids": [str(place) for place in range(len(nodes))],
        "parents": ["" if parent is None else str(index[id(parent)]) for _, parent in nodes],
        "labels": [plot_text(node.path.rpartition(".")[2] or "the step") for node, _ in nodes],
        "values": [round(node.total_s * 1e3, 6) for node, _ in nodes],
        "hovertext": [_words(node, root.total_s) for node, _ in nodes],
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
        "modules-figure", "Modules by time and device", [trace], layout, _HEIGHT_PX, [Variant("", legend=legend)]
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


def _words(node: Node, total_s: float) -> str:
    lines = [f"<b>{plot_text(node.path or 'the step')}</b>"]
    lines.append(f"{node.num_ops:,} ops, {format_ms(node.total_s)} ms, {node.total_s / total_s:.1%} of all work")
    lines += [f"{plot_text(name)}: {seconds / (node.total_s or 1):.0%}" for name, seconds in _ranked(node.seconds)]
    return "<br>".join(lines)


def _ranked(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])


def _table(trace: Trace, devices: Mapping[str, str]) -> str:
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
        return _part(op.module, self.depth)

    def index(self, op: Slice) -> int:
        """The place of an op's part among `names`; their number for all others."""
        name = self.name_of(op)
        return self.names.index(name) if name in self.names else len(self.names)

    def are_alike(self, a: Slice, b: Slice) -> bool:
        """Whether two ops have one phase and one part."""
        return a.kind == b.kind and self.name_of(a) == self.name_of(b)


def module_groups(ops: Sequence[Slice], most: int = len(MODULE_COLORS)) -> ModuleGroups:
    """The parts of the model that `ops` are of; at most `most` of them by name."""
    for depth in range(1, _DEEPEST_GROUP + 1):
        seconds = _seconds(ops, depth)
        total = sum(seconds.values())
        if len(seconds) >= _ENOUGH or max(seconds.values(), default=0.0) <= _DOMINATES * total:
            break
    ranked = sorted(seconds, key=lambda name: (-seconds[name], name))
    return ModuleGroups(tuple(ranked[:most]), depth, len(ranked) > most)


def _seconds(ops: Sequence[Slice], depth: int) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for op in ops:
        found[_part(op.module, depth)] += op.seconds
    return found


def _part(module: str, depth: int) -> str:
    return ".".join(module.split(".")[:depth]) or OUTSIDE
