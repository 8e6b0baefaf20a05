"""`describe`: what measured steps taught about a host, in words."""

from __future__ import annotations

import math

import numpy as np

from rlplace.measure.host_model.posterior import Posterior
from rlplace.measure.host_model.scales import Scale, Scales

SURE = 1.96
"""Standard deviations of the posterior by which a factor differs from what was given, to be worth a line."""
MOST = 8
"""Lines, those that are surest first."""


def describe(posterior: Posterior, *, most: int = MOST) -> list[str]:
    """Lines such as `cpu:1 is 4 % slower than given (3 to 5 %)`: what differs from what was given, the surest first.

    Args:
        posterior: what was learned.
        most: how many lines at most.
    """
    deviation = posterior.deviation
    sureness = np.abs(posterior.mean) / np.maximum(deviation, 1e-12)
    ranked = [place for place in np.argsort(-sureness, kind="stable").tolist() if sureness[place] >= SURE]
    scales = posterior.scales
    return [_line(scales, place, float(posterior.mean[place]), float(deviation[place])) for place in ranked[:most]]


def _line(scales: Scales, place: int, mean: float, deviation: float) -> str:
    item = scales.items[place]
    low, middle, high = (math.exp(mean + SURE * side * deviation) for side in (-1.0, 0.0, 1.0))
    if item.kind == "device":
        word = "slower" if mean > 0 else "faster"
        ends = sorted(abs(factor - 1.0) * 100 for factor in (low, high))
        return f"{item.name} is {abs(middle - 1.0) * 100:.0f} % {word} than given ({ends[0]:.0f} to {ends[1]:.0f} %)"
    between = f"({_number(low)} to {_number(high)})"
    if item.kind == "op type":
        return f"{item.name} takes {_number(middle)} times as long as given {between}"
    if item.kind in ("bandwidth", "latency"):
        times = "times" if middle > 1.0 else "of"
        return f"{item.name} has {_number(middle)} {times} the {item.kind} given {between}"
    return _other(scales, item, low, middle, high)


def _other(scales: Scales, item: Scale, low: float, middle: float, high: float) -> str:
    """What is no factor on a figure of the problem's, in its unit."""
    host, prior = scales.problem.host, scales.prior
    if item.kind == "co-run":
        given = max((max(row) for row in host.corun_slowdown), default=0.0) or prior.corun
        ends = f"({low * given * 100:.0f} to {high * given * 100:.0f} %)"
        return f"a busy device slows another that shares its memory by {middle * given * 100:.0f} % {ends}"
    given = prior.overhead_s if item.kind == "overhead" else host.dispatch_s or prior.dispatch_s
    what = "an op takes {} longer than given" if item.kind == "overhead" else "a launch takes {}"
    return f"{what.format(f'{middle * given * 1e6:.1f} us')} ({low * given * 1e6:.1f} to {high * given * 1e6:.1f} us)"


def _number(factor: float) -> str:
    return f"{factor:.2g}" if factor < 10 else f"{factor:.0f}"
