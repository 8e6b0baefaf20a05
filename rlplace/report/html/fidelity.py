"""The simulator against the host: what was simulated and measured of each placement that the run ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.format import format_ms
from rlplace.report.html.figure import (
    FAINT,
    SERIES_COLORS,
    Figure,
    Section,
    Variant,
    axis,
    base_layout,
    details,
    plot_text,
    readable,
    table,
)
from rlplace.report.html.run_data import RunData

BAND = 0.1
_FEW = 3
_HEIGHT_PX = 400
_MOST_ROWS = 60

Pairs = Mapping[str, Sequence[tuple[float, float]]]


def fidelity_section(data: RunData) -> Section | None:
    """The scatter, its error in words, and a table; None where nothing was both simulated and measured."""
    pairs = pairs_of(data)
    every = [pair for some in pairs.values() for pair in some]
    if not every or not data.is_measured:
        return None
    lead = (
        f"Each of the {len(every):,} placements that the searches ran: what the simulator said, and what the host took "
        f"(drift of the machine taken out by a reference placement in every race). {words(every)}"
    )
    figure = _figure(pairs)
    rows = [
        [name, format_ms(measured), format_ms(simulated), f"{simulated / measured - 1:+.1%}"]
        for name, some in pairs.items()
        for simulated, measured in some
    ]
    note = f"The first {_MOST_ROWS} as a table" if len(rows) > _MOST_ROWS else "The same as a table"
    columns = ["method", "measured, ms", "simulated, ms", "off by"]
    body = figure.place + details(note, table(columns, rows[:_MOST_ROWS], numbers=(1, 2, 3)))
    return Section("fidelity", "Simulator against measured", lead, body, (figure,))


def pairs_of(data: RunData) -> dict[str, list[tuple[float, float]]]:
    """Simulated and measured seconds of every placement that ran, by method; what failed on either side is left out."""
    found = {
        name: [(pair[0], pair[1]) for pair in search.tried if len(pair) == 2 and min(pair) > 0]
        for name, search in data.searches.items()
    }
    return {name: pairs for name, pairs in found.items() if pairs}


def words(pairs: Sequence[tuple[float, float]]) -> str:
    """The error of simulated against measured seconds, in a sentence or two.

    Example:
        >>> words([(1.0, 1.0), (1.1, 1.0)])
        'The median error is 5 %; on the whole the simulator says 5 % too much.'
    """
    simulated, measured = np.array(pairs, dtype=np.float64).T
    errors = simulated / measured - 1.0
    bias = float(np.median(errors))
    side = f"on the whole the simulator says {_percent(abs(bias))} too {'much' if bias > 0 else 'little'}."
    text = f"The median error is {_percent(float(np.median(np.abs(errors))))}; {side}"
    if len(pairs) < _FEW or np.ptp(simulated) == 0 or np.ptp(measured) == 0:
        return text
    return f"{text} It orders them with a rank correlation of {_spearman(simulated, measured):.2f} (1 is perfect)."


def _spearman(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Rank correlation; equal values share the mean of their ranks."""
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (np.cumsum(counts) - (counts + 1) / 2)[inverse]
    return ranks


def _percent(share: float) -> str:
    return f"{share:.1%}".replace(".0%", "%").replace("%", " %")


def _figure(pairs: Pairs) -> Figure:
    every = np.array([pair for some in pairs.values() for pair in some]) * 1e3
    low, high = float(every.min()), float(every.max())
    pad = 0.08 * (high - low) or 0.1 * high
    ends = [max(low - pad, 0.0), high + pad]
    band = {
        "type": "scatter",
        "mode": "lines",
        "x": [*ends, *reversed(ends)],
        "y": [ends[0] * (1 - BAND), ends[1] * (1 - BAND), ends[1] * (1 + BAND), ends[0] * (1 + BAND)],
        "fill": "toself",
        "fillcolor": "rgba(128,140,155,0.14)",
        "line": {"width": 0},
        "hoverinfo": "skip",
    }
    line = {
        "type": "scatter",
        "mode": "lines",
        "x": ends,
        "y": ends,
        "line": {"width": 1.2, "color": FAINT},
        "hoverinfo": "skip",
    }
    traces: list[dict[str, Any]] = [band, line]
    colors = {name: SERIES_COLORS[k % len(SERIES_COLORS)] for k, name in enumerate(pairs)}
    for name, some in pairs.items():
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": plot_text(name),
                "x": [round(measured * 1e3, 4) for _, measured in some],
                "y": [round(simulated * 1e3, 4) for simulated, _ in some],
                "marker": {"size": 8, "color": colors[name], "opacity": 0.85},
                "hovertemplate": "%{fullData.name}<br>measured %{x:.2f} ms<br>simulated %{y:.2f} ms<extra></extra>",
            }
        )
    layout = base_layout(xaxis=axis("measured, ms", range=ends), yaxis=axis("simulated, ms", range=ends))
    legend = [
        *((readable(name), color) for name, color in colors.items()),
        (f"± {BAND:.0%}".replace("%", " %"), "#B8C0C9"),
    ]
    return Figure(
        "fidelity-figure",
        "Simulated over measured step times",
        traces,
        layout,
        _HEIGHT_PX,
        [Variant("", legend=legend)],
    )
