"""Names of a run as text that markup cannot hide in: for HTML, and for plotly's own small markup language."""

from __future__ import annotations

import html

from rlplace.say import clean

MOST_CHARACTERS = 160
"""Of a name; longer ones are cut in the middle."""


def readable(text: object, most: int = MOST_CHARACTERS) -> str:
    """`clean` text, cut in the middle where it has more than `most` characters.

    Example:
        >>> readable("from one end to the other", most=13)
        'from ...other'
    """
    shown = clean(text)
    if len(shown) <= most:
        return shown
    half = (most - 3) // 2
    return f"{shown[:half]}...{shown[-half:]}"


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


def plot_text(text: object, most: int = MOST_CHARACTERS) -> str:
    """A name as plotly shows it, which reads a few tags and entities, links among them.

    Example:
        >>> plot_text('<a href="x">y</a>')
        '&lt;a href="x"&gt;y&lt;/a&gt;'
    """
    return html.escape(readable(text, most), quote=False)
