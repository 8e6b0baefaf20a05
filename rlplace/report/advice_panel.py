"""What `rlplace advise` shows people: the verdict, why, and the figures that it stands on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from rlplace.report.format import NOTHING, format_bytes, format_seconds


def advice_panel(told: Mapping[str, Any], verdict: str) -> Group:
    """The verdict first, then the figures, then what to do next.

    Args:
        told: what `rlplace advise --json` prints.
        verdict: in words.
    """
    figures = told["figures"]
    reason = str(told["reason"])
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in (
        ("expected step", _expected(told)),
        ("eager PyTorch", _time(figures["eager_s"], figures["eager_why"])),
        ("one device", _single(figures)),
        (_placed(figures), _time(figures["placed_s"], "none fits, or none was tried")),
        *_cut(figures),
        ("bound", f"{format_seconds(figures['bound_s'])} ({figures['bound']})"),
        ("step times", f"{figures['kind']}, op times {figures['costs']}"),
        ("it took", f"{format_seconds(told['capture_s'])} to capture, {format_seconds(told['seconds'])} from there"),
        ("next", str(told["next"])),
    ):
        table.add_row(name, Text(value))
    return Group(Text(f"{verdict}: {reason}", style="bold"), table)


def _expected(told: Mapping[str, Any]) -> str:
    if told["ratio_found"] is None:
        return f"{NOTHING} (nothing else can run the step)"
    found, medians = told["ratio_found"], told["ratio_of_medians"]
    words = f"{told['ratio_least']:.2f} to {found:.2f} of what {told['over']} takes"
    if medians is None or f"{medians:.2f}" == f"{found:.2f}":
        return words
    spread = f"{told['figures']['spread']:.0%}".replace("%", " %")
    is_stay = found == 1.0 and medians < 1.0
    why = "to stay is no gain" if is_stay else f"{found:.2f} with a spread of ± {spread}"
    return f"{words}: {medians:.2f} by the medians, {why}"


def _placed(figures: Mapping[str, Any]) -> str:
    """What the searched placement of the whole batch is called: it may have measured slower than one device."""
    single_s, placed_s = figures["single_s"], figures["placed_s"]
    is_slower = single_s is not None and placed_s is not None and single_s < placed_s
    return "searched placement" if is_slower else "best placement"


def _single(figures: Mapping[str, Any]) -> str:
    held = f"{format_bytes(figures['single_bytes'])} of {format_bytes(figures['single_capacity_bytes'])}"
    return f"{_time(figures['single_s'], 'does not fit')} on {figures['single_device']}, {held}"


def _cut(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Lines on what the batch in slices would take."""
    rows = []
    if max(figures["counts"]) > 1:
        count = figures["cut_count"]
        rows.append((f"{count} micro-batches", _time(figures["cut_s"], "not faster, or does not fit")))
    if figures["split_s"] is not None:
        rows.append(("even split", f"{format_seconds(figures['split_s'])} at best (estimated)"))
    return rows


def _time(step_s: float | None, why: str) -> str:
    return format_seconds(step_s) if step_s is not None else f"{NOTHING} ({why})"
