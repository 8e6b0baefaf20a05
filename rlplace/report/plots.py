"""Plots as plain records, drawn by matplotlib into files (`drawing`) and by plotly on the page (`html.figure`).

The content of plots: its series, its axes, its lines. How it looks is the renderers' own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlplace.errors import refuse_if

PHASE_COLORS = {"forward": "#0072B2", "backward": "#E69F00", "update": "#009E73", "transfer": "#CC79A7"}
"""Of Okabe and Ito's palette (2008), told apart with every common kind of colour blindness."""
SERIES_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
"""That palette without its yellow, in order of first use; then again with another dash or marker."""
COLUMNS = ("evaluations", "measured", "seconds", "step_time_s")
"""Of a history, as `--json` and `result.json` hold it; the first three are the budgets of a search."""
AXIS_WORDS = {"evaluations": "placements scored", "measured": "placements measured", "seconds": "search time, seconds"}
FEW_SEEDS = 4
"""With fewer seeds than that the band is from the least to the greatest."""
TOLERANCE = 0.1
"""Half the width of the band around equal step times, as a share."""
_LOG_X_FROM_RATIO, _LOG_Y_FROM_RATIO = 100.0, 5.0
_PAD, _FAR = 0.07, 1.6
"""Room beside the values, as a share of their range; a level beyond so many times the largest value is out of view."""

Floats = NDArray[np.float64]


def blended(shares: Mapping[str, float], colors: Mapping[str, str]) -> str:
    """Colours by name, mixed by their shares.

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


def luminance(color: str) -> float:
    """Relative luminance of `#RRGGBB`, 0 to 1 (WCAG 2.1)."""
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@dataclass(frozen=True)
class Axis:
    """One axis, and its visible range."""

    title: str
    low: float
    high: float
    is_log: bool = False


@dataclass(frozen=True, eq=False)
class Series:
    """One series of P points: steps that hold until the next point, or points alone.

    Attributes:
        name: as the user called it.
        x: (P,) ascending where they are steps.
        y: (P,).
        color: `#RRGGBB`.
        low: (P,) lower end of a band around the steps; None without one.
        high: (P,) its upper end.
        tried: (K, 2) for each run, the k-th row at x = k: the least simulated value until there, and the measured one.
    """

    name: str
    x: Floats
    y: Floats
    color: str
    low: Floats | None = None
    high: Floats | None = None
    tried: tuple[Floats, ...] = ()


@dataclass(frozen=True, eq=False)
class Plot:
    """Series on two axes.

    Attributes:
        mark: how the series are drawn.
        x: the horizontal axis.
        y: the vertical axis.
        series: in order.
        levels: lines across, by name.
        tolerance: half the width of a band around the diagonal, as a share of it; 0 for neither band nor diagonal.
    """

    mark: Literal["steps", "points"]
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    levels: Mapping[str, float] = field(default_factory=dict)
    tolerance: float = 0.0


@dataclass(frozen=True, eq=False)
class Curve:
    """One run of one method.

    Attributes:
        method: its name; runs of the same name are seeds of one method.
        history: (K, 4) `COLUMNS`, a row wherever the best improved; the first three columns never fall.
        spent: evaluations, placements measured and seconds in all.
        single_s: step time on the best single device; not finite where there is none.
        tried: (K, 2) simulated and measured seconds of every placement that ran, in order.
    """

    method: str
    history: ArrayLike
    spent: tuple[float, float, float]
    single_s: float = math.nan
    tried: ArrayLike = ()

    def steps(self, axis: str, *, is_ratio: bool) -> tuple[Floats, Floats]:
        """(K,) the spent budget of `axis`, and (K,) step times over `single_s`, or in ms.

        Raises:
            InvalidValue: a history without four columns.
        """
        rows = np.asarray(self.history, dtype=np.float64)
        if not rows.size:
            return np.empty(0), np.empty(0)
        refuse_if(
            rows.ndim != 2 or rows.shape[1] != len(COLUMNS),
            "history",
            rows.shape,
            f"(K, {len(COLUMNS)}): {', '.join(COLUMNS)}",
            where=f"curve of {self.method!r}",
        )
        return rows[:, COLUMNS.index(axis)], rows[:, -1] / self.single_s if is_ratio else rows[:, -1] * 1e3


def band_of(runs: Sequence[tuple[Floats, Floats]], end: float) -> tuple[Floats, Floats, Floats, Floats]:
    """The runs of one method, put together on a grid of all their x and `end`; a value holds until the next.

    Args:
        runs: (K,) spent budget, ascending, and (K,) best value of each.
        end: of the grid.

    Returns:
        The grid, and three values at each of its points, (P,) each: the lower quartile, the median and the upper
        quartile, or the least, the median and the greatest of fewer than `FEW_SEEDS` runs. A run that had found nothing
        counts as infinite.

    Example:
        >>> runs = [(np.array([1.0, 3.0]), np.array([8.0, 4.0])), (np.array([2.0]), np.array([6.0]))]
        >>> x, _, middle, _ = band_of(runs, end=4.0)
        >>> x.tolist(), middle.tolist()
        ([1.0, 2.0, 3.0, 4.0], [inf, 7.0, 5.0, 5.0])
    """
    grid = np.unique(np.concatenate([np.array([end]), *(x for x, _ in runs)]))
    held = [np.concatenate(([math.inf], y))[np.searchsorted(x, grid, side="right")] for x, y in runs]
    shares = (0.0, 0.5, 1.0) if len(runs) < FEW_SEEDS else (0.25, 0.5, 0.75)
    low, middle, high = (_quantile(np.sort(held, axis=0), share) for share in shares)
    return grid, low, middle, high


def _quantile(values: Floats, share: float) -> Floats:
    """(P,) of sorted values (S, P), between two of them linearly; `numpy.quantile` has no answer beside infinities."""
    below, part = divmod(share * (len(values) - 1), 1)
    lower: Floats = values[int(below)]
    return lower * (1 - part) + values[int(below) + 1] * part if part else lower


def best_so_far(
    curves: Sequence[Curve],
    axis: str,
    *,
    kind: str,
    is_ratio: bool,
    is_joined: bool = True,
    levels: Mapping[str, float] | None = None,
) -> Plot:
    """The best step time so far of every method that found one, over the budget that it had spent.

    Over placements measured, every one of them is a point, and the least simulated step time of them a second line.

    Args:
        curves: of any number of methods and seeds.
        axis: one of the first three `COLUMNS`; logarithmic where the curves span more than two decades of it.
        kind: of the step times: `simulated` or `measured`.
        is_ratio: step times over the best single device's; in ms otherwise.
        is_joined: whether all end where the last of them does; else each ends with its own runs.
        levels: step times to compare with, by name.
    """
    runs, ends = defaultdict[str, list[tuple[Floats, Floats]]](list), defaultdict[str, float](float)
    tried = defaultdict[str, list[Floats]](list)
    for curve in curves:
        pairs = np.array(curve.tried, dtype=np.float64).reshape(-1, 2) / (curve.single_s if is_ratio else 1e-3)
        if len(pairs):
            pairs[:, 0] = np.minimum.accumulate(pairs[:, 0])
            tried[curve.method].append(pairs)
        x, y = curve.steps(axis, is_ratio=is_ratio)
        runs[curve.method].append((x, y))
        ends[curve.method] = max(ends[curve.method], curve.spent[COLUMNS.index(axis)], *x[-1:])
    series = []
    for (name, some), color in zip(runs.items(), cycle(SERIES_COLORS)):
        x, low, y, high = band_of(some, max(ends.values()) if is_joined else ends[name])
        if (found := np.isfinite(y)).any():
            highest = np.where(np.isfinite(high), high, y[found].max())
            low_y, high_y = (low[found], highest[found]) if len(some) > 1 else (None, None)
            shown = tuple(tried[name]) if axis == "measured" else ()
            series.append(Series(name, x[found], y[found], color, low_y, high_y, shown))
    every_x = np.concatenate([np.empty(0), *(one.x for one in series), *(np.ones(len(one.tried)) for one in series)])
    # also of points that only another axis shows: panels side by side have one scale
    ran = [pairs.ravel() for one in series for pairs in tried[one.name]]
    every_y = np.concatenate([np.empty(0), *(one.y for one in series), *ran])
    unit = "over the best single device" if is_ratio else "ms"
    near = [level for level in (levels or {}).values() if level <= _FAR * every_y.max(initial=0.0)]
    vertical = _around(f"best {kind} step so far, {unit}", np.append(every_y, near))
    positive, last = every_x[every_x > 0], float(every_x.max(initial=0.0)) * 1.02 or 1.0
    is_log = bool(positive.size) and bool(positive.max() > _LOG_X_FROM_RATIO * positive.min())
    horizontal = Axis(AXIS_WORDS[axis], float(positive.min()) if is_log else 0.0, last, is_log)
    return Plot("steps", horizontal, vertical, tuple(series), levels or {})


def agreement(pairs: Mapping[str, ArrayLike]) -> Plot:
    """Simulated over measured step times, in ms, around the line on which they are equal.

    Args:
        pairs: by kind of placement, (P, 2) simulated and measured seconds.
    """
    found = {kind: np.asarray(some, dtype=np.float64).reshape(-1, 2) * 1e3 for kind, some in pairs.items()}
    every = np.concatenate([*(some.ravel() for some in found.values())] or [np.empty(0)])
    measured, simulated = (_around(f"{what} step, ms", every) for what in ("measured", "simulated"))
    series = tuple(
        Series(kind, some[:, 1], some[:, 0], color) for (kind, some), color in zip(found.items(), cycle(SERIES_COLORS))
    )
    return Plot("points", measured, simulated, series, tolerance=TOLERANCE)


def _around(title: str, values: Floats) -> Axis:
    """An axis with room beside the values, logarithmic where they differ by more than five times."""
    low, high = (float(values.min()), float(values.max())) if values.size else (0.5, 1.0)
    if low > 0 and high > _LOG_Y_FROM_RATIO * low:
        margin = (high / low) ** _PAD
        return Axis(title, low / margin, high * margin, is_log=True)
    pad = _PAD * (high - low) or 0.1 * high or 1.0  # steps may take no time
    return Axis(title, max(low - pad, 0.0), high + pad)
