"""`Device`, `Link`, `Route`, `Host`: the places that run ops and the ways between them."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Literal

from rlplace.errors import InvalidValue, UnknownName
from rlplace.say import counted

Backend = Literal["cpu", "cuda", "simulated"]
DispatchOrder = Literal["plan", "request"]

_LONGEST_NAME = 1000
_MOST_CORES, _MOST_LINKS = 4096, 64
"""Of a machine, and of a route: every core of a device is a thread, every link of a route a wait."""


DTYPES = frozenset(
    {
        "bfloat16",
        "bool",
        "complex128",
        "complex32",
        "complex64",
        "float16",
        "float32",
        "float4_e2m1fn_x2",
        "float64",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "int16",
        "int32",
        "int64",
        "int8",
        "uint16",
        "uint32",
        "uint64",
        "uint8",
    }
)
"""Names of PyTorch's dtypes, as graphs have them."""


@dataclass(frozen=True)
class Device:
    """A place that runs one op at a time."""

    name: str
    """Unique on its host, e.g. `cpu:0`, `cuda:1`."""
    kind: str
    """Devices of one kind share op costs, e.g. `cpu-core`, `Tesla V100-SXM2-16GB`."""
    backend: Backend
    """What runs it; `simulated` runs nowhere."""
    memory_bytes: int
    """Capacity for one step's tensors; a peak above it is `oom`."""
    memory_pool: str = ""
    """Devices with the same non-empty pool share one memory of `memory_bytes` (cores share one RAM)."""
    memory_granularity_bytes: int = 1
    """Every allocation is rounded up to a multiple of this."""
    context_bytes: int = 0
    """Held from the start, whatever the placement."""
    dispatcher: str = ""
    """Devices with the same dispatcher share one launcher (a thread, an interpreter lock); `""` costs nothing."""
    peak_flops_per_s: dict[str, float] = field(default_factory=dict)
    """Peak FLOP/s by dtype name (`float32`, `bfloat16`, ...), for estimated costs."""
    memory_bandwidth_bytes_per_s: float = 0.0
    """Peak memory bandwidth, for estimated costs."""
    launch_s: float = 0.0
    """Shortest time that an op takes on the device, for estimated costs."""
    cores: tuple[int, ...] = ()
    """CPU cores that the device's thread is pinned to; on the CPU also how many threads an op has, one a core."""
    members: tuple[str, ...] = ()
    """A gang: names of the devices that are busy whenever this one runs an op."""

    def __post_init__(self) -> None:
        where = f"device {self.name!r}"
        if not self.name:
            raise InvalidValue("name", self.name, "a non-empty name", where="device")
        for name in ("name", "kind", "memory_pool", "dispatcher"):
            _check_printable(name, getattr(self, name), where)
        if self.memory_bytes <= 0:
            raise InvalidValue("memory_bytes", self.memory_bytes, "more than 0", where=where)
        if self.memory_granularity_bytes < 1:
            raise InvalidValue("memory_granularity_bytes", self.memory_granularity_bytes, "at least 1", where=where)
        for name in ("context_bytes", "memory_bandwidth_bytes_per_s", "launch_s"):
            _check_not_negative(name, getattr(self, name), where)
        if not len(set(self.cores)) == len(self.cores) <= _MOST_CORES or min(self.cores, default=0) < 0:
            cores = f"{len(self.cores)} of them, {min(self.cores)}..{max(self.cores)}"
            raise InvalidValue("cores", cores, f"at most {_MOST_CORES} different cores, numbered from 0", where=where)
        for dtype, rate in self.peak_flops_per_s.items():
            if dtype not in DTYPES:
                raise UnknownName("dtype", dtype, DTYPES, hint=f"Found in `peak_flops_per_s` of {where}.")
            _check_not_negative(f"peak_flops_per_s[{dtype!r}]", rate, where)


@dataclass(frozen=True)
class Link:
    """One direction of a wire or bus; a half-duplex medium is one link on both routes."""

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        where = f"link {self.name!r}"
        _check_printable("name", self.name, where)
        if not (self.bandwidth_bytes_per_s > 0):
            raise InvalidValue("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, "more than 0", where=where)
        _check_not_negative("latency_s", self.latency_s, where)


@dataclass(frozen=True)
class Route:
    """The links that a transfer from `source` to `destination` holds, all at once, for its whole duration.

    It takes `latency_s + bytes / bandwidth_bytes_per_s` with the largest latency and the least bandwidth of its links.
    A route without links is a hand-over: both devices see the same memory (a gang and its member), nothing is copied
    and no time passes; the tensor stays on the source's account until its readers at the destination are done.
    """

    source: str
    destination: str
    links: tuple[str, ...]
    blocks_source: bool = False
    """The source device runs no op during a transfer (a plain copy between GPUs synchronises both)."""
    blocks_destination: bool = False
    """The destination device runs no op during a transfer (a CPU core makes the copy itself)."""


@dataclass(frozen=True)
class Host:
    """Devices, links and routes; immutable, with a fingerprint."""

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    routes: tuple[Route, ...] = ()
    dispatch_s: float = 0.0
    """Seconds a dispatcher takes to launch one op."""
    copy_dispatch_s: float = 0.0
    """Seconds a dispatcher takes to launch one transfer (the destination's dispatcher does)."""
    dispatch_order: DispatchOrder = "plan"
    """`plan`: a dispatcher is one thread that launches in plan order; `request`: a lock that each device's thread takes
    for a launch, in order of request (ties by device index)."""
    run_ahead: int = 1024
    """An op's launch begins only when the op this many places before it in its device's order has ended; 1 launches
    on an idle device only (a CPU core launches what it runs)."""
    corun_slowdown: tuple[tuple[float, ...], ...] = ()
    """(D, D): an op on device d progresses at rate 1 / (1 + sum of `corun_slowdown[d][e]` over busy devices e). Parts
    of one GPU have a prior of 1 here, the rest is 0 until a calibration has fitted it."""
    sources: dict[str, str] = field(default_factory=dict)
    """Where each figure of a preset comes from."""

    def __post_init__(self) -> None:
        where = f"host {self.name!r}"
        _check_printable("name", self.name, where)
        if not self.devices:
            raise InvalidValue("devices", 0, "at least one device", where=where)
        names = [device.name for device in self.devices]
        if len(set(names)) != len(names):
            raise InvalidValue("devices", names, "unique names", where=where)
        links = {link.name for link in self.links}
        if len(links) != len(self.links):
            raise InvalidValue("links", [link.name for link in self.links], "unique names", where=where)
        for name in ("dispatch_s", "copy_dispatch_s"):
            _check_not_negative(name, getattr(self, name), where)
        if self.run_ahead < 1:
            raise InvalidValue("run_ahead", self.run_ahead, "at least 1", where=where)
        self._check_routes(names, links, where)
        if self.corun_slowdown:
            rows = self.corun_slowdown
            if len(rows) != len(names) or any(len(row) != len(names) for row in rows):
                raise InvalidValue("corun_slowdown", rows, f"{len(names)} rows of {len(names)} numbers", where=where)
            for value in (value for row in rows for value in row):
                _check_not_negative("corun_slowdown", value, where)

    def __repr__(self) -> str:
        """In one line: what there is of each kind, and how it is wired."""
        kinds = Counter(device.kind for device in self.devices)
        of = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
        simulated = ", simulated" if self.is_simulated else ""
        return f"Host({self.name}: {of}; {counted(len(self.links), 'link')}{simulated})"

    @staticmethod
    def detect(
        kind: Literal["auto", "cores", "cuda"] = "auto",
        *,
        gangs: bool = False,
        num_parts: int = 1,
        with_cpu: bool = False,
    ) -> Host:
        """This machine: every CUDA GPU, or (`cores`, or where there is no GPU) each CPU core; see `detect_host`."""
        from rlplace.measure.hosts.detect import detect_host

        return detect_host(kind, gangs=gangs, num_parts=num_parts, with_cpu=with_cpu)

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def is_simulated(self) -> bool:
        """Whether any device cannot run ops here."""
        return any(device.backend == "simulated" for device in self.devices)

    @cached_property
    def device_index(self) -> dict[str, int]:
        """Device name to index."""
        return {device.name: index for index, device in enumerate(self.devices)}

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits over devices (name, kind, backend, cores, gangs) and routes; measured figures do not enter."""
        facts = {
            "devices": [[d.name, d.kind, d.backend, list(d.cores), list(d.members)] for d in self.devices],
            "routes": [[r.source, r.destination, list(r.links)] for r in self.routes],
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def device(self, name: str) -> Device:
        """The device called `name`.

        Raises:
            UnknownName: no device has that name.
        """
        if name not in self.device_index:
            raise UnknownName("device", name, self.device_index)
        return self.devices[self.device_index[name]]

    def to_dict(self) -> dict[str, object]:
        """The host as plain data, as host files and run folders keep it."""
        return asdict(self)

    def _check_routes(self, names: list[str], links: set[str], where: str) -> None:
        known, pairs = set(names), set[tuple[str, str]]()
        for route in self.routes:
            for end in (route.source, route.destination):
                if end not in known:
                    raise UnknownName("device", end, names)
            if len(route.links) > _MOST_LINKS:
                raise InvalidValue("links", f"{len(route.links)} on one route", f"at most {_MOST_LINKS}", where=where)
            for link in route.links:
                if link not in links:
                    raise UnknownName("link", link, links)
            pairs.add((route.source, route.destination))
        if len(pairs) != len(self.routes):
            raise InvalidValue("routes", "two routes for one pair of devices", "one route a pair", where=where)
        for source in names:
            for destination in names:
                if source != destination and (source, destination) not in pairs:
                    raise InvalidValue(
                        "routes",
                        f"nothing from {source!r} to {destination!r}",
                        "a route for every ordered pair of devices",
                        where=where,
                    )


def _check_not_negative(name: str, value: float, where: str) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise InvalidValue(name, value, "a finite number >= 0", where=where)


def _check_printable(field: str, name: str, where: str) -> None:
    """Names are shown in terminals and written into programs: a stranger's host file may hold any letters."""
    if not name.isprintable() or len(name) > _LONGEST_NAME:
        raise InvalidValue(field, name, f"at most {_LONGEST_NAME} letters, all of them printable", where=where)
