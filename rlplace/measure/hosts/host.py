"""`Device`, `Link`, `Route`, `Host`: the places that run ops and the ways between them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, field, replace
from functools import cached_property
from itertools import permutations
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from rlplace.errors import InvalidValue, check_known, refuse_if
from rlplace.records import AtLeastOne, Count, Described, NotNegative, Number, Whole, record
from rlplace.say import counted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Backend = Literal["cpu", "cuda", "simulated"]
DispatchOrder = Literal["plan", "request"]
HostKind = Literal["auto", "cores", "procs", "cuda", "cuda-procs", "nodes"]
"""Kinds of host that this machine can be; `nodes` is all machines on which torchrun runs this command."""


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError("letters that are printable")
    return name


def _rate(value: float) -> float:
    if 0 < value < LEAST_RATE:
        raise ValueError(f"at least {LEAST_RATE:g} where it is not 0")
    return value


LEAST_RATE = 1e-30
"""Of a second: with less, a step of large tensors takes longer than a float can say."""
Rate = Annotated[NotNegative, AfterValidator(_rate)]
LONGEST_S = 1e30
Delay = Annotated[Number, Field(ge=0, le=LONGEST_S)]
"""Of one op or transfer, in seconds."""
Slowdown = Annotated[Number, Field(ge=0, le=1e12)]
"""With more, a step takes longer than a float can say; what a host model learns of it has room below."""
Printable = Annotated[str, Field(max_length=1000), AfterValidator(_printable)]
"""Names are shown in terminals and written into programs: a stranger's host file may hold any letters."""


_DTYPES = """
    bfloat16 bool complex128 complex32 complex64 float16 float32 float4_e2m1fn_x2 float64 float8_e4m3fn
    float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu int16 int32 int64 int8 uint16 uint32 uint64
    uint8
"""
DTYPES = frozenset(_DTYPES.split())
"""Names of PyTorch's dtypes, as graphs have them."""


@record(frozen=True)
class Device:
    """A place that runs one op at a time."""

    name: Annotated[Printable, Field(min_length=1)]
    """Unique on its host, e.g. `cpu:0`, `cuda:1`."""
    kind: Printable
    """Devices of one kind share op costs, e.g. `cpu-core`, `Tesla V100-SXM2-16GB`."""
    backend: Backend
    """Its backend; a `simulated` device cannot run ops."""
    memory_bytes: Annotated[Whole, Field(gt=0)]
    """Capacity for one step's tensors; a peak above it is `oom`."""
    memory_pool: Printable = ""
    """Devices with the same non-empty pool share one memory of `memory_bytes` (cores share one RAM)."""
    memory_granularity_bytes: AtLeastOne = 1
    """Every allocation is rounded up to a multiple of this."""
    context_bytes: Count = 0
    """Memory that is used from the start, in any placement."""
    dispatcher: Printable = ""
    """Devices with the same dispatcher share one launcher (a thread, an interpreter lock); with `""`, launches take no
    time."""
    peak_flops_per_s: dict[str, Rate] = field(default_factory=dict)
    """Peak FLOP/s by dtype name (`float32`, `bfloat16`, ...), for estimated costs."""
    memory_bandwidth_bytes_per_s: Rate = 0.0
    """Peak memory bandwidth, for estimated costs."""
    launch_s: Delay = 0.0
    """Shortest time of an op on the device, for estimated costs."""
    cores: Annotated[tuple[Count, ...], Field(max_length=4096)] = ()
    """CPU cores to which the device's thread is pinned; on the CPU an op has one thread per core."""
    members: Annotated[tuple[str, ...], Field(max_length=1024)] = ()
    """A gang: names of the devices that are busy whenever this one runs an op."""
    machine: Printable = ""
    """Name of its machine, where a host has several; `""` is this machine."""
    address: Printable = ""
    """Of that machine on the network between them; it may change while the machine is the same."""

    @property
    def local_name(self) -> str:
        """Its name on its own machine: `cpu:0` of `a/cpu:0`."""
        return self.name.removeprefix(f"{self.machine}/") if self.machine else self.name

    def __post_init__(self) -> None:
        refuse_if(
            self.context_bytes > self.memory_bytes,
            "context_bytes",
            self.context_bytes,
            f"at most memory_bytes, {self.memory_bytes}",
        )
        refuse_if(
            len(set(self.cores)) != len(self.cores),
            "cores",
            f"{len(self.cores)} of them, some twice",
            "different cores",
        )
        for dtype in self.peak_flops_per_s:
            check_known("dtype", dtype, DTYPES, hint=f"Found in `peak_flops_per_s` of device {self.name!r}.")


@record(frozen=True)
class Link:
    """One direction of a wire or bus; a half-duplex medium is one link in the routes of both directions."""

    name: Printable
    bandwidth_bytes_per_s: Annotated[Number, Field(ge=LEAST_RATE)]
    latency_s: Delay = 0.0


@record(frozen=True)
class Route:
    """The links that a transfer from `source` to `destination` uses, all at once, for its whole duration.

    It takes `latency_s + bytes / bandwidth_bytes_per_s` with the largest latency and the least bandwidth of its links.
    A route without links is a hand-over: both devices use the same memory (a gang and its member), so nothing is copied
    and it takes no time. The tensor counts as memory of the source until its readers at the destination have ended.
    """

    source: str
    destination: str
    links: Annotated[tuple[str, ...], Field(max_length=64)]
    """A transfer waits until all of them are free."""
    blocks_source: bool = False
    """The source device runs no op during a transfer (a plain copy between GPUs synchronises both)."""
    blocks_destination: bool = False
    """The destination device runs no op during a transfer (a CPU core makes the copy itself)."""


_MOST_LETTERS = 1 << 29
"""Of all routes and members, about: a short file stands for a million of them, each with names of its ends."""


def _listed(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


@record(frozen=True)
class Host:
    """Devices, links and routes; immutable, with a fingerprint."""

    name: Printable
    devices: Annotated[tuple[Device, ...], Field(min_length=1)]
    links: tuple[Link, ...] = ()
    routes: tuple[Route, ...] = ()
    dispatch_s: Delay = 0.0
    """Time of a dispatcher to launch one op, in seconds."""
    copy_dispatch_s: Delay = 0.0
    """Time of the destination's dispatcher to launch one transfer, in seconds."""
    dispatch_order: DispatchOrder = "plan"
    """`plan`: a dispatcher is one thread that launches in plan order. `request`: a dispatcher is a lock; the thread of
    each device takes it for a launch, in order of request (ties by device index)."""
    run_ahead: AtLeastOne = 1024
    """An op's launch begins only when the op this many places before it in its device's order has ended; 1 launches
    on an idle device only (a CPU core launches its own ops)."""
    corun_slowdown: tuple[tuple[Slowdown, ...], ...] = ()
    """(D, D): an op on device d progresses at rate 1 / (1 + sum of `corun_slowdown[d][e]` over busy devices e). For
    parts of one GPU the initial value is 1, for other devices 0; a calibration fits both."""
    processes: bool = False
    """Whether each device is a process of its own: device d is rank d, and no launcher is shared. Else all devices are
    threads of one process. Whatever runs steps reads this field and nothing else (no name, no dispatcher)."""
    sources: dict[str, str] = field(default_factory=dict)
    """The source of each figure of a preset."""

    def __post_init__(self) -> None:
        names, links = [device.name for device in self.devices], [link.name for link in self.links]
        for field_, given in (("devices", names), ("links", links)):
            refuse_if(len(set(given)) != len(given), field_, given, "unique names")
        known_names = dict.fromkeys(names)
        for k, device in enumerate(self.devices):
            for name in device.members:
                check_known(f"device in devices[{k}].members", name, known_names)
        # sets first: of a thousand devices there are a million routes
        for field_, known, named in (
            ("source", names, {route.source for route in self.routes}),
            ("destination", names, {route.destination for route in self.routes}),
            ("links", links, {link for route in self.routes for link in route.links}),
        ):
            for name in named - set(known):
                at = next(k for k, each in enumerate(self.routes) if name in _listed(getattr(each, field_)))
                kind = "link" if field_ == "links" else "device"
                check_known(f"{kind} in routes[{at}].{field_}", name, dict.fromkeys(known))
        longest = max(map(len, names)) + max(map(len, links), default=0)
        count = len(self.routes) + sum(len(device.members) for device in self.devices)
        expected = f"at most {_MOST_LETTERS // longest:,} with names of so many letters ({longest:,})"
        refuse_if(count * longest > _MOST_LETTERS, "routes", Described(f"{count:,}, members included"), expected)
        pairs = {(route.source, route.destination) for route in self.routes}
        refuse_if(len(pairs) != len(self.routes), "routes", "two routes for one pair of devices", "one route a pair")
        if len(pairs) - sum((name, name) in pairs for name in names) < len(names) * (len(names) - 1):
            source, destination = next(each for each in permutations(names, 2) if each not in pairs)
            raise InvalidValue(
                "routes", f"nothing from {source!r} to {destination!r}", "a route for every ordered pair of devices"
            )
        rows = self.corun_slowdown
        refuse_if(
            rows and {len(rows), *map(len, rows)} != {len(names)},
            "corun_slowdown",
            rows,
            f"{len(names)} rows of {len(names)} numbers",
        )
        if self.processes:
            self._check_processes()

    def _check_processes(self) -> None:
        """Nothing of one process may be shared by two devices."""
        gangs = [device.name for device in self.devices if device.members]
        hint = "Gangs need threads: leave out `--gangs`, or use `cores` (in a host file `processes: false`)."
        refuse_if(gangs, "devices", gangs, "no gangs", hint=hint)
        launchers = Counter(device.dispatcher for device in self.devices if device.dispatcher)
        shared = [name for name, count in launchers.items() if count > 1]
        refuse_if(shared, "dispatcher", shared, "a launcher for each device", hint="Each device is a process.")

    def __repr__(self) -> str:
        """In one line: the numbers of devices of each kind, and their wiring."""
        kinds = Counter(device.kind for device in self.devices)
        of = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
        also = ", a process each" * self.processes + ", simulated" * self.is_simulated
        return f"Host({self.name}: {of}; {counted(len(self.links), 'link')}{also})"

    @staticmethod
    def detect(
        kind: HostKind = "auto",
        *,
        gangs: bool = False,
        num_parts: int = 1,
        with_cpu: bool = False,
    ) -> Host:
        """This machine: all CUDA GPUs. With `cores`, or without a GPU, all CPU cores; see `detect_host`.

        With `procs` or `cuda-procs` each device is a process, else a thread. `nodes` is all machines on which torchrun
        runs this program.
        """
        from rlplace.measure.hosts.detect import detect_host

        return detect_host(kind, gangs=gangs, num_parts=num_parts, with_cpu=with_cpu)

    def as_processes(self, name: str) -> Host:
        """The same devices, each as a process with a launcher of its own, under another name.

        A device that makes its copies itself finds them in memory that processes share: the source has put them there.
        """
        return replace(
            self,
            name=name,
            processes=True,
            devices=tuple(replace(device, dispatcher=device.dispatcher and device.name) for device in self.devices),
            routes=tuple(
                replace(route, blocks_source=True, blocks_destination=False) if route.blocks_destination else route
                for route in self.routes
            ),
        )

    def part(self, devices: Sequence[int]) -> Host:
        """Some of its devices, with the links and routes between them."""
        kept = tuple(self.devices[device] for device in devices)
        names = {device.name for device in kept}
        routes = tuple(route for route in self.routes if {route.source, route.destination} <= names)
        used = {link for route in routes for link in route.links}
        slowdown = self.corun_slowdown and tuple(tuple(self.corun_slowdown[d][e] for e in devices) for d in devices)
        links = tuple(link for link in self.links if link.name in used)
        return replace(self, devices=kept, links=links, routes=routes, corun_slowdown=slowdown)

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def is_simulated(self) -> bool:
        """Whether a device cannot run ops on this machine."""
        return any(device.backend == "simulated" for device in self.devices)

    @cached_property
    def is_wired(self) -> bool:
        """Whether its devices are processes without a memory in common: tensors go as messages."""
        return self.processes and int(self.shares_memory.sum()) < self.num_devices * (self.num_devices - 1)

    @property
    def sends_wait(self) -> bool:
        """Whether a send may wait for its receive, as NCCL's between GPUs do; gloo's between CPUs do not."""
        return self.is_wired and any(device.backend != "cpu" for device in self.devices)

    @cached_property
    def shares_memory(self) -> NDArray[np.bool_]:
        """(D, D): whether two devices share one memory; False on the diagonal."""
        import numpy as np  # the command line reads hosts before it needs arrays

        pools = np.array([device.memory_pool or f" {d}" for d, device in enumerate(self.devices)])
        return np.asarray((pools[:, None] == pools) & ~np.eye(len(pools), dtype=bool))

    @cached_property
    def machine_of(self) -> NDArray[np.int32]:
        """(D,) a number for each device's machine where tensors are relayed (`transfer_sources`), else all 0.

        Only processes can be on several machines. A host with hand-overs relays nothing.
        """
        import numpy as np

        names = [device.machine for device in self.devices]
        numbers = np.array([names.index(name) for name in names], dtype=np.int32)
        relays = self.processes and 1 < len(set(names)) < len(names) and all(route.links for route in self.routes)
        return numbers if relays else np.zeros_like(numbers)

    @cached_property
    def device_index(self) -> dict[str, int]:
        """Device name to index."""
        return {device.name: index for index, device in enumerate(self.devices)}

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits: a hash of devices (name, kind, backend, cores, gangs) and routes, without measured values.

        Threads and processes differ.
        """
        facts: dict[str, object] = {
            "devices": [[d.name, d.kind, d.backend, list(d.cores), list(d.members)] for d in self.devices],
            "routes": [[r.source, r.destination, list(r.links)] for r in self.routes],
        }
        if self.processes:
            facts["processes"] = True
        if any(device.machine for device in self.devices):
            facts["machines"] = [device.machine for device in self.devices]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def device(self, name: str) -> Device:
        """The device called `name`.

        Raises:
            UnknownName: no device has that name.
        """
        check_known("device", name, self.device_index)
        return self.devices[self.device_index[name]]

    def to_dict(self) -> dict[str, object]:
        """The host as plain data, as in host files and run folders."""
        return asdict(self)


def allocated(num_bytes: NDArray[np.int64], granularity: int | NDArray[np.int64]) -> NDArray[np.int64]:
    """The sizes in bytes, each rounded up to a multiple of `granularity` (`Device.memory_granularity_bytes`).

    >>> import numpy as np
    >>> allocated(np.array([0, 1, 512, 513]), 512).tolist()
    [0, 512, 512, 1024]
    """
    return -(-num_bytes // granularity) * granularity
