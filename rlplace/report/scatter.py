"""How well simulated step times agree with measured ones, as a picture."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlplace.errors import InvalidValue
from rlplace.files import write_bytes_atomic
from rlplace.report.drawing import Axes, Figure, FigureCanvasAgg, FuncFormatter, LogLocator, NullFormatter

KIND_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
"""Okabe and Ito's palette (2008), in order of first use."""
KIND_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
BAND = 0.1

_INK, _FAINT_INK, _GRID = "#1F2933", "#5B6773", "#DDE2E7"
_SIZE_IN, _DPI = (7.2, 7.0), 150
_LOG_FROM_RATIO = 5.0


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
    simulated_ms = np.asarray(simulated_s, dtype=np.float64) * 1e3
    measured_ms = np.asarray(measured_s, dtype=np.float64) * 1e3
    for name, length in (("measured_s", measured_ms.size), ("kinds", len(kinds))):
        if length != simulated_ms.size:
            raise InvalidValue(
                name,
                f"{length} entries",
                f"{simulated_ms.size}, one for each simulated step time",
                where="fidelity plot",
            )
    buffer = io.BytesIO()
    _draw(simulated_ms, measured_ms, list(kinds), metrics, title).savefig(buffer, format="png", dpi=_DPI)
    write_bytes_atomic(path, buffer.getvalue())


def _draw(
    simulated_ms: NDArray[np.float64],
    measured_ms: NDArray[np.float64],
    kinds: list[str],
    metrics: Mapping[str, float | None],
    title: str,
) -> Figure:
    figure = Figure(figsize=_SIZE_IN, dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.115, 0.095, 0.85, 0.815))
    is_timed = np.isfinite(simulated_ms) & np.isfinite(measured_ms) & (simulated_ms > 0) & (measured_ms > 0)
    both = np.concatenate((simulated_ms[is_timed], measured_ms[is_timed]))
    low, high = (float(both.min()), float(both.max())) if both.size else (0.5, 1.0)
    is_log = high > _LOG_FROM_RATIO * low
    margin = (high / low) ** 0.07 if is_log else 0.0
    pad = 0.07 * (high - low) or 0.1 * high
    ends = (low / margin, high * margin) if is_log else (max(low - pad, 0.0), high + pad)
    if is_log:
        _log_axes(axes)
    axes.set_xlim(ends)
    axes.set_ylim(ends)
    line = np.array(ends)
    axes.fill_between(
        line,
        line * (1 - BAND),
        line * (1 + BAND),
        color="#E9EDF1",
        linewidth=0,
        zorder=1,
        label=f"± {BAND:.0%}".replace("%", " %"),
    )
    axes.plot(line, line, color=_FAINT_INK, linewidth=1.2, zorder=2)
    for number, kind in enumerate(dict.fromkeys(kinds)):
        chosen = is_timed & (np.array(kinds) == kind)
        axes.scatter(
            measured_ms[chosen],
            simulated_ms[chosen],
            s=38,
            zorder=3,
            label=kind,
            alpha=0.9,
            linewidths=0.6,
            edgecolors="white",
            color=KIND_COLORS[number % len(KIND_COLORS)],
            marker=KIND_MARKERS[number % len(KIND_MARKERS)],
        )
    num_left_out = int(np.count_nonzero(~is_timed))
    _finish(figure, axes, metrics, title, num_left_out)
    return figure


def _log_axes(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def _finish(figure: Figure, axes: Axes, metrics: Mapping[str, float | None], title: str, num_left_out: int) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_GRID)
    axes.tick_params(which="both", length=0, labelsize=9, labelcolor=_FAINT_INK)
    axes.grid(color=_GRID, linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.set_xlabel("measured step, ms", fontsize=10, color=_FAINT_INK)
    axes.set_ylabel("simulated step, ms", fontsize=10, color=_FAINT_INK)
    figure.text(
        0.115,
        0.965,
        title,
        fontsize=13.5,
        fontweight="bold",
        color=_INK,
        ha="left",
        va="top",
        parse_math=False,
    )
    legend = axes.legend(
        loc="upper left",
        fontsize=9.5,
        labelcolor=_INK,
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
    lines = [f"{name.replace('_', ' ')}  {_figure_text(name, value)}" for name, value in metrics.items()]
    lines += [f"failed, left out  {num_left_out}"] if num_left_out else []
    axes.text(
        0.98,
        0.03,
        "\n".join(lines),
        transform=axes.transAxes,
        ha="right",
        va="bottom",
        fontsize=9.5,
        color=_INK,
        linespacing=1.5,
        zorder=4,
        parse_math=False,
        bbox={"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 3.0},
    )


def _figure_text(name: str, value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.1%}".replace("%", " %") if name.endswith(("_error", "_regret")) else f"{value:.3f}"
