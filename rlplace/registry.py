"""`Registry`: entries of one kind by name: built in, registered, or from another installed package."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar, cast

from rlplace.errors import InvalidValue, RlplaceError, UnknownName, refuse_if

T = TypeVar("T")
_NAME = re.compile(r"[a-z0-9]+(?:[_-][a-z0-9]+)*")


class _NoEntry(UnknownName, KeyError):
    """`UnknownName` that a `Mapping` takes for a miss, so that `registry.get(name)` is None."""

    __str__ = Exception.__str__


class Registry(Mapping[str, T]):
    """Entries of one kind by name, imported when they are looked up.

    An entry is an object, or a string that says where one is: `module:attribute`. Installed packages bring more as
    entry points of `group`, which are read once a process, when a name is not in the registry or names are listed.
    One is imported only when its own name is looked up. A name of the registry hides an entry point of that name.

    Args:
        kind: of its entries, for messages:  `export format`.
        entries: the built-in ones, as `register` takes them.
        group: of entry points; without it there are none.
        entry_type: of which every entry must be an instance.

    Example:
        >>> numbers = Registry[type]("number", {"fraction": "fractions:Fraction"}, entry_type=type)
        >>> numbers["fraction"]
        <class 'fractions.Fraction'>
    """

    def __init__(
        self, kind: str, entries: Mapping[str, T | str], *, group: str = "", entry_type: type[Any] = object
    ) -> None:
        self.kind, self.group = kind, group
        self._entry_type = entry_type
        self._entries: dict[str, T | str] = {}
        self._loaded: dict[str, T] = {}
        for name, entry in entries.items():
            self.register(name, entry)

    def register(self, name: str, entry: T | str) -> None:
        """Adds an entry for this process: an object, or `module:attribute` of one.

        Raises:
            InvalidValue: the name is malformed or taken, or the entry is of another type.
        """
        refuse_if(
            not _NAME.fullmatch(name), "name", name, "lower-case letters and digits, joined by - or _", where=self.kind
        )
        refuse_if(
            name in self._entries,
            "name",
            name,
            "a name that is not taken",
            where=self.kind,
            hint=f"Choose another name, or `unregister({name!r})` first.",
        )
        self._entries[name] = entry if isinstance(entry, str) else self._checked(entry, f"{self.kind} {name!r}")
        self._loaded.pop(name, None)

    def unregister(self, name: str) -> None:
        """Takes an entry out of the registry; entries of installed packages stay.

        Raises:
            UnknownName: no entry of that name is in the registry.
        """
        if name not in self._entries:
            raise _NoEntry(self.kind, name, self._entries)
        del self._entries[name]
        self._loaded.pop(name, None)

    def __getitem__(self, name: str) -> T:
        """The entry of that name.

        Raises:
            UnknownName: there is none.
            InvalidValue: it cannot be imported or is of another type; the message names the package that brings it.
        """
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._found

    def __iter__(self) -> Iterator[str]:
        return iter([*self._entries, *sorted(self._found.keys() - self._entries.keys())])

    def __len__(self) -> int:
        return len(self._entries.keys() | self._found.keys())

    @cached_property
    def _found(self) -> dict[str, set[EntryPoint]]:
        """Entry points by name: more than one where packages use the same name."""
        found: dict[str, set[EntryPoint]] = {}
        for point in entry_points(group=self.group) if self.group else ():
            found.setdefault(point.name, set()).add(point)
        return found

    def _load(self, name: str) -> T:
        entry, what = self._entries.get(name), f"{self.kind} {name!r}"
        if name not in self._entries:
            if name not in self._found:
                raise _NoEntry(self.kind, name, self)
            owners = sorted(f"{point.dist.name} {point.dist.version}" for point in self._found[name] if point.dist)
            entry, what = next(iter(self._found[name])).value, f"{what} of {' and '.join(owners)}"
            refuse_if(len(self._found[name]) > 1, "name", name, "a name that one installed package uses", where=what)
        if isinstance(entry, str):
            try:
                entry = EntryPoint("", entry, "").load()
            except RlplaceError:
                raise
            except (Exception, SystemExit) as error:
                raise InvalidValue(
                    "home",
                    entry,
                    "a module:attribute to import",
                    where=what,
                    hint=f"It raised {type(error).__name__}: {error}.",
                ) from error
        return self._checked(entry, what)

    def _checked(self, entry: Any, what: str) -> T:
        if not isinstance(entry, self._entry_type):
            raise InvalidValue("entry", entry, f"of type {self._entry_type.__qualname__}", where=what)
        return cast(T, entry)
