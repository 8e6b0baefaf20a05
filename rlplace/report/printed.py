"""Tables for `print` and for notebooks: as plain text, and as HTML."""

from __future__ import annotations

import html
import io

from rich.table import Table
from rich.text import Text

from rlplace.report.console import CleanConsole

WIDTH = 120
"""Columns of a printed table; longer notes go on in the next line."""


def as_text(table: Table) -> str:
    """The table as lines without colours, the same on every terminal and in every file."""
    stream = io.StringIO()
    CleanConsole(file=stream, width=WIDTH, color_system=None, force_terminal=False, emoji=False).print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()).strip("\n")


def as_html(table: Table) -> str:
    """The table as an HTML `<table>`, its text escaped; a caption follows as a paragraph."""
    names = "".join(f"<th>{_escaped(column.header)}</th>" for column in table.columns)
    rows = "".join(
        f"<tr>{''.join(f'<td>{_escaped(cell)}</td>' for cell in row)}</tr>"
        for row in zip(*(column.cells for column in table.columns), strict=True)
    )
    caption = f"<p>{_escaped(table.caption)}</p>" if table.caption else ""
    return f"<table><thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table>{caption}"


def _escaped(cell: object) -> str:
    return html.escape(cell.plain if isinstance(cell, Text) else str(cell))
