"""`Watch`: somebody who is told which contender of a race is at work, so that a fault finds its cause."""

from __future__ import annotations

from typing import Protocol

from rlplace.measure.run.race import Timer

REFERENCE = -1
"""What a watch is told in place of a contender's index."""


class Watch(Protocol):
    """Is told of every step: `begin` with the contender's index or `REFERENCE`, then `end`, unless the step raised.

    What takes longer than a step (compiling a contender for the race, tracing) begins with `is_made` False.
    """

    def begin(self, contender: int, *, is_made: bool = True) -> None: ...
    def end(self) -> None: ...


class Unwatched:
    """A watch that nobody reads."""

    def begin(self, contender: int, *, is_made: bool = True) -> None: ...
    def end(self) -> None: ...


def watched(timer: Timer, contender: int, watch: Watch) -> Timer:
    """The timer, whose every step is told to `watch`."""

    def timed() -> float:
        watch.begin(contender)
        seconds = timer()
        watch.end()
        return seconds

    return timed
