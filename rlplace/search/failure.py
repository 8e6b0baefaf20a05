"""`Failure`: what becomes of a method that raises: a line for its row of a table, and the traceback."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path

from rlplace.errors import RlplaceError

MOST_LETTERS = 300
"""Of an error's first line, so that a row of a table stays one."""


@dataclass(frozen=True)
class Failure:
    """A method that raised.

    Attributes:
        why: the error in one line; where it is none of ours, with its type, and the file and line that raised it.
        traceback: all of it, as Python prints it.
    """

    why: str
    traceback: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """The failure that an error is.

        Example:
            >>> Failure.of(MemoryError()).why
            'out of memory'
        """
        return cls(_line(error), "".join(traceback.format_exception(error)))


def _line(error: Exception) -> str:
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    first = first if len(first) <= MOST_LETTERS else f"{first[: MOST_LETTERS - 3]}..."
    if isinstance(error, RlplaceError):
        return first
    if isinstance(error, MemoryError):
        return first or "out of memory"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{f': {first}' if first else ''}{place}"
