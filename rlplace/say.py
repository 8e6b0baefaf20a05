"""Text for people: numbers with three digits and a unit, lines of progress on stderr, and of results on stdout."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

NOTHING = "–"

_TIME_UNITS = ((1e-9, "ns"), (1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))
_BYTE_UNITS = tuple((1024.0**power, unit) for power, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB", "PiB")))


def format_seconds(seconds: float) -> str:
    """A time with three digits; `–` where it is not finite.

    Example:
        >>> [format_seconds(s) for s in (0.0, 4.2e-7, 0.0123456, 1.5, 3725.0, float("inf"))]
        ['0 s', '420 ns', '12.3 ms', '1.50 s', '1:02:05', '–']
    """
    if not math.isfinite(seconds):
        return NOTHING
    if seconds == 0:
        return "0 s"
    return format_clock(seconds) if abs(seconds) >= 59.95 else _scaled(seconds, _TIME_UNITS)


def format_clock(seconds: float) -> str:
    """A duration as on a clock: `m:ss`, or `h:mm:ss`; `–` where it is not finite.

    Example:
        >>> [format_clock(s) for s in (0.4, 75.0, 3725.0)]
        ['0:00', '1:15', '1:02:05']
    """
    if not math.isfinite(seconds):
        return NOTHING
    minutes, rest = divmod(round(abs(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    sign = "-" if seconds < 0 and (hours or minutes or rest) else ""
    return f"{sign}{hours}:{minutes:02d}:{rest:02d}" if hours else f"{sign}{minutes}:{rest:02d}"


def format_ms(seconds: float) -> str:
    """Milliseconds without the unit, for a column of them; `–` where it is not finite.

    Example:
        >>> [format_ms(s) for s in (0.0123456, 1.5, 2e-6, float("nan"))]
        ['12.35', '1500.00', '0.002', '–']
    """
    if not math.isfinite(seconds):
        return NOTHING
    milliseconds = seconds * 1e3
    return f"{milliseconds:.2f}" if abs(milliseconds) >= 0.1 or milliseconds == 0 else f"{milliseconds:.3f}"


def format_bytes(num_bytes: float) -> str:
    """A size with three digits, in binary units; `–` where it is not finite.

    Example:
        >>> [format_bytes(b) for b in (0, 512, 1536, 25 * 2**20, 1023 * 2**20)]
        ['0 B', '512 B', '1.50 KiB', '25.0 MiB', '1.00 GiB']
    """
    if not math.isfinite(num_bytes):
        return NOTHING
    return f"{num_bytes:.0f} B" if abs(num_bytes) < 999.5 else _scaled(num_bytes, _BYTE_UNITS[1:])


def _scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    scale, unit = next((pair for pair in units if abs(value) < 999.5 * pair[0]), units[-1])
    scaled = value / scale
    decimals = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
    return f"{scaled:.{decimals}f} {unit}"


Say = Callable[[str], None]
"""Takes a line for people."""


def is_shown(asked: bool | None) -> bool:
    """Whether progress is shown: as asked, by default on a terminal only."""
    return sys.stderr.isatty() if asked is None else asked


def sayer(asked: Say | bool | None) -> Say:
    """A function that takes lines for people: the given one, stderr, or none, as `is_shown` says."""
    if callable(asked):
        return asked
    return say if is_shown(asked) else _drop


def say(message: str) -> None:
    """Lines for people, on stderr, without control characters: names may come from a stranger's file."""
    print(clean_lines(message), file=sys.stderr, flush=True)


def print_result(message: str) -> None:
    """Lines of a result, on stdout, without control characters."""
    print(clean_lines(message), flush=True)


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
