"""This machine as a `Host`: its GPUs, each as one device or as several, with or without the CPU; else its CPU cores.

`nodes_host`: all machines on which torchrun runs a command.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations

from rlplace import cuda
from rlplace.errors import refuse_if
from rlplace.measure.hosts.control_groups import allowed_cores, ram_bytes
from rlplace.measure.hosts.host import Device, Host, HostKind, Link, Route
from rlplace.measure.hosts.nodes import RankFacts, join

MAX_CORE_DEVICES = 4

CORE_COPY_BYTES_PER_S = 8e9
CORE_COPY_LATENCY_S = 20e-6
"""Link figures until `profile_links` has measured them."""


def detect_host(
    kind: HostKind = "auto",
    num_devices: int | None = None,
    cores_per_device: int | None = None,
    *,
    gangs: bool = False,
    num_parts: int = 1,
    with_cpu: bool = False,
) -> Host:
    """The devices of this machine.

    Args:
        kind: `auto` takes every CUDA GPU, and the cores only where there is none; `cores` takes the cores, `cuda` the
            GPUs. `procs` and `cuda-procs` are `cores` and `cuda` with a process for each device. `nodes` takes
            those of all machines on which torchrun runs this command.
        num_devices: of cores: how many devices to make; by default one a core, at most 4.
        cores_per_device: of cores: how many cores each device has; by default 1.
        gangs: of cores: also a device that runs an op on all of them at once; not with `procs`.
        num_parts: of GPUs: how many devices to make of each.
        with_cpu: of GPUs: the CPU joins as one more device.

    Raises:
        InvalidValue: more cores asked for than there are, GPUs where there is none, too many parts of each, or parts or
            a CPU beside GPUs that are processes;
            `nodes` without torchrun.
        RunnerError: a rank of torchrun did not come.
    """
    if kind == "nodes":
        return nodes_host(join().facts)
    name = f"{kind}{f'/{num_parts}' if num_parts != 1 else ''}{'+cpu' if with_cpu else ''}"
    if kind not in ("cores", "procs") and cuda.num_gpus():
        refuse_if(
            kind == "cuda-procs" and (num_parts != 1 or with_cpu),
            "host",
            name,
            "`cuda-procs`: one whole GPU a process, and no CPU",
        )
        host = gpu_host(name, num_parts=num_parts, with_cpu=with_cpu, cores=allowed_cores(), ram_bytes=ram_bytes())
        return host.as_processes(name) if kind == "cuda-procs" else host
    refuse_if(
        kind in ("cuda", "cuda-procs"),
        "host",
        name,
        "a word for devices of this machine",
        hint="PyTorch sees no GPU here (`rlplace doctor` tells why). Use `cores`: the cores of the CPU.",
    )
    host = _core_host(kind, num_devices, cores_per_device, gangs=gangs)
    return host.as_processes(host.name.replace("cores", "procs")) if kind == "procs" else host


def _core_host(kind: str, num_devices: int | None, asked_cores: int | None, *, gangs: bool) -> Host:
    cores, cores_per_device = allowed_cores(), asked_cores or 1
    if num_devices is None:
        num_devices = max(1, min(MAX_CORE_DEVICES, len(cores) // cores_per_device))
    refuse_if(
        num_devices < 1 or cores_per_device < 1 or num_devices * cores_per_device > len(cores),
        "host",
        f"{kind}:{num_devices}{f'x{asked_cores}' if asked_cores else ''}",
        f"at most {len(cores)} cores in all",
        hint="Ask for fewer devices or fewer cores a device.",
    )
    kind = "cpu-core" if cores_per_device == 1 else f"cpu-{cores_per_device}cores"
    devices = [
        _cpu(f"cpu:{index}", kind, cores[index * cores_per_device : (index + 1) * cores_per_device], ram_bytes())
        for index in range(num_devices)
    ]
    if gangs and num_devices > 1:
        members, used = tuple(device.name for device in devices), cores[: num_devices * cores_per_device]
        devices.append(_cpu(f"cpu:0-{num_devices - 1}", f"cpu-gang-{len(used)}", used, ram_bytes(), members))
    routes = [
        Route(one.name, other.name, ())
        if one.members or other.members
        else Route(one.name, other.name, (f"{one.name}->{other.name}",), blocks_destination=True)
        for one, other in permutations(devices, 2)
    ]
    links = [Link(name, CORE_COPY_BYTES_PER_S, CORE_COPY_LATENCY_S) for route in routes for name in route.links]
    return Host(
        name="cores" if cores_per_device == 1 else f"cores:{num_devices}x{cores_per_device}",
        devices=tuple(devices),
        links=tuple(links),
        routes=tuple(routes),
        dispatch_order="request",
        run_ahead=1,
    )


def _cpu(name: str, kind: str, cores: tuple[int, ...], ram_bytes: int, members: tuple[str, ...] = ()) -> Device:
    return Device(
        name=name,
        kind=kind,
        backend="cpu",
        memory_bytes=usable_bytes(ram_bytes),
        memory_pool="ram",
        dispatcher="interpreter",
        cores=cores,
        members=members,
    )


NET_BYTES_PER_S = 125e6
NET_LATENCY_S = 60e-6
"""Link figures between machines until `profile_links` has measured them: 1 Gb/s."""


def nodes_host(facts: Sequence[RankFacts]) -> Host:
    """The devices of all ranks of torchrun, a process each: GPUs where every rank has one, else cores.

    Transfers between machines hold the sending machine's link up and the receiving one's link down, which all pairs
    share, and a link of the pair's own. Ranks of one machine have a link for each ordered pair.
    """
    is_gpu = all(each.gpu for each in facts)
    is_mixed = len({each.cpu for each in facts}) > 1
    devices = tuple(_node_device(each, is_gpu=is_gpu, is_mixed=is_mixed) for each in facts)
    routes, links = [], {}
    for source, destination in permutations(devices, 2):
        own = f"{source.name}->{destination.name}"
        if source.machine == destination.machine:
            routes.append(Route(source.name, destination.name, (own,), blocks_source=not is_gpu))
            links[own] = Link(own, CORE_COPY_BYTES_PER_S, CORE_COPY_LATENCY_S)
        else:
            routes.append(Route(source.name, destination.name, (*shared_links(source, destination), own)))
            links |= {name: Link(name, NET_BYTES_PER_S, NET_LATENCY_S) for name in routes[-1].links}
    return Host(
        name="nodes",
        devices=devices,
        links=tuple(links.values()),
        routes=tuple(routes),
        dispatch_order="request",
        run_ahead=1024 if is_gpu else 1,
        processes=True,
    )


def shared_links(source: Device, destination: Device) -> tuple[str, str]:
    """Names of the links that all transfers from one machine to another share: of its interface, and of the other's."""
    return f"{source.machine} up", f"{destination.machine} down"


def _node_device(facts: RankFacts, *, is_gpu: bool, is_mixed: bool) -> Device:
    machine, width = facts.machine, len(facts.cores)
    if is_gpu:
        return Device(
            name=f"{machine}/cuda:{facts.local_rank}",
            kind=facts.gpu,
            backend="cuda",
            memory_bytes=usable_bytes(facts.gpu_bytes),
            context_bytes=facts.gpu_bytes - facts.gpu_free_bytes,
            memory_granularity_bytes=512,
            dispatcher=f"{machine}/cuda:{facts.local_rank}",
            machine=machine,
            address=facts.address,
        )
    name = f"{machine}/cpu:{facts.local_rank}"
    kind = "cpu-core" if width == 1 else f"cpu-{width}cores"
    core = _cpu(name, f"{kind} of {facts.cpu}" if is_mixed else kind, facts.cores, facts.ram_bytes)
    return replace(core, memory_pool=f"ram of {machine}", dispatcher=name, machine=machine, address=facts.address)


MOST_PARTS = 16
"""Of one GPU: each has a stream of its own, and PyTorch has 32 to compute on."""
PARTS_SLOWDOWN = 1.0
"""`Host.corun_slowdown` between parts of one GPU: two that run at once run at half speed each, as if every op filled
the GPU. Small ops do not, so it is a prior: calibration replaces it."""

COPY_BYTES_PER_S = 12e9
COPY_LATENCY_S = 15e-6
"""Link figures until `profile_links` has measured them."""
INNER_COPY_BYTES_PER_S = 500e9
INNER_COPY_LATENCY_S = 10e-6
"""The same between parts of one GPU."""


def gpu_host(name: str, *, num_parts: int = 1, with_cpu: bool = False, cores: tuple[int, ...], ram_bytes: int) -> Host:
    """All GPUs of this machine, of which there is one at least.

    With the CPU as one more device, as many cores as there are other devices, at most half of all, are left to the
    threads that launch the GPUs' kernels; the CPU device has the others.

    Args:
        name: of the host.
        num_parts: each GPU is so many devices, `cuda:0/0`, `cuda:0/1`, ..., with equal shares of its memory.
        with_cpu: the CPU joins as one more device, `cpu`.
        cores: that this process may use.
        ram_bytes: memory of the machine.

    Raises:
        InvalidValue: more than 16 parts.
    """
    refuse_if(
        not 1 <= num_parts <= MOST_PARTS,
        "parts of a GPU",
        num_parts,
        f"1 to {MOST_PARTS}",
        where=f"host {name!r}",
        hint="Every part computes on a stream of its own.",
    )
    count = cuda.num_gpus()
    launching = cores[: min(count * num_parts, len(cores) // 2)] if with_cpu else ()
    devices = [part for index in range(count) for part in _parts(index, num_parts, launching)]
    if with_cpu:
        left = cores[len(launching) :]
        devices.append(_cpu("cpu", f"cpu-{len(left)}cores", left, ram_bytes))
    routes = tuple(_route(source, destination) for source, destination in permutations(devices, 2))
    return Host(
        name=name,
        devices=tuple(devices),
        links=tuple(_links(routes)),
        routes=routes,
        dispatch_order="request",
        run_ahead=1024,
        corun_slowdown=tuple(
            tuple(PARTS_SLOWDOWN if one is not other and _port(one) == _port(other) else 0.0 for other in devices)
            for one in (devices if num_parts > 1 else ())
        ),
    )


def _parts(index: int, num_parts: int, launching: tuple[int, ...]) -> Iterator[Device]:
    gpu = cuda.gpu(index)
    for part in range(num_parts):
        yield Device(
            name=f"cuda:{index}/{part}" if num_parts > 1 else f"cuda:{index}",
            kind=f"{gpu.name} 1/{num_parts}" if num_parts > 1 else gpu.name,
            backend="cuda",
            memory_bytes=usable_bytes(gpu.memory_bytes) // num_parts,
            context_bytes=-(-(gpu.memory_bytes - gpu.free_bytes) // num_parts),
            memory_granularity_bytes=512,
            dispatcher="interpreter",
            cores=launching,
        )


def _route(source: Device, destination: Device) -> Route:
    """A link for each pair holds the pair's own figures; those that copies share make them wait for each other."""
    own, here, there = f"{source.name}->{destination.name}", _port(source), _port(destination)
    return Route(source.name, destination.name, (own,) if here == there else (f"{here} up", f"{there} down", own))


def _port(device: Device) -> str:
    """The link that all copies from and to a device go through: its GPU, or the CPU."""
    return device.name.partition("/")[0]


def _links(routes: tuple[Route, ...]) -> Iterator[Link]:
    for name in dict.fromkeys(name for route in routes if len(route.links) > 1 for name in route.links):
        yield Link(name, COPY_BYTES_PER_S, COPY_LATENCY_S)
    for route in routes:
        if len(route.links) == 1:
            yield Link(route.links[0], INNER_COPY_BYTES_PER_S, INNER_COPY_LATENCY_S)


SPARE = 0.05
"""The share of a detected memory that stays free.

A device may take its copy of a tensor later than simulated, so that the maker holds it longer, and allocators lose
some to fragmentation: the fullest devices held up to 3.5 % more than predicted (benchmarks/results/memory.md).
"""


def usable_bytes(total_bytes: int) -> int:
    """Bytes that a step may fill of a device's memory: all but `SPARE` of it.

    >>> usable_bytes(1_000)
    950
    """
    return total_bytes - int(total_bytes * SPARE)
