"""HTML from data: every text is escaped here, so that no name of a run can become markup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlplace.report.html.escape import escaped, prose
from rlplace.report.html.figure import Figure


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        id: of its heading, to which the page's list of contents leads.
        title: its heading.
        lead: a sentence below it, as text.
        body: markup, its texts escaped.
        figures: that `body` has places for.
    """

    id: str
    title: str
    lead: str
    body: str
    figures: Sequence[Figure] = field(default_factory=tuple)


@dataclass(frozen=True)
class Raw:
    """Markup that is put into a table as it is: its texts are escaped."""

    markup: str


def paragraph(text: str, style: str = "") -> str:
    """A paragraph of plain text.

    Args:
        text: as it is to be read.
        style: class of the paragraph.
    """
    return f"<p{_class(style)}>{prose(text)}</p>"


def table(
    headings: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    numbers: Sequence[int] = (),
    styles: Mapping[int, str] | None = None,
    minor: Sequence[int] = (),
) -> str:
    """A table in a box of its own that scrolls where it is too wide; columns in which nothing stands are left out.

    Args:
        headings: one a column.
        rows: cells, as text or `Raw` markup.
        numbers: columns that are aligned to the right.
        styles: row to its class.
        minor: columns that narrow screens leave out.
    """
    rows = [[_markup(cell) for cell in row] for row in rows]
    kept = [column for column in range(len(headings)) if any(row[column] for row in rows)]
    marks = [
        " ".join(name for name, columns in (("number", numbers), ("minor", minor)) if column in columns)
        for column in kept
    ]
    head = "".join(f"<th{_class(mark)}>{escaped(headings[column])}</th>" for column, mark in zip(kept, marks))
    body = "".join(
        f"<tr{_class((styles or {}).get(index, ''))}>"
        + "".join(f"<td{_class(mark)}>{row[column]}</td>" for column, mark in zip(kept, marks))
        + "</tr>"
        for index, row in enumerate(rows)
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def facts(pairs: Sequence[tuple[str, object]]) -> str:
    """A list of names and values."""
    items = "".join(f"<div><dt>{escaped(name)}</dt><dd>{_markup(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="facts">{items}</dl>'


def details(summary: str, markup: str) -> str:
    """Markup that is folded away behind a line."""
    return f"<details><summary>{escaped(summary)}</summary>{markup}</details>"


def bullets(lines: Sequence[str]) -> str:
    """A list of lines of text."""
    return "<ul>" + "".join(f"<li>{prose(line)}</li>" for line in lines) + "</ul>"


def _markup(value: object) -> str:
    return value.markup if isinstance(value, Raw) else escaped(value)


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
