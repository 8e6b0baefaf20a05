"""Reports: traces, pictures and tables. Importing this imports neither matplotlib, rich nor torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlplace.lazy_imports import lazy
from rlplace.say import format_bytes, format_clock, format_ms, format_seconds

if TYPE_CHECKING:
    from rlplace.report.chrome_trace import write_chrome_trace
    from rlplace.report.console import results_table
    from rlplace.report.drawing import save_best_so_far_png, save_fidelity_png, save_timeline_png
    from rlplace.report.plots import Curve

__all__ = [
    "Curve",
    "format_bytes",
    "format_clock",
    "format_ms",
    "format_seconds",
    "results_table",
    "save_best_so_far_png",
    "save_fidelity_png",
    "save_timeline_png",
    "write_chrome_trace",
]

__getattr__ = lazy(__name__, __file__)
