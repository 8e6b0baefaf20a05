"""How the search went: the best step of each method so far, and the simulator against measured steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rlplace.format import format_ms, format_seconds
from rlplace.report.html.figure import Figure, Section, Variant, details, drawn, page_color, readable, table
from rlplace.report.html.run_data import RunData
from rlplace.report.plots import COLUMNS, TOLERANCE, Curve, Plot, agreement, best_so_far

_CURVES_PX, _SCATTER_PX = 360, 400
_LABELS = {
    "seconds": "over time",
    "measured": "over placements measured",
    "evaluations": "over placements scored",
}
_EVALUATIONS, _MEASURED, _SECONDS, _STEP_S = range(4)
_FEW, _MOST_ROWS = 3, 60

History = Sequence[Sequence[float]]


def learning_section(data: RunData) -> Section | None:
    """The curves, and a table of where each of them begins and ends; None where no history was kept."""
    histories = histories_of(data)
    searched = {name: rows for name, rows in histories.items() if len(rows) > 1 or rows[-1][_SECONDS] > 0}
    curves = {name: rows for name, rows in searched.items() if _is_search(data, name)} or searched
    if not curves:
        return None
    figure = _curves(data, curves)
    caveat = "All of it is simulated."
    if data.is_measured:
        caveat = (
            "The curves are of the search's own races: the least of many noisy figures is too low, so a curve may end "
            "below what the table says, and the table is right."
        )
    lead = f"The best {data.kind} step so far of each search, and the steps that it had to beat. {caveat}"
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
    body = figure.place + table(heads, rows, numbers=range(1, 7))
    return Section("learning", "How the search went", lead, body, (figure,))


def histories_of(data: RunData) -> dict[str, History]:
    """Rows of four figures by method, in the order of the table; those of other lengths are left out."""
    kept: dict[str, History] = {row.method: row.history for row in data.rows}
    kept |= {name: [best.to_list() for best in one.history] for name, one in data.searches.items() if one.history}
    found = {
        name: [one for one in rows if len(one) == len(COLUMNS) and one[_STEP_S] > 0] for name, rows in kept.items()
    }
    return {name: rows for name, rows in found.items() if rows}


def _is_search(data: RunData, method: str) -> bool:
    """Whether the run gave the method its budget; heuristics score a few placements only."""
    if data.searches:
        return method in data.searches
    row = data.row(method)
    return row is not None and ((row.measured or 0) > 0 or not data.is_measured)


def _curves(data: RunData, histories: Mapping[str, History]) -> Figure:
    curves = [Curve(name, history, _spent(data, name)) for name, history in histories.items()]
    levels = {name: step_s * 1e3 for name, step_s in _references(data, list(histories)).items()}
    axes = [
        axis for axis in _LABELS if axis != "measured" or any(rows[-1][_MEASURED] > 0 for rows in histories.values())
    ]
    plots = {
        axis: best_so_far(curves, axis, kind=data.kind, is_ratio=False, is_joined=False, levels=levels) for axis in axes
    }
    made = {axis: drawn(plot, ": %{y:.2f} ms") for axis, plot in plots.items()}
    variants = [
        Variant(
            _LABELS[axis],
            {name: [trace[name] for trace in traces] for name in ("x", "y")},
            {f"xaxis.{name}": layout["xaxis"][name] for name in ("type", "range")}
            | {"xaxis.title.text": layout["xaxis"]["title"]["text"]},
            _legend(plots[axis]),
        )
        for axis, (traces, layout) in made.items()
    ]
    return Figure("learning-figure", "Best step so far over time", *made["seconds"], _CURVES_PX, variants)


def _legend(plot: Plot) -> list[tuple[str, str]]:
    return [(readable(one.name), page_color(one.color)) for one in plot.series]


def _spent(data: RunData, name: str) -> tuple[float, float, float]:
    """What a method had spent in all: placements scored, measured, and seconds."""
    search, row = data.searches.get(name), data.row(name)
    return row.placements if row else 0, (row.measured or 0) if row else 0, search.seconds if search else 0.0


def _references(data: RunData, shown: Sequence[str]) -> dict[str, float]:
    """Seconds on one device, of plain PyTorch and of the best of the others in the table."""
    found = {"one device": data.step_s("single"), "eager PyTorch": data.step_s("eager")}
    others = [
        (row.step_s, row.method)
        for row in data.rows
        if row.placement and row.step_s and row.method not in ("single", *shown)
    ]
    if others:
        step_s, name = min(others)
        found[f"best heuristic: {name}"] = step_s
    return {name: step_s for name, step_s in found.items() if step_s}


def fidelity_section(data: RunData) -> Section | None:
    """The scatter, its error in words, and a table; None where nothing was both simulated and measured."""
    found = {
        name: [(pair[0], pair[1]) for pair in search.tried if len(pair) == 2 and min(pair) > 0]
        for name, search in data.searches.items()
    }
    pairs = {name: some for name, some in found.items() if some}
    every = [pair for some in pairs.values() for pair in some]
    if not every or not data.is_measured:
        return None
    lead = (
        f"The {len(every):,} placements that the searches ran, as simulated and as measured (drift of the machine is "
        f"taken out by a reference placement in every race). {words(every)}"
    )
    plot = agreement(pairs)
    legend = [*_legend(plot), (f"± {TOLERANCE:.0%}".replace("%", " %"), "#B8C0C9")]
    traces, layout = drawn(plot, "<br>measured %{x:.2f} ms<br>simulated %{y:.2f} ms")
    title = "Simulated over measured step times"
    figure = Figure("fidelity-figure", title, traces, layout, _SCATTER_PX, [Variant("", legend=legend)])
    rows = [
        [name, format_ms(measured), format_ms(simulated), f"{simulated / measured - 1:+.1%}"]
        for name, some in pairs.items()
        for simulated, measured in some
    ]
    note = f"The first {_MOST_ROWS} as a table" if len(rows) > _MOST_ROWS else "The same as a table"
    columns = ["method", "measured, ms", "simulated, ms", "off by"]
    body = figure.place + details(note, table(columns, rows[:_MOST_ROWS], numbers=(1, 2, 3)))
    return Section("fidelity", "Simulator against measured", lead, body, (figure,))


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
    spearman = float(np.corrcoef(_ranks(simulated), _ranks(measured))[0, 1])
    return f"{text} It orders them with a rank correlation of {spearman:.2f} (1 is perfect)."


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (np.cumsum(counts) - (counts + 1) / 2)[inverse]
    return ranks


def _percent(share: float) -> str:
    return f"{share:.1%}".replace(".0%", "%").replace("%", " %")
