"""`disturbance_of`: whether what was measured of a step shows that something else ran on the machine meanwhile."""

from __future__ import annotations

from rlplace.measure.explain.explanation import Explanation

SCATTER = 0.1
"""Half the interquartile range of a quiet machine's steps is a smaller share of their median."""
UNUSUAL = 1.25
"""How many times the median, or its share, a typical step that was traced takes at most on a quiet machine."""


def disturbance_of(explanation: Explanation) -> str:
    """Why the figures of a measured step are to be doubted, in a sentence or two; empty where nothing shows.

    Args:
        explanation: of the step; what it says of disturbance already is not looked at.
    """
    step_s, spread_s = explanation.step_time_s, explanation.spread_s
    if explanation.kind != "measured" or not step_s:
        return ""
    signs = []
    if spread_s > SCATTER * step_s:
        signs.append(f"its steps scatter by ± {_percent(spread_s / step_s)} around their median")
        measured = [other for other in explanation.alternatives if other.kind == "measured"]
        near = [
            other.name
            for other in measured
            if other.step_time_s is not None and abs(other.step_time_s - step_s) <= spread_s
        ]
        if near:
            signs.append(f"the difference to {' and '.join(near)} is within that, and tells nothing")
    share = explanation.explained_s / step_s
    if not 1 / UNUSUAL <= share <= UNUSUAL:
        signs.append(f"the step that is explained took {_percent(share)} of the median")
    if not signs:
        return ""
    return f"Disturbed while it was measured: {'; '.join(signs)}. Run it again on a quiet machine before you act on it."


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
