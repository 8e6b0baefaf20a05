"""The ten checks, in the order in which they are shown: packages, GPUs, the CPU and its limits, timing, machines."""

from __future__ import annotations

import re
import warnings
from itertools import combinations, permutations
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rlplace.doctor.machines import MACHINES
from rlplace.doctor.system import Check, Finding, System, first_of
from rlplace.measure.hosts.control_groups import cpu_quota, memory_limit_bytes
from rlplace.measure.hosts.nodes import under_torchrun
from rlplace.say import counted, format_bytes, format_seconds

ELSEWHERE = {"torch", "wandb"}
"""Required packages that `packages` leaves out: PyTorch has a check of its own, and `--track` says what it misses."""
_REQUIREMENT = re.compile(r"^([\w.-]+)\s*(?:[<>=!~\d.,\s]*>=\s*([\d.]+))?[^;]*$")
"""A line of `Requires-Dist` that holds for every installation: the package and its lowest version."""


def check_packages(system: System) -> Finding:
    """Whether every required package is there and new enough."""
    needed = {package: least for package, least in required(system).items() if package not in ELSEWHERE}
    if not needed:
        remedy = f"pip install -e {Path(__file__).parents[2]}"
        return Finding("packages", "warn", "what rlplace requires is unknown: it is not installed as a package", remedy)
    versions = {package: version_of(system, package) for package in needed}
    wrong = {package: least for package, least in needed.items() if not is_met(least, versions[package])}
    told = ", ".join(f"{as_pip(*each)} is {versions[each[0]] or 'not installed'}" for each in wrong.items())
    remedy = f"pip install {' '.join(repr(as_pip(*each)) for each in wrong.items())}"
    return first_of(
        "packages", told or f"{len(needed)} required packages, all new enough", (bool(wrong), "fail", remedy)
    )


def check_torch(system: System) -> Finding:
    """Whether PyTorch can be imported and is new enough, and for which accelerator it was built."""
    wanted = required(system).get("torch", "")
    try:
        system.current_folder()
    except OSError:
        found = "not imported: the current folder has been removed, and there MKL ends the process"
        return Finding("torch", "fail", found, "change to a folder that exists")
    install = f"pip install {as_pip('torch', wanted)!r}"
    try:
        torch = system.import_torch()
    except (ImportError, OSError) as error:
        return Finding("torch", "fail", f"cannot be imported: {' '.join(str(error).split())}", install)
    is_old = not is_met(wanted, str(torch.__version__))
    found = f"{torch.__version__}, {torch_build(torch)}"
    needs = f"; rlplace needs {as_pip('torch', wanted)}" if is_old else ""
    return first_of("torch", found + needs, (is_old, "fail", install))


def torch_build(torch: Any) -> str:
    """The accelerator that a PyTorch was built for, such as `CUDA 12.8 build`."""
    versions = {"CUDA": torch.version.cuda, "ROCm": getattr(torch.version, "hip", None)}
    return next((f"{name} {version} build" for name, version in versions.items() if version), "CPU build")


def required(system: System) -> dict[str, str]:
    """The lowest version of each package that is always required; nothing where rlplace is not installed."""
    installed = system.installed("rlplace")
    lines = (installed.requires or []) if installed else []
    return {package: least for line in lines for package, least in _REQUIREMENT.findall(line)}


def version_of(system: System, package: str) -> str:
    """Version of an installed package; empty where it is not installed."""
    installed = system.installed(package)
    return installed.version if installed else ""


def as_pip(package: str, least: str) -> str:
    """A requirement as pip takes it."""
    return f"{package}>={least}" if least else package


def is_met(least: str, version: str) -> bool:
    """Whether a version is at least `least`; an empty one, of a package that is not installed, never is.

    >>> is_met("2.9", "2.10.0+cu128"), is_met("2.10", "2.10.dev1"), is_met("1.0", "")
    (True, True, False)
    """
    return version != "" and release(version) >= release(least)


def release(version: str) -> tuple[int, ...]:
    """The numbers that a version starts with, zeros at the end left out.

    >>> release("2.13.0+cpu"), release("2.10.dev1")
    ((2, 13), (2, 10))
    """
    numbers = re.sub(r"(\.0+)*\.?([^\d.].*)?$", "", version)
    return tuple(int(number) for number in numbers.split(".") if number)


GET_TORCH = "install the PyTorch build for your GPUs: https://pytorch.org/get-started/locally"
MOST_ROUTES = 4
"""Routes between GPUs that are named."""


def check_gpus(system: System) -> list[Finding]:
    """Whether there are GPUs that PyTorch can use; then one finding a GPU, and one of their pairs."""
    torch, driver = system.import_torch(), driver_version(system)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return [_without_gpus(torch, driver, [str(warning.message) for warning in caught], system)]
    found = f"{counted(count, 'GPU')}, {torch_build(torch)}, {f'driver {driver}' if driver else 'driver unknown'}"
    findings = [Finding("cuda", "ok", found), *(_look_at_gpu(torch, index) for index in range(count))]
    return [*findings, _look_at_pairs(torch, count)] if count > 1 else findings


def driver_version(system: System) -> str:
    """Version of NVIDIA's kernel driver; empty where there is none or it cannot be told."""
    match = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", system.read("proc/driver/nvidia/version"))
    return match[1] if match else ""


def _without_gpus(torch: Any, driver: str, said: list[str], system: System) -> Finding:
    if not driver and not said:
        return Finding("cuda", "ok", f"no GPU ({torch_build(torch)}): the CPU's cores serve as devices")
    found = f"driver {driver or 'unknown'}, but PyTorch ({torch_build(torch)}) sees no GPU"
    visible = system.environ.get("CUDA_VISIBLE_DEVICES")
    return first_of(
        "cuda",
        ": ".join([found, *(" ".join(line.split()) for line in said[:1])]),
        (not torch.version.cuda, "warn", GET_TORCH),
        (visible is not None, "warn", f"CUDA_VISIBLE_DEVICES is {visible!r}: unset it, unless you mean to hide them"),
        (True, "warn", f"update the driver to one for CUDA {torch.version.cuda}, or {GET_TORCH}"),
    )


def _look_at_gpu(torch: Any, index: int) -> Finding:
    facts, architectures = torch.cuda.get_device_properties(index), torch.cuda.get_arch_list()
    is_unfit = torch.version.cuda and not any(runs_on(each, facts.major, facts.minor) for each in architectures)
    found = f"{facts.name}, {format_bytes(facts.total_memory)}, compute capability {facts.major}.{facts.minor}"
    found += f"; this PyTorch has kernels for {', '.join(architectures)} only" if is_unfit else ""
    return first_of(f"cuda:{index}", found, (bool(is_unfit), "fail", GET_TORCH))


def runs_on(architecture: str, major: int, minor: int) -> bool:
    """Whether kernels for `architecture` run on a GPU of that compute capability.

    Machine code (`sm_86`) runs on the same major version from its minor version on, PTX (`compute_80`) on everything
    newer (CUDA C++ Programming Guide, "Application Compatibility"); a device whose capability ends with a letter, on
    its own version alone.

    >>> [runs_on(each, 8, 9) for each in ("sm_86", "sm_90", "compute_80", "sm_90a")]
    [True, False, True, False]
    """
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", architecture)
    if match is None:
        return False
    built_for, is_alone = (int(match[2]), int(match[3])), bool(match[4])
    is_older = built_for <= (major, minor) and (match[1] == "compute" or built_for[0] == major)
    return built_for == (major, minor) if is_alone else is_older


def _look_at_pairs(torch: Any, count: int) -> Finding:
    routes = list(permutations(range(count), 2))
    apart = [
        f"cuda:{one} to cuda:{other}" for one, other in routes if not torch.cuda.can_device_access_peer(one, other)
    ]
    if not apart:
        return Finding("peer access", "ok", f"between all of {count} GPUs")
    more = f" and {len(apart) - MOST_ROUTES} more" if len(apart) > MOST_ROUTES else ""
    names = f"{', '.join(apart[:MOST_ROUTES])}{more}"
    found = f"not for {len(apart)} of {len(routes)} routes ({names}): their copies go through host memory"
    return Finding("peer access", "warn", found, "see `nvidia-smi topo -p2p r`; IOMMU and ACS settings can turn it off")


BUSY = 0.25
"""Share of the machine's cores in use from which on measured figures move visibly."""
LEAST_FREE_BYTES = 2 << 30
BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_THREAD_LIMIT")
"""Settings that work against threads pinned to the cores of their device."""


def check_cores(system: System) -> Finding:
    """How many cores this process may use, and for how much of the time."""
    usable, cores, quota = len(system.usable_cores()), system.num_cores() or 0, cpu_quota(system.root)
    is_capped = quota is not None and quota < usable
    limit = f"; a control group allows the time of {quota:g}" if is_capped else ""
    return first_of(
        "cores",
        f"{usable} of {cores or 'an unknown number of'} logical cores may be used{limit}",
        (is_capped, "warn", f"raise the container's CPU limit: a host has {max(int(quota or 0), 1)} of the cores"),
        (
            usable < 2 and not under_torchrun(),
            "warn",
            "without GPUs there is one device, and nothing to place: allow more cores",
        ),
    )


def check_hyper_threads(system: System) -> Finding:
    """Whether devices would be hyper-threads of the same core."""
    from rlplace.measure.hosts.detect import MAX_CORE_DEVICES

    usable = list(system.usable_cores())
    siblings = {core: _siblings(system, core) for core in usable}
    if not all(siblings.values()):
        return Finding("hyper-threads", "ok", "not told by this system")
    separate = sorted({min(found & set(usable)) for found in siblings.values()})
    devices = usable[:MAX_CORE_DEVICES]
    shared = [f"{one} and {other}" for one, other in combinations(devices, 2) if other in siblings[one]]
    can_be_apart = bool(shared) and len(separate) > 1
    words = "logical core is one" if len(usable) == 1 else "logical cores are"
    pairs = f"; devices share one: {', '.join(shared)}" if can_be_apart else ""
    remedy = f"run `taskset -c {','.join(map(str, separate))} rlplace ...`, so that each device has its own"
    return first_of(
        "hyper-threads",
        f"the {len(usable)} {words} of {len(separate)} physical ones{pairs}",
        (can_be_apart, "warn", remedy),
        (bool(shared), "warn", "devices share it: expect little of placing over them"),
    )


def _siblings(system: System, core: int) -> set[int]:
    """Logical cores of the same physical core, itself included; none where the system does not tell."""
    told = system.read(f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    spans = (part.partition("-") for part in told.split(",") if part)
    return {each for first, _, last in spans for each in range(int(first), int(last or first) + 1)}


def check_load(system: System) -> Finding:
    """Whether others keep the machine busy."""
    told, cores = system.read("proc/loadavg").split(), system.num_cores() or 1
    if not told:
        return Finding("load", "ok", "not told by this system")
    load, remedy = float(told[0]), "measure on an idle machine: beside other work, measured ratios move by 30 to 60 %"
    return first_of("load", f"{load:.2f} on {cores} cores over the last minute", (load > BUSY * cores, "warn", remedy))


def check_memory(system: System) -> Finding:
    """How much memory there is, how much is left, and whether a control group allows less."""
    told = dict(re.findall(r"^(\w+):\s+(\d+) kB$", system.read("proc/meminfo"), flags=re.MULTILINE))
    if "MemTotal" not in told or "MemAvailable" not in told:
        return Finding("memory", "ok", "not told by this system")
    total_bytes, available_bytes = (int(told[name]) * 1024 for name in ("MemTotal", "MemAvailable"))
    limit_bytes = memory_limit_bytes(system.root) or total_bytes
    is_limited = limit_bytes < total_bytes
    limit = f"; a control group allows {format_bytes(limit_bytes)}" if is_limited else ""
    remedy = "raise the limit for larger models: the memory of a host's cores is this much"
    return first_of(
        "memory",
        f"{format_bytes(available_bytes)} available of {format_bytes(total_bytes)}{limit}",
        (is_limited, "warn", remedy),
        (available_bytes < LEAST_FREE_BYTES, "warn", "end what you do not need: a large model will not fit"),
    )


def check_threads(system: System) -> Finding:
    """How many threads run an op, whether settings bind them to cores against ours, and how they wait between ops."""
    usable, threads = len(system.usable_cores()), int(system.import_torch().get_num_threads())
    binding = [name for name in BINDING if name in system.environ]
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", *binding)
    policy, spins = (system.environ.get(name, "").strip() for name in names[2:4])
    is_asleep = spins == "0" or (not spins and policy.lower() == "passive")
    told = ", ".join(f"{name} {system.environ.get(name, 'not set')}" for name in names)
    asleep = "unset OMP_WAIT_POLICY and GOMP_SPINCOUNT: threads sleep between ops, so eager PyTorch and gangs are slow"
    return first_of(
        "threads",
        f"PyTorch runs an op on {threads} of {usable} cores; {told}",
        (bool(binding), "warn", f"unset {' and '.join(binding)}: rlplace pins the threads of each device itself"),
        (threads > usable, "warn", f"set OMP_NUM_THREADS to {usable} or unset it: threads share cores"),
        (is_asleep, "warn", asleep),
    )


WIDEST_SPREAD = 0.15
"""Between the 10th and the 90th percentile of the times of the same work, as a share of their median."""
MOST_LOST = 0.1
"""Share of all time beyond a median for each sample: the time of interruptions."""


def check_timing(system: System) -> Finding:
    """Whether the same small work takes the same time again and again."""
    times_s = system.op_times_s(system.import_torch())
    middle_s, deciles_s = median(times_s), quantiles(times_s, n=10, method="inclusive")
    spread, lost = (deciles_s[-1] - deciles_s[0]) / middle_s, max(1 - middle_s * len(times_s) / sum(times_s), 0.0)
    found = (
        f"the same work takes {format_seconds(middle_s)}, 80 % of times within {spread:.0%}; "
        f"{lost:.0%} of the time was lost to interruptions"
    )
    remedy = "end other work, and keep the CPU's frequency fixed, before measuring"
    return first_of("timing", found, (spread > WIDEST_SPREAD or lost > MOST_LOST, "warn", remedy))


CHECKS: tuple[Check, ...] = (
    Check("packages", check_packages),
    Check("torch", check_torch),
    Check("cuda", check_gpus, needs="torch"),
    Check("cores", check_cores),
    Check("hyper-threads", check_hyper_threads, needs="torch"),
    Check("load", check_load),
    Check("memory", check_memory),
    Check("threads", check_threads, needs="torch"),
    Check("timing", check_timing, needs="torch"),
    MACHINES,
)
