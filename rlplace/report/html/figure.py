"""`Figure`: figures for plotly, as plain data, and HTML from data; every text is escaped here.

So no name of a run can become markup, neither of HTML nor of plotly's own small markup language.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlplace.files import jsonable
from rlplace.report.plots import Axis, Plot
from rlplace.say import clean

INK, FAINT, GRID, CARD, ACCENT = "@ink", "@faint", "@grid", "@card", "@accent"
"""Colours of the page, which the page's script replaces by those of its light or dark style."""

DEVICE_COLORS = ("#44AA99", "#CC6677", "#88CCEE", "#DDCC77", "#AA4499", "#999933", "#117733", "#882255", "#6699CC")
"""Paul Tol's `muted` scheme (2021), told apart with every common kind of colour blindness; none is of a phase."""
MODULE_COLORS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#8C6D46", "#9A8FC1")
"""After his `bright` scheme."""
OTHER_COLOR = "#9AA5B1"


@dataclass(frozen=True)
class Variant:
    """Another way to look at a figure, behind a button.

    Attributes:
        label: on the button.
        restyle: attribute of traces to a list of values, one a trace.
        relayout: attribute of the layout to its value.
        legend: names and colours beside the button.
    """

    label: str
    restyle: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    relayout: Mapping[str, Any] = field(default_factory=dict)
    legend: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Figure:
    """One figure of the page.

    Attributes:
        id: of its place; unique on the page.
        title: its description for screen readers.
        data: plotly's traces.
        layout: plotly's layout; colours and fonts that all figures share are added by the page.
        height: in pixels.
        variants: the first one is how the figure is shown at first; none where there is one way only.
    """

    id: str
    title: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    height: int
    variants: Sequence[Variant] = ()

    @property
    def place(self) -> str:
        """The markup of its place, which the page's script fills."""
        return (
            f'<figure class="figure" id="{self.id}"><div class="controls"></div><div class="wide">'
            f'<div class="plot" role="img" aria-label="{html.escape(self.title)}" '
            f'style="height:{self.height}px"></div>'
            f"</div></figure>"
        )


def figures_json(figures: Sequence[Figure]) -> str:
    """The figures as JSON inside of a `<script>` element: it cannot end there, nor begin a comment.

    Example:
        >>> figure = Figure("a", "a figure", [{"name": "</script>"}], {}, 100)
        >>> "</script>" in figures_json([figure])
        False
    """
    plain = [
        {"id": one.id, "data": one.data, "layout": one.layout, "variants": [vars(each) for each in one.variants]}
        for one in figures
    ]
    text = json.dumps(jsonable(plain), allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def base_layout(**more: Any) -> dict[str, Any]:
    """The common layout of figures with axes, and `more` over it."""
    return {
        "margin": {"l": 56, "r": 16, "t": 8, "b": 44},
        "hovermode": "closest",
        "showlegend": False,
        "dragmode": "zoom",
        **more,
    }


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis that is as quiet as the page."""
    return {
        "title": {"text": title, "font": {"size": 12, "color": FAINT}},
        "gridcolor": GRID,
        "zeroline": False,
        "ticks": "",
        "tickfont": {"size": 11, "color": FAINT},
        "automargin": True,
        **more,
    }


def discrete_scale(colors: Sequence[str]) -> dict[str, Any]:
    """Marker settings under which the number k is drawn in the k-th colour."""
    count = len(colors)
    stops = [[edge / count, color] for k, color in enumerate(colors) for edge in (k, k + 1)]
    return {"colorscale": stops, "cmin": -0.5, "cmax": count - 0.5, "showscale": False}


def drawn(plot: Plot, hover: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A plot as plotly's traces (its series, then its levels) and layout.

    Args:
        plot: of the figure.
        hover: the hover text of a point, after the name of its series.
    """
    hover = f"%{{fullData.name}}{hover}<extra></extra>"
    quiet: dict[str, Any] = {"type": "scatter", "mode": "lines", "hoverinfo": "skip"}
    traces: list[dict[str, Any]] = []
    if plot.tolerance:
        ends, shares = [plot.x.low, plot.x.high], (1 - plot.tolerance, 1 + plot.tolerance)
        sides = [end * share for end, share in zip([*ends, *reversed(ends)], [shares[0]] * 2 + [shares[1]] * 2)]
        fill = {"fill": "toself", "fillcolor": "rgba(128,140,155,0.14)", "line": {"width": 0}}
        traces += [
            quiet | fill | {"x": [*ends, *reversed(ends)], "y": sides},
            quiet | {"x": ends, "y": ends, "line": {"width": 1.2, "color": FAINT}},
        ]
    for one in plot.series:
        color, at = page_color(one.color), {"x": one.x.round(5).tolist(), "y": one.y.round(5).tolist()}
        steps = {"mode": "lines+markers", "line": {"shape": "hv", "width": 2, "color": color}, "marker": {"size": 5}}
        points = {"mode": "markers", "marker": {"size": 8, "color": color, "opacity": 0.85}}
        look = steps if plot.mark == "steps" else points
        traces.append({"type": "scatter", "name": plot_text(one.name), "hovertemplate": hover, **at, **look})
    for place, (name, level) in enumerate(sorted(plot.levels.items(), key=lambda item: item[1])):
        # names at either end in turn: those of lines that are close to each other stay apart
        text = ["", plot_text(f"{name}  ")] if place % 2 == 0 else [plot_text(f"  {name}"), ""]
        looks = {"textfont": {"size": 11, "color": FAINT}, "line": {"dash": "dot", "width": 1.3, "color": FAINT}}
        where = {"x": [plot.x.low, plot.x.high], "y": [round(level, 5)] * 2, "textposition": ["top right", "top left"]}
        traces.append(quiet | looks | where | {"mode": "lines+text", "name": plot_text(name), "text": text})
    return traces, base_layout(
        xaxis=_plotly_axis(plot.x), yaxis=_plotly_axis(plot.y), margin={"l": 62, "r": 16, "t": 8, "b": 44}
    )


def _plotly_axis(shown: Axis) -> dict[str, Any]:
    ends = [math.log10(end) if shown.is_log else end for end in (shown.low, shown.high)]
    return axis(shown.title, range=ends, type="log" if shown.is_log else "linear")


def page_color(color: str) -> str:
    """A colour of a series on the page, where black is the page's ink."""
    return INK if color == "#000000" else color


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        id: of its heading, to which the page's list of contents leads.
        title: its heading.
        lead: a sentence below it, as text.
        body: markup, its texts escaped.
        figures: that `body` has places for.
    """

    id: str
    title: str
    lead: str
    body: str
    figures: Sequence[Figure] = field(default_factory=tuple)


@dataclass(frozen=True)
class Raw:
    """Markup that is put into a table as it is: its texts are escaped."""

    markup: str


def paragraph(text: str, style: str = "") -> str:
    """A paragraph of plain text.

    Args:
        text: as it is to be read.
        style: class of the paragraph.
    """
    return f"<p{_class(style)}>{prose(text)}</p>"


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    numbers: Sequence[int] = (),
    styles: Mapping[int, str] | None = None,
    minor: Sequence[int] = (),
) -> str:
    """A table in a box of its own that scrolls where it is too wide; columns in which nothing stands are left out.

    Args:
        headings: one a column.
        rows: cells, as text or `Raw` markup.
        numbers: columns that are aligned to the right.
        styles: row to its class.
        minor: columns that narrow screens leave out.
    """
    rows = [[_markup(cell) for cell in row] for row in rows]
    kept = [column for column in range(len(headings)) if any(row[column] for row in rows)]
    marks = [
        " ".join(name for name, columns in (("number", numbers), ("minor", minor)) if column in columns)
        for column in kept
    ]
    head = "".join(f"<th{_class(mark)}>{escaped(headings[column])}</th>" for column, mark in zip(kept, marks))
    body = "".join(
        f"<tr{_class((styles or {}).get(index, ''))}>"
        + "".join(f"<td{_class(mark)}>{row[column]}</td>" for column, mark in zip(kept, marks))
        + "</tr>"
        for index, row in enumerate(rows)
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def facts(pairs: Sequence[tuple[str, object]]) -> str:
    """A list of names and values."""
    items = "".join(f"<div><dt>{escaped(name)}</dt><dd>{_markup(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="facts">{items}</dl>'


def details(summary: str, markup: str) -> str:
    """Markup that is folded away behind a line."""
    return f"<details><summary>{escaped(summary)}</summary>{markup}</details>"


def bullets(lines: Sequence[str]) -> str:
    """A list of lines of text."""
    return "<ul>" + "".join(f"<li>{prose(line)}</li>" for line in lines) + "</ul>"


_PART_OF_PATH = re.compile(r"([./])(?=[^\W\d])")


def _markup(value: object) -> str:
    """A value as HTML; a dotted or a file's path may go on in the next line after each of its parts, no word may."""
    return value.markup if isinstance(value, Raw) else _PART_OF_PATH.sub(r"\1<wbr>", escaped(value))


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


MOST_CHARACTERS = 160
"""Of a name; longer ones are cut in the middle."""


def readable(text: object, most: int = MOST_CHARACTERS) -> str:
    """`clean` text, cut in the middle where it has more than `most` characters.

    Example:
        >>> readable("from one end to the other", most=13)
        'from ...other'
    """
    shown, half = clean(text), (most - 3) // 2
    return shown if len(shown) <= most else f"{shown[:half]}...{shown[-half:]}"


def escaped(text: object) -> str:
    """A name as HTML, also inside of an attribute's quotes.

    Example:
        >>> escaped('<b>"x"</b>')
        '&lt;b&gt;&quot;x&quot;&lt;/b&gt;'
    """
    return html.escape(readable(text), quote=True)


def prose(text: object) -> str:
    """Sentences as HTML, cut nowhere."""
    return html.escape(clean(text))


def plot_text(text: object, most: int = MOST_CHARACTERS) -> str:
    """A name as plotly shows it, which reads a few tags and entities, links among them.

    Example:
        >>> plot_text('<a href="x">y</a>')
        '&lt;a href="x"&gt;y&lt;/a&gt;'
    """
    return html.escape(readable(text, most), quote=False)
