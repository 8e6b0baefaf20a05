"""What the run learned about the host, in words and as factors."""

from __future__ import annotations

import math

from rlplace.report.html.run_data import Factor, RunData
from rlplace.report.html.tags import Section, bullets, details, paragraph, table

_MOST_ROWS = 40
_SURE = 1.96
_LARGEST_LOG = 50.0


def learned_host_section(data: RunData) -> Section | None:
    """The lines that the run said, and the factors behind them; None where no method learned the host."""
    if data.host_lines is None:
        return None
    lead = (
        "Measured steps against the figures of the host: factors on op types, devices, links and launches that the "
        "measurements bear out, with the interval that holds 95 % of what is believed."
    )
    said = (
        bullets(data.host_lines) if data.host_lines else paragraph("The host is as profiled, as far as the steps tell.")
    )
    factors = [one for one in data.factors if _is_usable(one)]
    ranked = sorted(factors, key=lambda one: -abs(one.log_mean) / one.log_deviation)[:_MOST_ROWS]
    rows = [[one.kind, one.name, f"{math.exp(one.log_mean):.3g}×", _interval(one), _narrowed(one)] for one in ranked]
    heads = ["what", "name", "factor", "95 % interval", "deviation left"]
    summary = f"{len(ranked)} of {len(factors)} factors, the surest first"
    more = details(summary, table(heads, rows, numbers=(2, 3, 4))) if rows else ""
    return Section("host", "What was learned about the host", lead, said + more)


def _is_usable(factor: Factor) -> bool:
    return abs(factor.log_mean) < _LARGEST_LOG and 0 < factor.log_deviation < _LARGEST_LOG


def _interval(factor: Factor) -> str:
    low, high = (math.exp(factor.log_mean + side * _SURE * factor.log_deviation) for side in (-1, 1))
    return f"{low:.3g} to {high:.3g}"


def _narrowed(factor: Factor) -> str:
    """How much of the doubt there was before is left."""
    return f"{factor.log_deviation / factor.prior_deviation:.0%}" if factor.prior_deviation > 0 else ""
