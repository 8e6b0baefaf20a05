"""Descriptors that end with this process: a forked child, such as a worker of a data loader, closes its copies."""

from __future__ import annotations

import contextlib
import os

_OWN: set[int] = set()


def keep_from_children(descriptor: int) -> int:
    """The descriptor, of which forked children close their copy; end it with `close_own`."""
    _OWN.add(descriptor)
    return descriptor


def close_own(descriptor: int) -> None:
    """Closes a descriptor of `keep_from_children`; a forked child has closed its copy already."""
    if descriptor in _OWN:
        _OWN.remove(descriptor)
        os.close(descriptor)


def _close_copies() -> None:
    for descriptor in _OWN:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _OWN.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_copies)
