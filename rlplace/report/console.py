"""A console of rich that shows nothing to a terminal that a stranger's file may have put into names and messages."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from rlplace.say import clean_lines


class CleanConsole(Console):
    """Text without what a terminal would act on; the console's own colours and movements stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As of `Console`, which draws everything by it."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=clean_lines(segment.text))
