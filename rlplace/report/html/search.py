"""How the search went: the best step of each method so far, beside what it had to beat.

The simulator against the host: what was simulated and measured of each placement that the run ran.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.format import format_ms, format_seconds
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

_HEIGHT_PX = 360
_EVALUATIONS, _MEASURED, _SECONDS, _STEP_S = range(4)
_AXES = {
    "over time": (_SECONDS, "seconds of its own search"),
    "over placements measured": (_MEASURED, "placements measured"),
    "over placements scored": (_EVALUATIONS, "placements scored"),
}
_LOG_FROM = 100.0
_FAR = 1.6
"""What was to be beaten is out of view where it is this many times the slowest of the curves."""
_COLUMNS = 4

History = Sequence[Sequence[float]]


def learning_section(data: RunData) -> Section | None:
    """The curves, and a table of where each of them begins and ends; None where no history was kept."""
    histories = histories_of(data)
    searched = {name: rows for name, rows in histories.items() if len(rows) > 1 or rows[-1][_SECONDS] > 0}
    curves = {name: rows for name, rows in searched.items() if _is_search(data, name)} or searched
    if not curves:
        return None
    figure = _figure(data, curves)
    lead = (
        f"The best {data.kind} step so far of each search, and the steps that it had to beat, as the table has them. "
        f"{_caveat(data)}"
    )
    rows = [
        [
            name,
            format_ms(history[0][_STEP_S]),
            format_ms(history[-1][_STEP_S]),
            f"{len(history)}",
            f"{history[-1][_EVALUATIONS]:,.0f}",
            f"{history[-1][_MEASURED]:,.0f}",
            format_seconds(history[-1][_SECONDS]),
        ]
        for name, history in curves.items()
    ]
    heads = ["method", "first, ms", "best, ms", "improvements", "scored by then", "measured by then", "after"]
    return Section(
        "learning", "How the search went", lead, figure.place + table(heads, rows, numbers=range(1, 7)), (figure,)
    )


def histories_of(data: RunData) -> dict[str, History]:
    """Rows of four figures by method, in the order of the table; those of other lengths are left out."""
    found: dict[str, History] = {}
    for row in data.rows:
        search = data.searches.get(row.method)
        kept = [best.to_list() for best in search.history] if search and search.history else row.history
        rows = [one for one in kept if len(one) == _COLUMNS and one[_STEP_S] > 0]
        if rows:
            found[row.method] = rows
    return found


def _is_search(data: RunData, method: str) -> bool:
    """Whether a method is one that the run gave its budget to, not a heuristic of a few placements."""
    if data.searches:
        return method in data.searches
    row = data.row(method)
    return row is not None and ((row.measured or 0) > 0 or not data.is_measured)


def _figure(data: RunData, curves: Mapping[str, History]) -> Figure:
    axes = dict(_AXES)
    if not any(history[-1][_MEASURED] > 0 for history in curves.values()):
        del axes["over placements measured"]
    names = list(curves)
    colors = {name: SERIES_COLORS[k % len(SERIES_COLORS)] for k, name in enumerate(names)}
    ends = {column: max(_spent(data, name, curves[name], column) for name in names) for column, _ in axes.values()}
    lines = {column: [_line(data, name, curves[name], column) for name in names] for column, _ in axes.values()}
    references = _references(data, names)
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": plot_text(name),
            "x": lines[_SECONDS][k][0],
            "y": lines[_SECONDS][k][1],
            "line": {"shape": "hv", "width": 2, "color": colors[name]},
            "marker": {"size": 5},
            "hovertemplate": "%{fullData.name}: %{y:.2f} ms<extra></extra>",
        }
        for k, name in enumerate(names)
    ]
    ranked = sorted(references.items(), key=lambda item: item[1])
    traces += [_reference(name, step_s, is_right=k % 2 == 0) for k, (name, step_s) in enumerate(ranked)]
    every = [y for _, ys in lines[_SECONDS] for y in ys]
    every += [step_s * 1e3 for step_s in references.values() if step_s * 1e3 <= _FAR * max(every)]
    low, high = min(every), max(every)
    pad = 0.06 * (high - low) or 0.05 * high
    layout = base_layout(
        xaxis=axis(axes["over time"][1]),
        yaxis=axis(f"best {data.kind} step so far, ms", range=[max(low - pad, 0), high + 1.6 * pad]),
        margin={"l": 62, "r": 16, "t": 8, "b": 44},
    )
    legend = [(readable(name), colors[name]) for name in names]
    variants = [
        _variant(label, column, title, lines[column], len(references), ends[column], legend)
        for label, (column, title) in axes.items()
    ]
    return Figure("learning-figure", "Best step so far over time", traces, layout, _HEIGHT_PX, variants)


def _line(data: RunData, name: str, history: History, column: int) -> tuple[list[float], list[float]]:
    """x and y in ms of an improving line, drawn on to where the method's search ended."""
    x = [float(row[column]) for row in history]
    y = [round(row[_STEP_S] * 1e3, 5) for row in history]
    return [*x, max(_spent(data, name, history, column), x[-1])], [*y, y[-1]]


def _spent(data: RunData, name: str, history: History, column: int) -> float:
    """What a method had spent in all of a column."""
    search, row = data.searches.get(name), data.row(name)
    known = {
        _EVALUATIONS: float(row.placements) if row else 0.0,
        _MEASURED: float(row.measured or 0) if row else 0.0,
        _SECONDS: search.seconds if search else 0.0,
    }
    return max(known[column], float(history[-1][column]))


def _variant(
    label: str,
    column: int,
    title: str,
    lines: Sequence[tuple[list[float], list[float]]],
    num_references: int,
    end: float,
    legend: Sequence[tuple[str, str]],
) -> Variant:
    first = min((x[0] for x, _ in lines), default=0.0)
    is_log = column == _EVALUATIONS and first > 0 and end > _LOG_FROM * first
    begin = first if is_log else 0.0
    span = [math.log10(begin), math.log10(end)] if is_log else [0.0, end * 1.02 or 1.0]
    restyle = {"x": [*(x for x, _ in lines), *([[begin, end * 1.02]] * num_references)]}
    relayout = {"xaxis.type": "log" if is_log else "linear", "xaxis.range": span, "xaxis.title.text": title}
    return Variant(label, restyle, relayout, legend)


def _references(data: RunData, drawn: Sequence[str]) -> dict[str, float]:
    """One device, plain PyTorch and the best of the others in the table."""
    found = {"one device": data.step_s("single"), "eager PyTorch": data.step_s("eager")}
    others = [
        (row.step_s, row.method)
        for row in data.rows
        if row.placement and row.step_s and row.method not in ("single", *drawn)
    ]
    if others:
        step_s, name = min(others)
        found[f"best heuristic: {name}"] = step_s
    return {name: step_s for name, step_s in found.items() if step_s}


def _reference(name: str, step_s: float, *, is_right: bool) -> dict[str, Any]:
    """A line across, its name at either end: names of lines that are close to each other stay apart."""
    text = plot_text(f"{name}  " if is_right else f"  {name}")
    return {
        "type": "scatter",
        "mode": "lines+text",
        "name": plot_text(name),
        "x": [0, 1],
        "y": [round(step_s * 1e3, 5)] * 2,
        "text": ["", text] if is_right else [text, ""],
        "textposition": ["top right", "top left"],
        "textfont": {"size": 11, "color": FAINT},
        "line": {"dash": "dot", "width": 1.3, "color": FAINT},
        "hoverinfo": "skip",
    }


def _caveat(data: RunData) -> str:
    if not data.is_measured:
        return "All of it is simulated."
    return (
        "The curves are of the search's own races: the least of many noisy figures is too low, so a curve may end "
        "below what the table says, and the table is right."
    )


BAND = 0.1
_FEW = 3
_SCATTER_PX = 400
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
    figure = _scatter(pairs)
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
        name: [(pair[0], pair[1]) for pair in search.tried if min(pair) > 0] for name, search in data.searches.items()
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


def _scatter(pairs: Pairs) -> Figure:
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
        _SCATTER_PX,
        [Variant("", legend=legend)],
    )
