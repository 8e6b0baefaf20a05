"""`map_places`: what a device map calls the devices of a host."""

from __future__ import annotations

import re

from rlplace.errors import InvalidValue
from rlplace.measure.hosts.host import Device, Host

CPU = "cpu"
Place = int | str
"""The index of a GPU, or `cpu`."""


def map_places(host: Host) -> tuple[Place, ...]:
    """What a device map calls each device of `host`: the index of a GPU, or `cpu`.

    Parts of one GPU are that GPU, and cores and gangs of them are the CPU. A device of a host file that is called
    neither takes the index of its place among those that are no CPUs.

    Raises:
        InvalidValue: its devices are in several machines, which one process cannot reach.

    Example:
        >>> from rlplace.measure.hosts.resolve import resolve_host
        >>> map_places(resolve_host("cpu+4xA100"))
        ('cpu', 0, 1, 2, 3)
    """
    machines = sorted(
        {found[1] for device in host.devices if (found := re.match(r"(.+)/(?:cuda|gpu|cpu)", device.name))}
    )
    if len(machines) > 1:
        raise InvalidValue(
            "host",
            host.name,
            "a host of one machine",
            where="device map",
            hint=f"A device map is of one process, and these devices are in {len(machines)} machines.",
        )
    gpus = [device for device in host.devices if not _is_cpu(device)]
    return tuple(CPU if _is_cpu(device) else _index(device, gpus) for device in host.devices)


def _is_cpu(device: Device) -> bool:
    return device.backend == "cpu" or re.match(r"(?:.+/)?cpu(?::|$)", device.name) is not None


def _index(device: Device, gpus: list[Device]) -> int:
    numbered = [re.search(r"(?:cuda|gpu):?(\d+)(?:/\d+)?$", each.name) for each in gpus]
    found = numbered[gpus.index(device)]
    return int(found[1]) if found is not None and all(numbered) else gpus.index(device)
