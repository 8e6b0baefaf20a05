"""Where the store of this user is, and which machines may share its content."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from pathlib import Path

from rlplace.files import cache_folder

FILE = "measurements.db"
"""Its name in the user's cache folder."""
RUN_FILE = "session.db"
"""The name of the session of a run, which holds the measurements of the run."""
AUTO, OFF = "auto", "off"
"""Words of `--store`: the user's own, and none."""


def store_path(word: str) -> Path | None:
    """The database that `--store WORD` names: a file, or that of a run folder; None for `off`.

    Raises:
        FileProblem: `auto`, and the user's folders are not known.
    """
    if word == OFF:
        return None
    if word == AUTO:
        return cache_folder() / FILE
    path = Path(word)
    if not path.is_dir():
        return path
    return path / RUN_FILE if (path / RUN_FILE).exists() else path / FILE


def machine_facts() -> tuple[tuple[str, str], ...]:
    """This machine's architecture, processor, number of cores and memory, by name."""
    return (
        ("architecture", platform.machine()),
        ("processor", _processor()),
        ("cores", str(os.cpu_count())),
        ("GiB of memory", str(_memory_gib())),
    )


@functools.cache
def machine_key() -> str:
    """16 hex digits over this machine's processor, number of cores and memory.

    Machines that are alike in these may answer for each other, as the nodes of a cluster do; GPUs are part of a host's
    own fingerprint.
    """
    facts = (platform.machine(), _processor(), os.cpu_count(), _memory_gib())
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Its model as Linux names it, or else as Python does."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    names = (line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name"))
    return next(names, platform.processor())


def _memory_gib() -> int:
    """0 where it is not known."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (AttributeError, OSError, ValueError):
        return 0
