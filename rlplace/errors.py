"""All errors that rlplace raises on purpose.

All errors have one root class. Each class is named for its condition. A message has the wrong field, its actual value,
the expected value, and the next action. The same facts are attributes for programs. `UserError`s are mistakes of the
caller (exit code 2 of the command line). The others are failures of rlplace or the machine (exit code 1).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rlplace.say import clean

_MOST_CHARACTERS = 400
_MOST_NAMES = 200
_LONGEST_COMPARED = 200
"""Most characters of a name for the comparison with known names."""


class RlplaceError(Exception):
    """Root of all errors that rlplace raises on purpose. It can be pickled, to be sent between processes."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the error with its attributes, because the message is made only once."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[RlplaceError], args: tuple[Any, ...], facts: dict[str, Any]) -> RlplaceError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(facts)
    return error


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """At most three known names that are similar to a name; none for long names, because the comparison takes quadratic
    time."""
    short = [each for each in [name, *known] if len(each) <= _LONGEST_COMPARED]
    return difflib.get_close_matches(name, short[1:], n=3, cutoff=0.5) if short[:1] == [name] else []


class UserError(RlplaceError):
    """A mistake of the caller: exit code 2."""


class UnknownName(UserError):
    """An unknown name; carries `kind`, `name`, `known` and the `nearest` known names."""

    def __init__(self, kind: str, name: str, known: Iterable[str], *, hint: str = "") -> None:
        self.kind, self.name, self.known = kind, name, tuple(sorted(known))
        self.nearest = tuple(nearest_names(name, self.known))
        guess = f"did you mean {' or '.join(map(repr, self.nearest))}?" if self.nearest else "no name comes close."
        known_names = f"Known: {_listed(self.known)}." if self.known else "There is none that could be meant."
        super().__init__(f"unknown {clean(kind)} {_shown(name)!r}: {guess} {known_names} {hint}".rstrip())


def check_known(kind: str, name: str, known: Collection[str], *, hint: str = "") -> None:
    """Refuses an unknown name.

    Raises:
        UnknownName: with the most similar known names.
    """
    if name not in known:
        raise UnknownName(kind, name, known, hint=hint)


class InvalidValue(UserError):
    """A value of the wrong type, range or length; carries `field`, `actual` and `expected`."""

    def __init__(self, field: str, actual: object, expected: str, *, where: str = "", hint: str = "") -> None:
        self.field, self.actual, self.expected = field, actual, expected
        self.where, self.hint = where, hint
        prefix = f"{clean(where)}: " if where else ""
        super().__init__(
            f"{prefix}{clean(_shown(field))} is {_shown(repr(actual))}, expected {expected}. {hint}".rstrip()
        )


def refuse_if(is_wrong: object, field: str, actual: object, expected: str, *, where: str = "", hint: str = "") -> None:
    """Refuses a value if a condition on it is true.

    Raises:
        InvalidValue: with these facts.

    Example:
        >>> refuse_if(0 < 1, "num_envs", 0, "at least 1")
        Traceback (most recent call last):
        rlplace.errors.InvalidValue: num_envs is 0, expected at least 1.
    """
    if is_wrong:
        raise InvalidValue(field, actual, expected, where=where, hint=hint)


class FileProblem(UserError):
    """A file that is missing or malformed, or that must not be overwritten; carries `path`."""

    def __init__(self, path: object, message: str) -> None:
        self.path = str(path)
        super().__init__(f"{clean(path)}: {message}")


class FingerprintMismatch(UserError):
    """A placement or graph made for another graph or host; carries `kind`, `actual` and `expected`."""

    def __init__(self, kind: str, actual: str, expected: str, *, hint: str = "") -> None:
        self.kind, self.actual, self.expected = kind, actual, expected
        super().__init__(
            f"this file was made for another {kind}: its {kind} fingerprint is {clean(_shown(actual))}, yours is "
            f"{expected}. "
            + (
                hint
                or f"Use the {kind} that it was made for, or search a placement for this one."
                + " Its shapes, dtypes, optimizer and micro-batches are part of a graph." * (kind == "graph")
            )
        )


class CaptureError(UserError):
    """A model that cannot be captured; carries `op` and the user's `source` line, if they are known."""

    def __init__(self, message: str, *, op: str = "", source: str = "") -> None:
        self.op, self.source = op, source
        super().__init__(message)


class MissingExtra(UserError):
    """An optional dependency that is not installed; carries `package` and `extra` (`""` if `how` describes the
    installation)."""

    def __init__(self, package: str, extra: str = "", *, how: str = "") -> None:
        self.package, self.extra = package, extra
        how = how or f"it comes with an extra: pip install 'rlplace[{extra}]'"
        super().__init__(f"{package} is not installed; {how}.")


class RunnerError(RlplaceError):
    """The machine or the runner failed while running a placement; carries the `op`, if it is known."""

    def __init__(self, message: str, *, op: str = "") -> None:
        self.op = op
        super().__init__(message)


class DeviceLost(RunnerError):
    """Devices were lost during measurements; carries `devices` (their names) and `why`."""

    def __init__(self, devices: Iterable[str], why: str, *, offer: str = "") -> None:
        self.devices, self.why = tuple(devices), why
        were_lost = f"{', '.join(self.devices) or 'a device'} {'were' if len(self.devices) > 1 else 'was'} lost"
        super().__init__(f"{were_lost}: {why}{f'. {offer}' if offer else ''}")


def _shown(text: str) -> str:
    """Text shortened for a message: text from a file may have any length."""
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def _listed(known: Sequence[str]) -> str:
    names = ", ".join(map(_shown, known[:_MOST_NAMES]))
    return names if len(known) <= _MOST_NAMES else f"{names}, and {len(known) - _MOST_NAMES} more"
