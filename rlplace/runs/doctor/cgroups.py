"""Limits that a control group sets on this process, of both versions; a container is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from rlplace.runs.doctor.system import System

MOUNT = "sys/fs/cgroup"
LARGEST_LIMIT_BYTES = 1 << 60
"""A limit above this is none: version 1 has no other word for it."""


def cpu_quota(system: System) -> float | None:
    """How many cores' time this process gets; None: as much as there is."""
    quotas = []
    for limit in _values(system, "", "cpu.max"):  # "QUOTA PERIOD" in microseconds, or "max PERIOD"
        quota, period = limit.split()
        if quota != "max":
            quotas.append(int(quota) / int(period))
    limits = _values(system, "cpu", "cpu.cfs_quota_us")
    periods = _values(system, "cpu", "cpu.cfs_period_us")
    quotas.extend(int(quota) / int(period) for quota, period in zip(limits, periods) if int(quota) > 0)
    return min(quotas, default=None)


def memory_limit_bytes(system: System) -> int | None:
    """The most memory that this process may use; None: as much as there is."""
    words = [*_values(system, "", "memory.max"), *_values(system, "memory", "memory.limit_in_bytes")]
    limits = [int(word) for word in words if word != "max"]
    return min((limit for limit in limits if limit < LARGEST_LIMIT_BYTES), default=None)


def _values(system: System, controller: str, name: str) -> Iterator[str]:
    """What that file says in this process's group and in every group above it: the tightest counts.

    Args:
        system: where to look.
        controller: of version 1; empty for version 2, which has one tree for all.
        name: of the file.
    """
    for folder in _groups(system, controller):
        if value := system.read(f"{MOUNT}/{controller}/{folder}/{name}"):
            yield value


def _groups(system: System, controller: str) -> list[str]:
    """Folders of this process's group and of all above it, below the mount.

    In a container the path may be that outside of it: then only the mount itself is found, which is the right one.
    """
    for line in system.read("proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = PurePosixPath(path.lstrip("/"))
            return [str(folder) for folder in (group, *group.parents)]
    return ["."]
