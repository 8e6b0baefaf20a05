"""Memory over the step: what each device holds, and what it may hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlplace.format import format_bytes
from rlplace.report.html.figure import (
    DEVICE_COLORS,
    FAINT,
    OTHER_COLOR,
    Figure,
    Section,
    Variant,
    axis,
    base_layout,
    paragraph,
    plot_text,
    readable,
    table,
)
from rlplace.report.html.run_data import DeviceFacts, RunData

MOST_POINTS = 800
"""Of a device's line; of more, the highest in each stretch are kept, so that peaks stay."""
_NEAR = 0.25
"""From this share of the capacity on, its line is in the picture at first."""
_HEIGHT_PX = 300
_UNITS = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "bytes"))

Points = Sequence[tuple[float, int]]


def memory_section(data: RunData) -> Section | None:
    """Lines of memory over time and a table of peaks; None where memory was not followed."""
    trace = data.trace
    if trace is None or not any(trace.memory.values()):
        return None
    capacity = {device.name: device for device in data.devices}
    figure = _figure(trace.memory, capacity, trace.step_s, [lane.owner for lane in trace.lanes])
    lead = "What each device holds during the step: parameters, gradients, optimizer state, activations and copies."
    rows: list[list[object]] = []
    for name, points in trace.memory.items():
        peak, facts = max(value for _, value in points), capacity.get(name)
        known = facts is not None and facts.memory_bytes > 0
        share = f"{peak / facts.memory_bytes:.0%}" if facts is not None and known else ""
        room = format_bytes(facts.memory_bytes) if facts is not None and known else ""
        rows.append([name, format_bytes(peak), room, share])
    body = figure.place + table(["device", "peak", "capacity", "peak of it"], rows, numbers=(1, 2, 3))
    if pools := _pools(data.devices):
        body += paragraph(pools, "note")
    return Section("memory", "Memory", lead, body, (figure,))


def thinned(points: Points, step_s: float, most: int = MOST_POINTS) -> list[tuple[float, int]]:
    """The points of a line that holds each value until the next; of too many, the highest in each stretch of time."""
    if len(points) <= most or step_s <= 0:
        return list(points)
    highest: dict[int, tuple[float, int]] = {}
    for time_s, value in points:
        stretch = min(int(time_s / step_s * most), most)
        if stretch not in highest or value > highest[stretch][1]:
            highest[stretch] = time_s, value
    last = points[-1]
    kept = [highest[stretch] for stretch in sorted(highest)]
    return kept if kept[-1] == last else [*kept, last]


def _figure(
    memory: Mapping[str, Points], capacity: dict[str, DeviceFacts], step_s: float, order: Sequence[str]
) -> Figure:
    peak = max(value for points in memory.values() for _, value in points)
    scale, unit = next(((scale, unit) for scale, unit in _UNITS if peak >= scale), _UNITS[-1])
    names = [name for name in dict.fromkeys(order) if memory.get(name)]
    names += [name for name, points in memory.items() if points and name not in names]
    colors = {name: DEVICE_COLORS[k] if k < len(DEVICE_COLORS) else OTHER_COLOR for k, name in enumerate(names)}
    data: list[dict[str, Any]] = []
    for name in names:
        points = thinned(memory[name], step_s)
        line = [*points, (step_s, points[-1][1])]
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": plot_text(name),
                "x": [round(time_s * 1e3, 4) for time_s, _ in line],
                "y": [round(value / scale, 5) for _, value in line],
                "line": {"shape": "hv", "width": 1.6, "color": colors[name]},
                "hovertemplate": "%{fullData.name}: %{y:.4g} " + unit + "<extra></extra>",
            }
        )
    rooms = sorted({capacity[name].memory_bytes for name in names if name in capacity and capacity[name].memory_bytes})
    data += [_capacity_line(room, scale, step_s) for room in rooms]
    top = peak / scale * 1.08 or 1.0
    whole = max([top, *(room / scale * 1.05 for room in rooms)])
    is_near = bool(rooms) and peak >= _NEAR * rooms[0]
    legend = [(readable(name), color) for name, color in colors.items()]
    close = Variant("fit", relayout={"yaxis.range": [0, top]}, legend=legend)
    far = Variant("with the capacity", relayout={"yaxis.range": [0, whole]}, legend=legend)
    both = [far, close] if is_near else [close, far]
    layout = base_layout(
        hovermode="x",
        xaxis=axis("milliseconds since the step began", range=[0, step_s * 1e3], minallowed=0),
        yaxis=axis(unit, range=[0, whole if is_near else top], minallowed=0, fixedrange=True),
    )
    return Figure(
        "memory-figure", "Memory of each device over the step", data, layout, _HEIGHT_PX, both if rooms else [close]
    )


def _capacity_line(room: int, scale: float, step_s: float) -> dict[str, Any]:
    return {
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


def _pools(devices: Sequence[DeviceFacts]) -> str:
    """Which devices share one memory, in words."""
    pools: dict[str, list[DeviceFacts]] = {}
    for device in devices:
        if device.memory_pool and not device.members:
            pools.setdefault(device.memory_pool, []).append(device)
    shared = [members for members in pools.values() if len(members) > 1]
    lines = [
        f"{', '.join(device.name for device in members)} share one memory of {format_bytes(members[0].memory_bytes)}."
        for members in shared
    ]
    return " ".join(lines)
