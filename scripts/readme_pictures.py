"""Draws the README's pictures from a run: python scripts/readme_pictures.py RUN [FOLDER]."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlplace.errors import InvalidValue
from rlplace.report.drawing import INK, label_beside, new_figure, quiet_time_axis, save_figure
from rlplace.report.html.page import write_report
from rlplace.session.session import Session
from rlplace.training.outputs import result_of

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)
WIDTH, HEIGHT = 1180, 2100
"""Of the report's picture: its head, the table, the timeline and the placement."""
WAIT_MS, LONGEST_S = 20_000, 300
_BEST, _OTHER, _EAGER = "#0072B2", "#9CC3DB", "#D55E00"
_FIELD_IN, _ROW_IN, _AROUND_ROWS_IN, _NAMES_IN, _WORDS_IN = 10.0, 0.36, 1.5, 1.35, 2.0
"""Inches of the picture of the table."""


def save_field_png(path: str | os.PathLike[str], result: Mapping[str, Any], *, title: str) -> None:
    """Writes the rows of `result.json` as horizontal bars, fastest first, the winner marked.

    A line over a bar's end is its spread: half the interquartile range to both sides. Plain PyTorch is a line across
    all of them. Rows that were not timed are left out.

    Args:
        path: of the PNG file.
        result: with `rows`, `best` and `measured`, as `result.json` holds them.
        title: above the bars.

    Raises:
        InvalidValue: no row has a step time.
        FileProblem: the file cannot be written.
    """
    step_s = {
        row["method"]: float(row["step_time_s"])
        for row in result["rows"]
        if row.get("status", "ok") == "ok" and row.get("step_time_s")
    }
    rows = [row for row in result["rows"] if row["method"] in step_s and row.get("placement", True)]
    placed = sorted(rows, key=lambda row: -step_s[row["method"]])
    if not placed:
        raise InvalidValue(
            "rows", f"{len(result['rows'])} rows", "at least one with a step time", where="field picture"
        )
    height_in = _AROUND_ROWS_IN + _ROW_IN * len(placed)
    figure = new_figure(_FIELD_IN, height_in, title, 0.2, 0.2)
    width = 1 - (_NAMES_IN + _WORDS_IN) / _FIELD_IN
    axes = figure.add_axes((_NAMES_IN / _FIELD_IN, 0.62 / height_in, width, 1 - 1.4 / height_in))
    best, single_s, eager_s = (result.get("best") or {}).get("method"), step_s.get("single"), step_s.get("eager")
    longest_ms = (eager_s or 0.0) * 1e3
    for place, row in enumerate(placed):
        name, step_ms, spread_ms = row["method"], step_s[row["method"]] * 1e3, float(row.get("spread_s") or 0.0) * 1e3
        longest_ms, weight = max(longest_ms, step_ms + spread_ms), "bold" if name == best else "normal"
        axes.barh(place, step_ms, height=0.66, color=_BEST if name == best else _OTHER, linewidth=0, zorder=2)
        if spread_ms:
            axes.plot([step_ms - spread_ms, step_ms + spread_ms], [place] * 2, color=INK, linewidth=1.3, zorder=4)
        words = f"{step_ms:.1f} ms" + (f"   {step_s[name] / single_s:.2f}×" if single_s else "")
        label_beside(axes, 1.0, place, words, shift=12, weight=weight)
        label_beside(axes, 0.0, place, f"{'★ ' if name == best else ''}{name}", weight=weight)
    if eager_s is not None:
        axes.axvline(eager_s * 1e3, color=_EAGER, linewidth=1.6, linestyle=(0, (4, 2)), zorder=3)
        axes.annotate(
            f"eager PyTorch, {eager_s * 1e3:.1f} ms",
            (eager_s * 1e3, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=9.5,
            color=_EAGER,
        )
    axes.set(xlim=(0.0, longest_ms * 1.03), ylim=(-0.6, len(placed) - 0.4))
    kind = "measured" if result.get("measured") else "simulated"
    quiet_time_axis(axes, f"{kind} step, ms: less is better; beside it, over the best single device")
    save_figure(path, figure)


def picture_of(page: Path, path: Path) -> bool:
    """Writes what a browser shows of `page`, and says whether there is a browser."""
    browser = next((found for found in map(shutil.which, NAMES) if found), None)
    if browser is None:
        return False
    with tempfile.TemporaryDirectory() as profile:
        size = (f"--window-size={WIDTH},{HEIGHT}", f"--virtual-time-budget={WAIT_MS}")
        command = [browser, *FLAGS, f"--user-data-dir={profile}", *size, f"--screenshot={path}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=LONGEST_S)
    return True


def main(run: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with Session.read(run) as session:
        title = f"One training step of {session.request.workload}, every method's placement in one race"
        save_field_png(folder / "field.png", result_of(session), title=title)
    shutil.copyfile(run / "timeline.png", folder / "timeline.png")
    print(f"wrote {folder / 'field.png'} and {folder / 'timeline.png'}")
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(shutil.copytree(run, Path(scratch) / "run"))
        if picture_of(write_report(copy), folder / "report.png"):
            print(f"wrote {folder / 'report.png'}")
        else:
            print("no chromium here, so report.png stays as it is: apt-get install chromium", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else PICTURES)
