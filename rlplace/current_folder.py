"""Libraries that look for their settings in the current folder, which may be a stranger's, find none there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unseen(name: str) -> Iterator[None]:
    """While active, `os.path.exists` finds no file `name` in the current folder; other paths are as ever."""
    exists = os.path.exists
    os.path.exists = lambda path: path != name and exists(path)
    try:
        yield
    finally:
        os.path.exists = exists
