"""`Figure`: what plotly is to draw, as plain data that a page can hold, whatever names are in it."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlplace.files import jsonable

INK, FAINT, GRID, CARD, ACCENT = "@ink", "@faint", "@grid", "@card", "@accent"
"""Colours of the page, which the page's script replaces by those of its light or dark style."""

PHASE_COLORS = {"forward": "#0072B2", "backward": "#E69F00", "update": "#009E73", "transfer": "#CC79A7"}
"""Of Okabe and Ito's palette (2008), as in the pictures of timelines."""
SERIES_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "@ink")
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
        title: what a screen reader says of it.
        data: plotly's traces.
        layout: plotly's layout; colours and fonts that all figures share are added by the page.
        height: in pixels.
        variants: the first one is how the figure is shown at first; none where there is one way only.
        least_width: in pixels; on a narrower page it is scrolled sideways. 0 shrinks with the page.
    """

    id: str
    title: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any]
    height: int
    variants: Sequence[Variant] = ()
    least_width: int = 0

    @property
    def place(self) -> str:
        """The markup of its place, which the page's script fills."""
        name = html.escape(self.title, quote=True)
        width = f";min-width:{self.least_width}px" if self.least_width else ""
        return (
            f'<figure class="figure" id="{self.id}"><div class="controls"></div><div class="wide">'
            f'<div class="plot" role="img" aria-label="{name}" style="height:{self.height}px{width}"></div>'
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
        {
            "id": figure.id,
            "data": figure.data,
            "layout": figure.layout,
            "variants": [
                {
                    "label": variant.label,
                    "restyle": variant.restyle,
                    "relayout": variant.relayout,
                    "legend": variant.legend,
                }
                for variant in figure.variants
            ],
        }
        for figure in figures
    ]
    text = json.dumps(jsonable(plain), allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def base_layout(**more: Any) -> dict[str, Any]:
    """What the layouts of figures with axes share, and `more` over it."""
    layout: dict[str, Any] = {
        "margin": {"l": 56, "r": 16, "t": 8, "b": 44},
        "hovermode": "closest",
        "showlegend": False,
        "dragmode": "zoom",
    }
    return layout | more


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis that is as quiet as the page."""
    quiet: dict[str, Any] = {
        "title": {"text": title, "font": {"size": 12, "color": FAINT}},
        "gridcolor": GRID,
        "zeroline": False,
        "ticks": "",
        "tickfont": {"size": 11, "color": FAINT},
        "automargin": True,
    }
    return quiet | more


def discrete_scale(colors: Sequence[str]) -> dict[str, Any]:
    """Marker settings under which the number k is drawn in the k-th colour."""
    count = len(colors)
    stops = [[edge / count, color] for k, color in enumerate(colors) for edge in (k, k + 1)]
    return {"colorscale": stops, "cmin": -0.5, "cmax": count - 0.5, "showscale": False}
