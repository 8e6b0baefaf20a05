"""Checks of the CPU: the cores that this process may use, who shares them, memory, threads and the allocator."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import combinations

from rlplace.openmp import SPIN_COUNT
from rlplace.report.format import format_bytes
from rlplace.runs.doctor.cgroups import cpu_quota, memory_limit_bytes
from rlplace.runs.doctor.check import Finding
from rlplace.runs.doctor.system import System

BUSY = 0.25
"""Share of the machine's cores in use from which on measured figures move visibly."""
LEAST_FREE_BYTES = 2 << 30
BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_THREAD_LIMIT")
"""Settings that work against threads pinned to the cores of their device."""
ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")


def check_cores(system: System) -> Iterator[Finding]:
    """How many cores this process may use, and for how much of the time."""
    usable, cores, quota = len(system.usable_cores()), system.num_cores() or 0, cpu_quota(system)
    model = re.search(r"^model name\s*:\s*(.+)$", system.read("proc/cpuinfo"), flags=re.MULTILINE)
    found = f"{usable} of {cores or 'an unknown number of'} logical cores may be used"
    if model is not None:
        found += f", {model[1]}"
    if quota is not None and quota < usable:
        found += f"; a control group allows the time of {quota:g}"
        remedy = f"raise the container's CPU limit, or use --host cores:{max(int(quota), 1)}"
        yield Finding("cores", "warn", found, remedy)
    elif usable < 2:
        yield Finding(
            "cores", "warn", found, "without GPUs there is one device, and nothing to place: allow more cores"
        )
    else:
        yield Finding("cores", "ok", found)


def check_hyper_threads(system: System) -> Iterator[Finding]:
    """Whether devices would be hyper-threads of the same core."""
    from rlplace.measure.hosts.detect import MAX_CORE_DEVICES

    usable = list(system.usable_cores())
    siblings = {core: _siblings(system, core) for core in usable}
    if not all(siblings.values()):
        yield Finding("hyper-threads", "ok", "not told by this system")
        return
    separate = sorted({min(found & set(usable)) for found in siblings.values()})
    words = "logical core is one" if len(usable) == 1 else "logical cores are"
    found = f"the {len(usable)} {words} of {len(separate)} physical ones"
    devices = usable[:MAX_CORE_DEVICES]
    shared = [f"{one} and {other}" for one, other in combinations(devices, 2) if other in siblings[one]]
    if shared and len(separate) > 1:
        remedy = f"run `taskset -c {','.join(map(str, separate))} rlplace ...`, so that each device has its own"
        yield Finding("hyper-threads", "warn", f"{found}; devices share one: {', '.join(shared)}", remedy)
    elif shared:
        yield Finding("hyper-threads", "warn", found, "devices share it: expect little of placing over them")
    else:
        yield Finding("hyper-threads", "ok", found)


def _siblings(system: System, core: int) -> set[int]:
    """Logical cores of the same physical core, itself included; none where the system does not tell."""
    told = system.read(f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    found: set[int] = set()
    for part in filter(None, told.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def check_load(system: System) -> Iterator[Finding]:
    """Whether others keep the machine busy."""
    told, cores = system.read("proc/loadavg").split(), system.num_cores() or 1
    if not told:
        yield Finding("load", "ok", "not told by this system")
        return
    load = float(told[0])
    found = f"{load:.2f} on {cores} cores over the last minute"
    if load > BUSY * cores:
        remedy = "measure on an idle machine: beside other work, measured ratios move by 30 to 60 %"
        yield Finding("load", "warn", found, remedy)
    else:
        yield Finding("load", "ok", found)


def check_memory(system: System) -> Iterator[Finding]:
    """How much memory there is, how much is left, and whether a control group allows less."""
    told = dict(re.findall(r"^(\w+):\s+(\d+) kB$", system.read("proc/meminfo"), flags=re.MULTILINE))
    if "MemTotal" not in told or "MemAvailable" not in told:
        yield Finding("memory", "ok", "not told by this system")
        return
    total_bytes, available_bytes = (int(told[name]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit_bytes = memory_limit_bytes(system)
    found = f"{format_bytes(available_bytes)} available of {format_bytes(total_bytes)}"
    if limit_bytes is not None and limit_bytes < total_bytes:
        found += f"; a control group allows {format_bytes(limit_bytes)}"
        remedy = "rlplace counts on the machine's memory: raise the limit, or lower `memory_bytes` in a host file"
        yield Finding("memory", "warn", found, remedy)
    elif available_bytes < LEAST_FREE_BYTES:
        yield Finding("memory", "warn", found, "end what you do not need: a large model will not fit")
    else:
        yield Finding("memory", "ok", found)


def check_threads(system: System) -> Iterator[Finding]:
    """How many threads PyTorch runs an op on, and whether settings bind threads to cores against ours."""
    usable, environ = len(system.usable_cores()), system.environ
    threads = int(system.import_torch().get_num_threads())
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    found = f"PyTorch runs an op on {threads} of {usable} cores; " + _settings(system, names)
    binding = [name for name in BINDING if name in environ]
    if binding:
        found += f", {_settings(system, binding)}"
        remedy = f"unset {' and '.join(binding)}: rlplace pins the threads of each device itself"
        yield Finding("threads", "warn", found, remedy)
    elif threads > usable:
        yield Finding("threads", "warn", found, f"set OMP_NUM_THREADS to {usable} or unset it: threads share cores")
    else:
        yield Finding("threads", "ok", found)


def check_wait_policy(system: System) -> Iterator[Finding]:
    """How OpenMP's threads wait between ops."""
    policy, spins = (system.environ.get(name, "").strip() for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"))
    found = _settings(system, ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"))
    if spins == "0" or (not spins and policy.lower() == "passive"):
        remedy = "unset them: threads sleep between ops, which slows eager PyTorch and gangs in the same table"
        yield Finding("wait policy", "warn", found, remedy)
    else:
        length = "briefly" if spins == str(SPIN_COUNT) else "between ops"
        yield Finding("wait policy", "ok", f"{found}: OpenMP's threads spin {length}")


def check_malloc(system: System) -> Iterator[Finding]:
    """Whether freed memory can be kept between steps."""
    preloaded = system.environ.get("LD_PRELOAD", "")
    other = next((name for name in ALLOCATORS if name in preloaded), "")
    libc = system.glibc_version()
    if other:
        yield Finding("malloc", "ok", f"{other} is preloaded: glibc's thresholds, which measuring raises, do not count")
    elif libc:
        yield Finding("malloc", "ok", f"{libc}: measuring raises its thresholds, so that freed memory is kept")
    else:
        remedy = "preload an allocator that keeps freed memory, or use a system with glibc"
        yield Finding(
            "malloc", "warn", "not glibc: freed memory goes back to the kernel, which slows large ops", remedy
        )


def _settings(system: System, names: Sequence[str]) -> str:
    return ", ".join(f"{name} {system.environ.get(name, 'not set')}" for name in names)
