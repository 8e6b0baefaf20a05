"""All checks, in the order in which they are shown: the installed packages, GPUs, the CPU and its limits, places to
write, time, and wandb."""

from __future__ import annotations

import json
import netrc
import platform
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import Distribution
from itertools import combinations, pairwise, permutations
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.parse import unquote, urlsplit

from rlplace import __version__
from rlplace.doctor.machines import MACHINES
from rlplace.doctor.system import Check, Finding, System, first_of
from rlplace.measure.hosts.control_groups import cpu_quota, memory_limit_bytes
from rlplace.measure.hosts.nodes import under_torchrun
from rlplace.process_settings import SPIN_COUNT
from rlplace.say import counted, format_bytes, format_seconds

EXTRAS = {
    "zoo": ("transformers", "models from transformers"),
    "onnx": ("onnx", "ONNX files"),
    "metis": ("pymetis", "METIS, as a method and as a grouping"),
    "exact": ("ortools", "exact solvers"),
}
"""Each extra: the module that it brings, and its purpose."""
SCOTCH_PROGRAMS = ("gmap", "scotch_gmap")
"""As `search.rules.baselines` looks for; importing that would import all of search."""
OWN_ROWS = {"torch", "wandb"}
"""Required packages with a check of their own."""


def check_python(system: System) -> Finding:
    """Whether this Python will do."""
    installed = system.installed(PACKAGE)
    wanted = installed.metadata["Requires-Python"] or "" if installed else ""
    is_old = release(system.python_version) < release(wanted.removeprefix(">="))
    found = f"{platform.python_implementation()} {system.python_version}, {sys.executable}"
    needs = f"; rlplace needs {wanted}" if is_old else ""
    return first_of("python", found + needs, (is_old, "fail", f"install Python {wanted}"))


def check_rlplace(system: System) -> Finding:
    """Whether the installed rlplace is the one that runs."""
    running, again = f"{__version__} in {system.package}", f"pip install -e {system.package.parent}"
    installed = system.installed(PACKAGE)
    if installed is None:
        return Finding("rlplace", "warn", f"{running}, which is not installed: what it requires is unknown", again)
    home, is_other = installed_folder(installed), installed.version != __version__
    if home.resolve() != system.package.resolve():
        remedy = "leave it if you meant to; else see PYTHONPATH, or install the one that runs"
        return Finding("rlplace", "warn", f"{running}; installed is {installed.version} in {home}", remedy)
    found = f"{running}, installed as {installed.version}" if is_other else running
    return first_of("rlplace", found, (is_other, "warn", f"install it again: {again}"))


def installed_folder(installed: Distribution) -> Path:
    """Where the package lies: its source tree, if it was installed as editable."""
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        return Path(unquote(urlsplit(origin["url"]).path)) / PACKAGE
    return Path(str(installed.locate_file(PACKAGE)))


def check_packages(system: System) -> Finding:
    """Whether every required package is there and new enough."""
    needed = [each for each in requirements(system) if not each.extra and each.package not in OWN_ROWS]
    if not needed:
        return Finding("packages", "warn", "what rlplace requires is unknown: it is not installed as a package")
    wrong = [each for each in needed if not each.is_met_by(system.version_of(each.package))]
    told = ", ".join(f"{each.words} is {system.version_of(each.package) or 'not installed'}" for each in wrong)
    found = told or f"{len(needed)} required packages, all new enough"
    return first_of("packages", found, (bool(wrong), "fail", f"pip install {_quoted(wrong)}"))


def check_torch(system: System) -> Finding:
    """Whether PyTorch can be imported and is new enough, and for which accelerator it was built."""
    wanted = requirement_of(system, "torch")
    try:
        system.current_folder()
    except OSError:
        found = "not imported: the current folder has been removed, and there MKL ends the process"
        return Finding("torch", "fail", found, "change to a folder that exists")
    try:
        torch = system.import_torch()
    except (ImportError, OSError) as error:
        found = f"cannot be imported: {' '.join(str(error).split())}"
        return Finding("torch", "fail", found, f"pip install {_quoted([wanted])}")
    is_old = not wanted.is_met_by(str(torch.__version__))
    found = f"{torch.__version__}, {torch_build(torch)}" + (f"; rlplace needs {wanted.words}" if is_old else "")
    return first_of("torch", found, (is_old, "fail", f"pip install {_quoted([wanted])}"))


def torch_build(torch: Any) -> str:
    """The accelerator that a PyTorch was built for, such as `CUDA 12.8 build`."""
    versions = {"CUDA": torch.version.cuda, "ROCm": getattr(torch.version, "hip", None)}
    return next((f"{name} {version} build" for name, version in versions.items() if version), "CPU build")


def check_extras(system: System) -> Iterator[Finding]:
    """Which optional packages and programs are there."""
    for extra, (module, what) in EXTRAS.items():
        wanted, version = requirement_of(system, module), system.version_of(module)
        install = f"pip install 'rlplace[{extra}]'"
        if not system.has_module(module):
            yield Finding(extra, "ok", f"{module} is not installed", f"{install}, for {what}")
        elif version and not wanted.is_met_by(version):
            yield Finding(extra, "warn", f"{module} {version}; rlplace needs {wanted.words}", install)
        else:
            yield Finding(extra, "ok", f"{module} {version}".rstrip())
    path = next(filter(None, map(system.find_program, SCOTCH_PROGRAMS)), "")
    remedy = "" if path else "apt install scotch, for the method scotch"
    yield Finding("scotch", "ok", path or "no program gmap", remedy)


def _quoted(wanted: Iterable[Requirement]) -> str:
    return " ".join(f"'{each.words}'" for each in wanted)


PACKAGE = "rlplace"

_REQUIREMENT = re.compile(r"^([\w.-]+)\s*(?:>=\s*([\d.]+))?\s*(?:;\s*extra\s*==\s*['\"](\w+))?")
"""A line of `Requires-Dist`: the package, its lowest version and its extra; all that our own lines say."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package that is needed, always or for one extra."""

    package: str
    least: str = ""
    """lowest version that will do; empty: any"""
    extra: str = ""
    """the extra that it belongs to; empty: always needed"""

    @property
    def words(self) -> str:
        """As pip takes it."""
        return f"{self.package}>={self.least}" if self.least else self.package

    def is_met_by(self, version: str) -> bool:
        """Whether that version will do; an empty one, of a package that is not installed, will not.

        >>> Requirement("torch", "2.9").is_met_by("2.10.0+cu128")
        True
        """
        return version != "" and release(version) >= release(self.least)


def release(version: str) -> tuple[int, ...]:
    """The numbers that a version starts with, zeros at the end left out.

    >>> release("2.13.0+cpu"), release("2.10.dev1")
    ((2, 13), (2, 10))
    """
    numbers = re.sub(r"(\.0+)*\.?([^\d.].*)?$", "", version)
    return tuple(int(number) for number in numbers.split(".") if number)


def requirements(system: System) -> list[Requirement]:
    """All requirements of the installed package; none where it is not installed."""
    installed = system.installed(PACKAGE)
    lines = installed.requires or [] if installed else []
    return [Requirement(*found) for line in lines for found in _REQUIREMENT.findall(line)]


def requirement_of(system: System, package: str) -> Requirement:
    """The requirement of one package; any version where none is known."""
    return next((each for each in requirements(system) if each.package == package), Requirement(package))


LEAST_FREE_DISK_BYTES = 1 << 30


def check_disk(system: System) -> Finding:
    """Whether a run can be written into the current folder."""
    try:
        folder = Path(system.current_folder())
    except OSError:
        return Finding("disk", "fail", "the current folder has been removed", "change to a folder that exists")
    free_bytes, is_writable = system.free_bytes(folder), system.is_writable(folder)
    return first_of(
        "disk",
        f"{format_bytes(free_bytes)} free in {folder}" if is_writable else f"{folder} cannot be written to",
        (not is_writable, "fail", "change to another folder, or name one with --run"),
        (
            free_bytes < LEAST_FREE_DISK_BYTES,
            "warn",
            f"free some: a run should have {format_bytes(LEAST_FREE_BYTES)}",
        ),
    )


def check_numba(system: System) -> Finding:
    """Whether kernels are compiled, and kept once they are."""
    wanted, version = requirement_of(system, "numba"), system.version_of("numba")
    if not version:
        return Finding("numba", "fail", "not installed: the simulator needs it", f"pip install '{wanted.words}'")
    if system.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        found = f"{version}; NUMBA_DISABLE_JIT is set: kernels are not compiled"
        return Finding("numba", "fail", found, "unset NUMBA_DISABLE_JIT: the simulator cannot run without")
    folder = next((folder for folder in _cache_folders(system) if _can_be_made(system, folder)), None)
    kept = "; nowhere to keep compiled kernels" if folder is None else f", its kernels are kept in {folder}"
    found = f"{version}; the simulator runs on {len(system.usable_cores())} threads{kept}"
    return first_of("numba", found, (folder is None, "fail", "set NUMBA_CACHE_DIR to a folder that can be written to"))


def _cache_folders(system: System) -> list[Path]:
    """Where numba tries to keep kernels, in its order (`numba.core.caching`)."""
    asked = system.environ.get("NUMBA_CACHE_DIR")
    caches = Path(system.environ.get("XDG_CACHE_HOME") or system.home() / ".cache")
    return [*([Path(asked)] if asked else []), system.package / "__pycache__", caches / "numba"]


def _can_be_made(system: System, folder: Path) -> bool:
    """Whether the folder can be written to, or made where it is not there yet."""
    nearest = next((path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()), None)
    return nearest is not None and nearest.is_dir() and system.is_writable(nearest)


SLOWEST_CALL_S = 1e-6
NUM_CALLS = 2000
WIDEST_SPREAD = 0.15
MOST_LOST = 0.1


@dataclass(frozen=True, slots=True)
class Steadiness:
    """How much times of the same work differ."""

    median_s: float
    spread: float
    """between the 10th and the 90th percentile, as a share of the median"""
    lost: float
    """share of all time beyond a median for each sample: the time of interruptions"""

    @property
    def is_steady(self) -> bool:
        """Whether figures measured now would be worth much."""
        return self.spread <= WIDEST_SPREAD and self.lost <= MOST_LOST


def steadiness(times_s: Sequence[float]) -> Steadiness:
    """How steady these times are.

    Args:
        times_s: two or more, of the same work.

    >>> steadiness([1.0, 1.0, 1.0, 5.0]).lost
    0.5
    """
    middle_s, deciles_s = median(times_s), quantiles(times_s, n=10, method="inclusive")
    lost = 1 - middle_s * len(times_s) / sum(times_s)
    return Steadiness(middle_s, (deciles_s[-1] - deciles_s[0]) / middle_s, max(lost, 0.0))


def check_clock(system: System) -> Finding:
    """How fine the clock is: the cost of reading it, and its smallest step."""
    readings_s = [system.now_s() for _ in range(NUM_CALLS)]
    call_s = (readings_s[-1] - readings_s[0]) / (NUM_CALLS - 1)
    steps_s = [after_s - before_s for before_s, after_s in pairwise(readings_s) if after_s > before_s]
    source = system.read("sys/devices/system/clocksource/clocksource0/current_clocksource")
    told = [f"steps of {format_seconds(min(steps_s))}"] if steps_s else []
    told += [f"a reading takes {format_seconds(call_s)}", *([f"source {source}"] if source else [])]
    is_coarse = not steps_s or max(call_s, min(steps_s)) > SLOWEST_CALL_S
    remedy = "short ops cannot be timed well: on Linux, see whether the clock source tsc is available"
    return first_of("clock", ", ".join(told), (is_coarse, "warn", remedy))


def check_timing(system: System) -> Finding:
    """Whether the same small work takes the same time again and again."""
    steady = steadiness(system.op_times_s(system.import_torch()))
    found = (
        f"the same work takes {format_seconds(steady.median_s)}, 80 % of times within {steady.spread:.0%}; "
        f"{steady.lost:.0%} of the time was lost to interruptions"
    )
    remedy = "end other work, and keep the CPU's frequency fixed, before measuring"
    return first_of("timing", found, (not steady.is_steady, "warn", remedy))


SERVER = "https://api.wandb.ai"


def check_wandb(system: System) -> Finding:
    """Whether wandb is installed, in which mode, and whether the user is logged in."""
    wanted, version = requirement_of(system, "wandb"), system.version_of("wandb")
    if not wanted.is_met_by(version):
        found = f"{version}; rlplace needs {wanted.words}" if version else "not installed"
        install = f"pip install '{wanted.words}', or leave --track disabled, as it is by default"
        return Finding("wandb", "warn", found, install)
    server = system.environ.get("WANDB_BASE_URL") or SERVER
    found = f"{version}, WANDB_MODE {system.environ.get('WANDB_MODE', 'not set')} (--track decides)"
    if is_logged_in(system, server):
        return Finding("wandb", "ok", f"{found}, logged in to {server}")
    return Finding("wandb", "ok", f"{found}, not logged in", "`wandb login` for --track online; offline needs none")


def is_logged_in(system: System, server: str) -> bool:
    """Whether there is a key for that server: in the environment, or in the file where `wandb login` leaves it."""
    if system.environ.get("WANDB_API_KEY"):
        return True
    named = system.environ.get("NETRC")
    paths = [Path(named)] if named else [system.home() / name for name in (".netrc", "_netrc")]
    for path in paths:
        with suppress(OSError, UnicodeDecodeError, netrc.NetrcParseError):  # its message may hold a key: say nothing
            if netrc.netrc(path).authenticators(urlsplit(server).netloc):
                return True
    return False


BUSY = 0.25
"""Share of the machine's cores in use from which on measured figures move visibly."""
LEAST_FREE_BYTES = 2 << 30
BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_THREAD_LIMIT")
"""Settings that work against threads pinned to the cores of their device."""
ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")


def check_cores(system: System) -> Finding:
    """How many cores this process may use, and for how much of the time."""
    usable, cores, quota = len(system.usable_cores()), system.num_cores() or 0, cpu_quota(system.root)
    model = re.search(r"^model name\s*:\s*(.+)$", system.read("proc/cpuinfo"), flags=re.MULTILINE)
    is_capped = quota is not None and quota < usable
    limit = f"; a control group allows the time of {quota:g}" if is_capped else ""
    return first_of(
        "cores",
        f"{usable} of {cores or 'an unknown number of'} logical cores may be used"
        f"{f', {model[1]}' if model else ''}{limit}",
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
    found = f"{load:.2f} on {cores} cores over the last minute"
    return first_of("load", found, (load > BUSY * cores, "warn", remedy))


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
    """How many threads PyTorch runs an op on, and whether settings bind threads to cores against ours."""
    usable, threads = len(system.usable_cores()), int(system.import_torch().get_num_threads())
    binding = [name for name in BINDING if name in system.environ]
    told = _settings(system, ("OMP_NUM_THREADS", "MKL_NUM_THREADS", *binding))
    return first_of(
        "threads",
        f"PyTorch runs an op on {threads} of {usable} cores; {told}",
        (bool(binding), "warn", f"unset {' and '.join(binding)}: rlplace pins the threads of each device itself"),
        (threads > usable, "warn", f"set OMP_NUM_THREADS to {usable} or unset it: threads share cores"),
    )


def check_wait_policy(system: System) -> Finding:
    """How OpenMP's threads wait between ops."""
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    policy, spins = (system.environ.get(name, "").strip() for name in names)
    is_asleep = spins == "0" or (not spins and policy.lower() == "passive")
    spinning = f": OpenMP's threads spin {'briefly' if spins == str(SPIN_COUNT) else 'between ops'}"
    remedy = "unset them: threads sleep between ops, which slows eager PyTorch and gangs in the same table"
    found = _settings(system, names) + ("" if is_asleep else spinning)
    return first_of("wait policy", found, (is_asleep, "warn", remedy))


def check_malloc(system: System) -> Finding:
    """Whether freed memory can be kept between steps."""
    libc, preloaded = system.glibc_version(), system.environ.get("LD_PRELOAD", "")
    other = next((name for name in ALLOCATORS if name in preloaded), "")
    found = (
        f"{other} is preloaded: glibc's thresholds, which measuring raises, do not count"
        if other
        else f"{libc}: measuring raises its thresholds, so that freed memory is kept"
        if libc
        else "not glibc: freed memory goes back to the kernel, which slows large ops"
    )
    remedy = "preload an allocator that keeps freed memory, or use a system with glibc"
    return first_of("malloc", found, (not other and not libc, "warn", remedy))


def _settings(system: System, names: Sequence[str]) -> str:
    return ", ".join(f"{name} {system.environ.get(name, 'not set')}" for name in names)


GET_TORCH = "install the PyTorch build for your GPUs: https://pytorch.org/get-started/locally"
MOST_PAIRS = 4
"""How many pairs are named."""


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
    pairs = list(permutations(range(count), 2))
    apart = [(one, other) for one, other in pairs if not torch.cuda.can_device_access_peer(one, other)]
    if not apart:
        return Finding("peer access", "ok", f"between all of {count} GPUs")
    names = ", ".join(f"cuda:{one} to cuda:{other}" for one, other in apart[:MOST_PAIRS])
    more = f" and {len(apart) - MOST_PAIRS} more" if len(apart) > MOST_PAIRS else ""
    found = f"not for {len(apart)} of {len(pairs)} routes ({names}{more}): their copies go through host memory"
    return Finding("peer access", "warn", found, "see `nvidia-smi topo -p2p r`; IOMMU and ACS settings can turn it off")


CHECKS: tuple[Check, ...] = (
    Check("python", check_python),
    Check("rlplace", check_rlplace),
    Check("packages", check_packages),
    Check("torch", check_torch),
    Check("cuda", check_gpus, needs="torch"),
    Check("cores", check_cores),
    Check("hyper-threads", check_hyper_threads, needs="torch"),
    Check("load", check_load),
    Check("memory", check_memory),
    Check("threads", check_threads, needs="torch"),
    Check("wait policy", check_wait_policy),
    Check("malloc", check_malloc),
    Check("numba", check_numba),
    Check("disk", check_disk),
    Check("clock", check_clock),
    Check("timing", check_timing, needs="torch"),
    Check("wandb", check_wandb),
    Check("extras", check_extras),
    MACHINES,
)
