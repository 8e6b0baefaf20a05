"""Plots as plain records: their series, axes and lines, and the texts of their points. `drawing` draws them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle, repeat
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlplace.errors import refuse_if
from rlplace.say import clean, format_bytes, format_ms

PHASE_COLORS = {"forward": "#0072B2", "backward": "#E69F00", "update": "#009E73", "transfer": "#CC79A7"}
"""Of Okabe and Ito's palette (2008), told apart with every common kind of colour blindness."""
SERIES_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")
"""That palette without its yellow, in order of first use; then again with another dash or marker."""
DEVICE_COLORS = ("#44AA99", "#CC6677", "#88CCEE", "#DDCC77", "#AA4499", "#999933", "#117733", "#882255", "#6699CC")
"""Paul Tol's `muted` scheme (2021), told apart with every common kind of colour blindness; none is of a phase."""
OTHER_COLOR = "#9AA5B1"
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
_NEAR = 4.0
"""A capacity of up to so many times the peak is in view."""
_UNITS = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "bytes"))
MOST_CHARACTERS = 160
"""Of a name; longer ones are cut in the middle."""

Floats = NDArray[np.float64]


def readable(text: object, most: int = MOST_CHARACTERS) -> str:
    """`clean` text, cut in the middle where it has more than `most` characters.

    Example:
        >>> readable("from one end to the other", most=13)
        'from ...other'
    """
    shown, half = clean(text), (most - 3) // 2
    return shown if len(shown) <= most else f"{shown[:half]}...{shown[-half:]}"


def device_colors(names: Iterable[str]) -> dict[str, str]:
    """Devices, each once, with their colours."""
    return dict(zip(dict.fromkeys(names), chain(DEVICE_COLORS, repeat(OTHER_COLOR))))


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
        told: P texts for readers who point at a point; empty where there are none.
    """

    name: str
    x: Floats
    y: Floats
    color: str
    low: Floats | None = None
    high: Floats | None = None
    tried: tuple[Floats, ...] = ()
    told: Sequence[str] = ()


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
    history: Sequence[Sequence[float]]
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
    levels: Mapping[str, float] | None = None,
) -> Plot:
    """The best step time so far of every method that found one, over the budget that it had spent.

    Over placements measured, every one of them is a point, and the least simulated step time of them a second line.

    Args:
        curves: of any number of methods and seeds.
        axis: one of the first three `COLUMNS`; logarithmic where the curves span more than two decades of it.
        kind: of the step times: `simulated` or `measured`.
        is_ratio: step times over the best single device's; in ms otherwise.
        levels: step times to compare with, by name.
    """
    runs, end, unit = defaultdict[str, list[tuple[Floats, Floats]]](list), 0.0, "of one device" if is_ratio else "ms"
    tried = defaultdict[str, list[Floats]](list)
    for curve in curves:
        pairs = np.array(curve.tried, dtype=np.float64).reshape(-1, 2) / (curve.single_s if is_ratio else 1e-3)
        if len(pairs):
            pairs[:, 0] = np.minimum.accumulate(pairs[:, 0])
            tried[curve.method].append(pairs)
        x, y = curve.steps(axis, is_ratio=is_ratio)
        runs[curve.method].append((x, y))
        end = max(end, curve.spent[COLUMNS.index(axis)], *x[-1:])
    series = []
    for (name, some), color in zip(runs.items(), cycle(SERIES_COLORS)):
        x, low, y, high = band_of(some, end)
        if (found := np.isfinite(y)).any():
            highest = np.where(np.isfinite(high), high, y[found].max())
            low_y, high_y = (low[found], highest[found]) if len(some) > 1 else (None, None)
            shown = tuple(tried[name]) if axis == "measured" else ()
            points = zip(x[found].tolist(), y[found].tolist())
            told = [
                f"{readable(name)}: {value:.4g} {unit}\n{AXIS_WORDS[axis]}: {spent:,.4g}" for spent, value in points
            ]
            series.append(Series(name, x[found], y[found], color, low_y, high_y, shown, told))
    every_x = np.concatenate([np.empty(0), *(one.x for one in series), *(np.ones(len(one.tried)) for one in series)])
    # also of points that only another axis shows: panels side by side have one scale
    ran = [pairs.ravel() for one in series for pairs in tried[one.name]]
    every_y = np.concatenate([np.empty(0), *(one.y for one in series), *ran])
    near = [level for level in (levels or {}).values() if level <= _FAR * every_y.max(initial=0.0)]
    vertical = _around(
        f"best {kind} step so far, {'over the best single device' if is_ratio else unit}", np.append(every_y, near)
    )
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
        Series(kind, some[:, 1], some[:, 0], color, told=[_agreement_words(kind, *pair) for pair in some.tolist()])
        for (kind, some), color in zip(found.items(), cycle(SERIES_COLORS))
    )
    return Plot("points", measured, simulated, series, tolerance=TOLERANCE)


def _agreement_words(kind: str, simulated_ms: float, measured_ms: float) -> str:
    return f"{readable(kind)}\nmeasured {measured_ms:.2f} ms\nsimulated {simulated_ms:.2f} ms"


def memory_over_time(
    memory: Mapping[str, Sequence[tuple[float, int]]], step_s: float, capacities: Iterable[int]
) -> Plot:
    """Bytes that each device holds over a step, with the capacities that the peak comes near to.

    Args:
        memory: by device, at least one point: seconds and the bytes from then on; ascending.
        step_s: of the whole step.
        capacities: of the devices, in bytes.
    """
    peak = max(level for points in memory.values() for _, level in points)
    scale, unit = next(((scale, unit) for scale, unit in _UNITS if peak >= scale), _UNITS[-1])
    series = []
    for name, color in device_colors(memory).items():
        time_s, level = np.array([*memory[name], (step_s, memory[name][-1][1])], dtype=np.float64).T
        told = [f"{readable(name)}: {format_bytes(size)} at {format_ms(at_s)} ms" for at_s, size in memory[name]]
        label = f"{readable(name)}, peak {format_bytes(max(size for _, size in memory[name]))}"
        series.append(Series(label, time_s * 1e3, level / scale, color, told=told))
    near = sorted({room for room in capacities if 0 < room <= _NEAR * peak})
    vertical = Axis(f"memory, {unit}", 0.0, 1.08 * max([peak, *near]) / scale or 1.0)
    levels = {f"capacity {format_bytes(room)}": room / scale for room in near}
    return Plot(
        "steps", Axis("time since the step began, ms", 0.0, step_s * 1e3 or 1.0), vertical, tuple(series), levels
    )


def _around(title: str, values: Floats) -> Axis:
    """An axis with room beside the values, logarithmic where they differ by more than five times."""
    low, high = (float(values.min()), float(values.max())) if values.size else (0.5, 1.0)
    if low > 0 and high > _LOG_Y_FROM_RATIO * low:
        margin = (high / low) ** _PAD
        return Axis(title, low / margin, high * margin, is_log=True)
    pad = _PAD * (high - low) or 0.1 * high or 1.0  # steps may take no time
    return Axis(title, max(low - pad, 0.0), high + pad)
