"""What the control groups of this process, as of a container or a batch job, leave it of the machine: cores and memory.

Each figure is the tightest of its own group and of all groups above it, in either version of control groups.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from rlplace.measure.timing.threads import usable_cores

MOUNT = "sys/fs/cgroup"
LARGEST_LIMIT_BYTES = 1 << 60
"""A limit above this is none: version 1 has no other word for it."""
SYSTEM = Path("/")
"""The folder above `proc` and `sys`."""


def allowed_cores(root: Path = SYSTEM) -> tuple[int, ...]:
    """The cores that this process may run on, ascending: as many of the first ones as it may keep busy, at least one.

    Two cores with a quota of 1.5 are one: devices on both would take turns.
    """
    quota = cpu_quota(root)
    return usable_cores()[: None if quota is None else max(int(quota), 1)]


def ram_bytes(root: Path = SYSTEM) -> int:
    """The memory that this process may use: all of the machine's, or its limit."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(machine, memory_limit_bytes(root) or machine)


def free_bytes(root: Path = SYSTEM) -> int:
    """Memory that processes can take now, at most; all of it where the system does not say."""
    free = re.search(r"^MemAvailable: *([0-9]+) kB", small_file(root / "proc/meminfo"), re.MULTILINE)
    return min(ram_bytes(root), int(free[1]) << 10) if free else ram_bytes(root)


def cpu_quota(root: Path = SYSTEM) -> float | None:
    """How many cores' time this process gets; None: as much as there is."""
    # version 2: "QUOTA PERIOD" in microseconds, or "max PERIOD"; version 1: a file for each, -1 for no quota
    limits: list[Sequence[str]] = [limit.split() for limit in _values(root, "", "cpu.max")]
    limits += zip(_values(root, "cpu", "cpu.cfs_quota_us"), _values(root, "cpu", "cpu.cfs_period_us"))
    shares = (int(quota) / int(period) for quota, period in limits if quota != "max" and int(quota) > 0)
    return min(shares, default=None)


def memory_limit_bytes(root: Path = SYSTEM) -> int | None:
    """The most memory that this process may use; None: as much as there is."""
    words = [*_values(root, "", "memory.max"), *_values(root, "memory", "memory.limit_in_bytes")]
    limits = (int(word) for word in words if word != "max")
    return min((limit for limit in limits if limit < LARGEST_LIMIT_BYTES), default=None)


def small_file(path: Path) -> str:
    """A small file of the system, stripped; empty where there is none or it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _values(root: Path, controller: str, name: str) -> list[str]:
    """The values of that file in this process's group and in every group above it: the tightest counts."""
    found = (small_file(root / MOUNT / controller / folder / name) for folder in _groups(root, controller))
    return [value for value in found if value]


def _groups(root: Path, controller: str) -> list[str]:
    """Folders of this process's group and of all above it, below the mount.

    In a container the path may be that outside of it: then only the mount itself is found, which is the right one.
    """
    for line in small_file(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = PurePosixPath(path.lstrip("/"))
            return [str(folder) for folder in (group, *group.parents)]
    return ["."]
