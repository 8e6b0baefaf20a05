"""The memory that a process has and may still take: a process that allocates without end dies before the machine does.

`Room` keeps the memory of placements in a worker within its limit, without the allocator's own cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from pathlib import Path, PurePosixPath

from rlplace.measure.hosts.host import Host
from rlplace.measure.timing.race import Watch

RESERVED_SHARE = 0.05
"""Part of the machine's memory that placements never get: the process that asks, and the system, need some."""
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def resident_bytes(process: int) -> int:
    """Resident memory of a process; 0 where it is unknown."""
    try:
        statm = (_PROC / str(process) / "statm").read_text(encoding="ascii")
        return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def room_bytes(host: Host, asked: float | None = None, *, machine: str = "") -> float:
    """The bytes that placements on the host's cores may take in this process beside its present memory: the free memory
    of the machine and its control group, never more than the host's figure.

    Args:
        host: its CPU devices' memory; a pool counts once.
        asked: a smaller limit; infinite, there is none.
        machine: name of this one, where the host names machines.
    """
    if asked == math.inf:
        return math.inf
    pools: dict[str, int] = {}
    for device in host.devices:
        if device.backend == "cpu" and device.machine == machine:
            pool = device.memory_pool or device.name
            pools[pool] = min(pools.get(pool, device.memory_bytes), device.memory_bytes)
    said = sum(pools.values()) if pools else math.inf
    return max(min(said, _available_bytes(), math.inf if asked is None else asked), 0.0)


def limit_data(num_bytes: float) -> None:
    """Has allocations of this process fail once it took `num_bytes` more than now, where the system can do that."""
    if math.isinf(num_bytes):
        return
    try:
        import resource

        used = _words(_PROC / "self" / "status")["VmData"] * 1024
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = int(used + num_bytes)
        resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard < 0 else min(wanted, hard), hard))
    except (ImportError, OSError, ValueError, KeyError):
        return


def give_back_freed() -> None:
    """Has the allocator give every free page back to the system, holes between others too, where it can (glibc)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def volunteer_to_die() -> None:
    """Has the kernel take this process first where the machine's memory runs out after all."""
    with contextlib.suppress(OSError):
        (_PROC / "self" / "oom_score_adj").write_text("1000", encoding="ascii")


def num_killed() -> int:
    """How many processes of this one's control group the kernel killed for want of memory; 0 where it is unknown."""
    for folder in _own_cgroups():
        words = _words(folder / "memory.events") or _words(folder / "memory.oom_control")
        if "oom_kill" in words:
            return words["oom_kill"]
    return 0


def _available_bytes() -> float:
    meminfo = _words(_PROC / "meminfo")
    if "MemAvailable" not in meminfo:
        return math.inf
    left = [meminfo["MemAvailable"] * 1024 - RESERVED_SHARE * meminfo["MemTotal"] * 1024]
    for folder in _own_cgroups():
        for most, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, taken = _number(folder / most), _number(folder / used)
            if limit is not None and taken is not None and limit < meminfo["MemTotal"] * 1024:
                cached = _words(folder / "memory.stat").get("inactive_file", 0)
                left.append((limit - taken + cached) - RESERVED_SHARE * limit)
    return min(left)


def _own_cgroups() -> list[Path]:
    """Folders of the control groups that limit this process's memory: its own and all above it.

    A container shows its own as the root.
    """
    try:
        lines = (_PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    groups = (line.split(":", maxsplit=2)[1:] for line in lines)
    own = [(_CGROUPS / name, PurePosixPath(path.lstrip("/"))) for name, path in groups if name in ("", "memory")]
    folders = dict.fromkeys(root / folder for root, group in own for folder in (group, *group.parents))
    return [folder for folder in folders if folder.is_dir()]


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):  # `max`: there is no limit
        return None


def _words(path: Path) -> dict[str, int]:
    """First number after each first word of a line."""
    found = {}
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="ascii").splitlines():
            words = line.replace(":", " ").split()
            if len(words) > 1 and words[1].isdigit():
                found[words[0]] = int(words[1])
    return found


class Room(Watch):
    """A watch that, before each step, gives freed memory back and makes allocations beyond the limit fail.

    Freed memory is kept for the next step (`keep_freed_memory`), and glibc finds no use for many of the holes: a step
    that holds 192 MB at most was seen to leave a heap of about 800 MB behind. So the limit is not on the process's
    total so far: once half of it is held when a step begins, free memory goes back to the system first, and the step
    may take the limit less the memory still held.

    Args:
        watch: told of every step, after that.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._most = math.inf
        self._held_before = 0

    def limit(self, num_bytes: float) -> None:
        """From now on placements may take so many bytes beside the process's present memory; without this, any."""
        self._held_before = resident_bytes(os.getpid())
        self._most = self._held_before + num_bytes
        limit_data(num_bytes)

    def begin(self, contender: int, *, is_made: bool = True) -> None:
        if not math.isinf(self._most):
            held = resident_bytes(os.getpid())
            if held > (self._held_before + self._most) / 2:
                give_back_freed()
                held = resident_bytes(os.getpid())
            limit_data(max(self._most - held, 0.0))
        self._watch.begin(contender, is_made=is_made)

    def end(self) -> None:
        self._watch.end()
