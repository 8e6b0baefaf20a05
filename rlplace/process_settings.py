"""Settings of this process for forks, OpenMP and the current folder.

A forked child closes its copies of some descriptors; teams of OpenMP threads spin only briefly; and libraries read no
settings from the current folder, which may be a stranger's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

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
        with suppress(OSError):
            os.close(descriptor)
    _OWN.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_copies)


SPIN_COUNT = 3000
"""A hundredth of OpenMP's own 300,000, with which the second thread of a gang goes on spinning on a member's core after
each op and slows the work of that core; with this one eager PyTorch was as fast, within noise
(docs/capture-and-run.md).
"""


def spin_briefly() -> None:
    """Has teams of threads leave their cores soon after an op, unless the user chose how they wait.

    It is `GOMP_SPINCOUNT`, which OpenMP reads once, when PyTorch is imported: afterwards this does nothing.
    """
    if "torch" not in sys.modules and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)


@contextmanager
def unseen(name: str) -> Iterator[None]:
    """While active, `os.path.exists` finds no file `name` in the current folder; other paths are unaffected."""
    exists = os.path.exists
    os.path.exists = lambda path: path != name and exists(path)
    try:
        yield
    finally:
        os.path.exists = exists
