"""This machine as a `Host`: its GPUs, else its CPU cores."""

from __future__ import annotations

import os
from typing import Literal

from rlplace import cuda
from rlplace.errors import InvalidValue
from rlplace.measure.hosts.gpus import gpu_host
from rlplace.measure.hosts.host import Device, Host, Link, Route
from rlplace.measure.hosts.usable import usable_bytes
from rlplace.measure.run.threads import usable_cores

MAX_CORE_DEVICES = 4

HostKind = Literal["auto", "cores", "cuda"]

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
            GPUs.
        num_devices: of cores: how many devices to make; by default one a core, at most 4.
        cores_per_device: of cores: how many cores each device has; by default 1.
        gangs: of cores: also a device that runs an op on all of them at once.
        num_parts: of GPUs: how many devices to make of each.
        with_cpu: of GPUs: the CPU joins as one more device.

    Raises:
        InvalidValue: more cores asked for than there are, GPUs where there is none, or too many parts of each.
    """
    name = f"{kind}/{num_parts}" if num_parts != 1 else kind
    name = f"{name}+cpu" if with_cpu else name
    if kind != "cores" and cuda.num_gpus():
        return gpu_host(
            name,
            num_parts=num_parts,
            with_cpu=with_cpu,
            cores=usable_cores(),
            ram_bytes=_ram_bytes(),
        )
    if kind == "cuda":
        hint = "PyTorch sees no GPU here (`rlplace doctor` tells why). Use `cores`: the cores of the CPU."
        raise InvalidValue("host", name, "a word for devices of this machine", hint=hint)
    return _core_host(num_devices, cores_per_device or 1, gangs=gangs)


def _core_host(num_devices: int | None, cores_per_device: int, *, gangs: bool) -> Host:
    cores = usable_cores()
    if num_devices is None:
        num_devices = max(1, min(MAX_CORE_DEVICES, len(cores) // cores_per_device))
    if num_devices < 1 or cores_per_device < 1 or num_devices * cores_per_device > len(cores):
        raise InvalidValue(
            "host",
            f"cores:{num_devices}x{cores_per_device}",
            f"at most {len(cores)} cores in all",
            hint="Ask for fewer devices or fewer cores a device.",
        )
    ram_bytes = usable_bytes(_ram_bytes())
    kind = "cpu-core" if cores_per_device == 1 else f"cpu-{cores_per_device}cores"
    devices = [
        _core_device(f"cpu:{index}", kind, cores[index * cores_per_device : (index + 1) * cores_per_device], ram_bytes)
        for index in range(num_devices)
    ]
    singles = list(devices)
    if gangs and num_devices > 1:
        members = tuple(device.name for device in singles)
        used = cores[: num_devices * cores_per_device]
        gang = _core_device(f"cpu:0-{num_devices - 1}", f"cpu-gang-{len(used)}", used, ram_bytes, members)
        devices.append(gang)
    links, routes = [], []
    for source in devices:
        for destination in devices:
            if source is destination:
                continue
            if source.members or destination.members:
                routes.append(Route(source.name, destination.name, ()))
                continue
            link = Link(f"{source.name}->{destination.name}", CORE_COPY_BYTES_PER_S, CORE_COPY_LATENCY_S)
            links.append(link)
            routes.append(Route(source.name, destination.name, (link.name,), blocks_destination=True))
    return Host(
        name="cores" if cores_per_device == 1 else f"cores:{num_devices}x{cores_per_device}",
        devices=tuple(devices),
        links=tuple(links),
        routes=tuple(routes),
        dispatch_order="request",
        run_ahead=1,
    )


def _core_device(
    name: str, kind: str, cores: tuple[int, ...], memory_bytes: int, members: tuple[str, ...] = ()
) -> Device:
    return Device(
        name=name,
        kind=kind,
        backend="cpu",
        memory_bytes=memory_bytes,
        memory_pool="ram",
        dispatcher="interpreter",
        cores=tuple(cores),
        members=members,
    )


def _ram_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
