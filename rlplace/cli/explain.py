"""`rlplace explain`: where the time of a run's placed step goes."""

from __future__ import annotations

from pathlib import Path

import tyro

from rlplace.cli.arguments import print_json
from rlplace.errors import InvalidValue


def explain(folder: tyro.conf.Positional[Path], top: int = 12, json: bool = False) -> None:
    """Show where a run's step spends its time: devices, critical path, costliest copies, alternatives, and advice.

    It reads the run folder alone: neither the model nor the host is needed, and no code of yours is imported.

    Args:
        folder: a run folder
        top: most modules of the critical path to show
        json: print one JSON object on stdout
    """
    from rlplace.session.explained import read_explanation

    if top < 1:
        raise InvalidValue("top", top, "at least 1")
    explanation = read_explanation(folder)
    if json:
        print_json(explanation.to_dict())
        return
    from rlplace.report.console import CleanConsole
    from rlplace.report.printed import explanation_tables

    console = CleanConsole(stderr=True, highlight=False, emoji=False, markup=False)
    console.print(explanation_tables(explanation, top))
