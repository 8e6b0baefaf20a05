"""What `rlplace doctor` shows people: a finding a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """Findings as a table, in their order.

    Args:
        rows: `checks` of what `rlplace doctor --json` prints.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("verdict", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("found", overflow="fold", ratio=3)
    table.add_column("remedy", overflow="fold", ratio=2)
    for row in rows:
        cells = (Text(row["verdict"], STYLES[row["verdict"]]), *(Text(row[key]) for key in ("name", "found", "remedy")))
        table.add_row(*cells)
    return table
