"""What people are told while something takes long, and whether they are told: lines on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable

Say = Callable[[str], None]
"""Takes a line for people."""


def is_shown(asked: bool | None) -> bool:
    """Whether progress is shown: as asked, by default on a terminal only."""
    return sys.stderr.isatty() if asked is None else asked


def sayer(asked: Say | bool | None) -> Say:
    """What takes lines for people: the given one, stderr, or none, as `is_shown` says."""
    if callable(asked):
        return asked
    return say if is_shown(asked) else _drop


def say(message: str) -> None:
    """Lines for people, on stderr, without what a terminal would act on: names may come from a stranger's file."""
    print(clean_lines(message), file=sys.stderr, flush=True)


def _drop(_: str) -> None:
    pass


def counted(count: int, thing: str) -> str:
    """So many of a thing, in words.

    >>> counted(1, "op"), counted(1200, "op")
    ('1 op', '1,200 ops')
    """
    return f"{count:,} {thing}{'s' * (count != 1)}"


def clean(text: object) -> str:
    """Text on one line, every control character, also those that turn the direction of writing, shown as `�`.

    A terminal would act on such characters, and a stranger's file may hold them.

    Example:
        >>> clean("one" + chr(10) + "two" + chr(0x202E))
        'one two�'
    """
    return "".join(char if char.isprintable() else " " if char in "\t\n\r" else "�" for char in str(text))


def clean_lines(text: str) -> str:
    """`clean`, line by line.

    Example:
        >>> clean_lines("one" + chr(27) + chr(10) + "two")
        'one�\\ntwo'
    """
    return "\n".join(map(clean, text.split("\n")))
