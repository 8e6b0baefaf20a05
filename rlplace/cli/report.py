"""`rlplace report`: a run as one page for a browser."""

from __future__ import annotations

from pathlib import Path

import tyro

from rlplace.cli.arguments import print_json
from rlplace.say import say


def report(folder: tyro.conf.Positional[Path], json: bool = False) -> None:
    """Write a run's report: one page for a browser that needs no network, FOLDER/report.html.

    It reads the run folder alone: neither the model nor the host is needed, and no code of yours is imported.

    Args:
        folder: a run folder
        json: print the result as one JSON object on stdout
    """
    from rlplace.runs.report import write_report

    path = write_report(folder)
    say(f"wrote {path}: open it in a browser")
    if json:
        print_json({"schema": 1, "path": str(path), "bytes": path.stat().st_size})
