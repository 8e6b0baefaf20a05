"""A timeline as a frame of a film, of one size for one host, and as text for a terminal."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.graphs.opgraph import OpGraph
from rlplace.measure.hosts.host import Host
from rlplace.measure.timeline import Timeline
from rlplace.report.format import format_seconds
from rlplace.report.timeline_lanes import tallest_in
from rlplace.report.timeline_picture import draw_timeline

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
