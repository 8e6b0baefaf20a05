"""HTML from data; every text is escaped here, so no name of a run can become markup."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlplace.report.plots import readable
from rlplace.say import clean


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        id: of its heading, to which the page's list of contents leads.
        title: its heading.
        lead: a sentence below it, as text.
        body: markup, its texts escaped.
    """

    id: str
    title: str
    lead: str
    body: str


def picture(name: str, title: str, views: Mapping[str, str]) -> str:
    """A figure of one or two views, of which readers choose one.

    Args:
        name: its id, unique on the page.
        title: its description for screen readers.
        views: markup by label.
    """
    choices = "".join(
        f'<input type="radio" name="{name}" id="{name}-{place}"{" checked" if place == 0 else ""}>'
        f'<label for="{name}-{place}">{escaped(label)}</label>'
        for place, label in enumerate(views if len(views) > 1 else ())
    )
    shown = "".join(
        f'<div class="view" role="img" aria-label="{escaped(title)}">{view}</div>' for view in views.values()
    )
    return f'<figure class="figure" id="{name}">{choices}{shown}</figure>'


def legend(colors: Mapping[str, str]) -> str:
    """Names beside their colours."""
    keys = (
        f'<span class="key"><i style="background:{color}"></i>{escaped(name)}</span>' for name, color in colors.items()
    )
    return f'<p class="keys">{"".join(keys)}</p>'


def stacked(parts: Sequence[tuple[str, float]], width: float = 1.0) -> str:
    """A bar of parts.

    Args:
        parts: colour and size of each, sizes in any unit.
        width: of the bar, as a share of the widest.
    """
    whole = sum(size for _, size in parts) or 1.0
    shown = (f'<b style="background:{color};width:{size / whole:.2%}"></b>' for color, size in parts)
    return f'<span class="stack"><span style="width:{width:.2%}">{"".join(shown)}</span></span>'


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


_PART_OF_PATH = re.compile(r"([./])(?=[^\W\d])")


def _markup(value: object) -> str:
    """A value as HTML; a dotted or a file's path may go on in the next line after each of its parts, no word may."""
    return value.markup if isinstance(value, Raw) else _PART_OF_PATH.sub(r"\1<wbr>", escaped(value))


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def escaped(text: object) -> str:
    """A name as HTML, also inside of an attribute's quotes.

    Example:
        >>> escaped('<b>"x"</b>')
        '&lt;b&gt;&quot;x&quot;&lt;/b&gt;'
    """
    return html.escape(readable(text), quote=True)


def prose(text: object) -> str:
    """Sentences as HTML, cut nowhere."""
    return html.escape(clean(text))
