"""A console of rich that shows nothing to a terminal that a stranger's file may have put into names and messages.

What a person sees on stderr while a run goes on.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.segment import Segment
from rich.table import Column

from rlplace.format import format_clock, format_seconds
from rlplace.say import clean_lines, is_shown


class CleanConsole(Console):
    """Text without what a terminal would act on; the console's own colours and movements stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As of `Console`, which draws everything by it."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=clean_lines(segment.text))


LINE_EVERY_S = 10.0
REDRAW_EVERY_S = 0.25


class Progress:
    """A bar with placements tried, the best step as a share of one device's, and time left; plain lines off a terminal.

    It redraws only when told something new: a thread of its own would disturb what is measured.

    Args:
        is_quiet: show nothing.
        is_concluding: show what is said last; by default unless it is quiet.
        stream: what to write to; stderr by default, since stdout belongs to `--json`.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        *,
        is_quiet: bool = False,
        is_concluding: bool | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stream = sys.stderr if stream is None else stream
        self._clock, self._stream = clock, stream
        self._is_concluding = not is_quiet if is_concluding is None else is_concluding
        self._console = CleanConsole(file=stream, highlight=False, emoji=False, quiet=is_quiet)
        self._is_live = not is_quiet and stream.isatty() and not self._console.is_dumb_terminal
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._shown_s = -math.inf
        self._unshown: tuple[str, str, float] | None = None
        self._line = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def say(self, text: str) -> None:
        """Prints a line, above the bar if there is one; how the search stood is shown first."""
        self._show()
        self._console.print(text, markup=False, soft_wrap=True)

    def update(
        self,
        *,
        placements: int,
        best_s: float,
        single_s: float,
        left_s: float,
        budget_s: float,
        measured: int = 0,
        method: str = "",
    ) -> None:
        """Says how the search stands; shown at most four times a second, off a terminal every ten seconds.

        Args:
            placements: scored so far.
            best_s: best step time so far, at what one device takes now; infinite while there is none.
            single_s: step time on the best single device; infinite or nan where it is not known.
            left_s: seconds of search left.
            budget_s: seconds of search in all.
            measured: how many placements were run so far.
            method: that searches, whose best it is; empty where several do side by side.
        """
        parts = [f"{placements:,} placements" + (f", {measured:,} measured" if measured else "")]
        if math.isfinite(best_s) and best_s > 0:
            parts.append(_best(best_s, single_s, is_measured=measured > 0))
        parts.append(f"{format_clock(max(left_s, 0.0))} left")
        done = 1.0 - left_s / budget_s if budget_s > 0 else 1.0
        self._unshown = f"search{' of ' if method else ''}{method}", " · ".join(parts), min(max(done, 0.0), 1.0)
        if self._clock() - self._shown_s >= (REDRAW_EVERY_S if self._is_live else LINE_EVERY_S):
            self._show()

    def conclude(self, text: str) -> None:
        """Prints the line that a search ends with."""
        self.close()
        if self._is_concluding:
            print(clean_lines(text), file=self._stream, flush=True)

    def close(self) -> None:
        """Shows what was not shown yet and leaves the last state standing; closing twice does no harm."""
        self._show()
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

    def _show(self) -> None:
        if self._unshown is None:
            return
        (name, text, done), self._unshown = self._unshown, None
        self._shown_s = self._clock()
        if not self._is_live:
            if text != self._line:  # what changed since then is too little to be seen
                self.say(f"{name}: {text}")
            self._line = text
            return
        if self._bar is None or self._task is None:
            whole = Column(no_wrap=False, overflow="fold")  # goes on in the next line where the terminal is narrow
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=12),
                TextColumn("{task.fields[detail]}", table_column=whole),
            )
            self._bar = Bar(
                *columns, console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
            )
            self._task = self._bar.add_task(name, total=1.0, detail=text)
            self._bar.start()
        self._bar.update(self._task, description=name, completed=done, detail=text)
        self._bar.refresh()


def _best(best_s: float, single_s: float, *, is_measured: bool) -> str:
    """The best so far: its share of one device's time, which only falls, before its seconds.

    Measured seconds rise where the machine slows down: they are those of now, and do not stand as the best.
    """
    if not math.isfinite(single_s):
        return f"best {format_seconds(best_s)}"
    ratio, seconds = best_s / single_s, format_seconds(best_s)
    slower = ", slower" if ratio > 1.0 else ""
    return f"best {ratio:.2f} of one device's time{slower} ({seconds}{' now' if is_measured else ''})"


def make_progress(*, is_quiet: bool = False) -> Progress:
    """The progress display on stderr; nothing at all if `is_quiet`."""
    return Progress(is_quiet=is_quiet)


def progress_of(asked: Progress | bool | None) -> Progress:
    """The progress display that is asked for.

    Args:
        asked: one of your own; True for one on stderr, False for none, None for one where stderr is a terminal, and the
            last line alone where it is none.
    """
    if isinstance(asked, Progress):
        return asked
    return Progress(is_quiet=not is_shown(asked), is_concluding=asked is not False)
