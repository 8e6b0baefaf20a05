"""`rank_devices`: which devices of a host are processes of `torch.distributed`, for formats that run in several."""

from __future__ import annotations

import re

from rlplace.errors import InvalidValue
from rlplace.measure.hosts.host import Device, Host

_PART = re.compile(r"cuda:\d+/\d+$")
"""Names of parts of a GPU."""


def rank_devices(host: Host, where: str) -> dict[int, str]:
    """By index of a device, in order of ranks, what PyTorch calls it on its own machine: `cuda:N`, or `cpu`.

    GPUs are ranks; where there is none, cores are, gangs of them excepted.

    Args:
        host: whose devices they are.
        where: the format that asks, for messages.

    Raises:
        InvalidValue: a device is a part of a GPU, which cannot have a process of its own.
    """
    plain = [index for index, device in enumerate(host.devices) if not device.members]
    gpus = [index for index in plain if not _is_core(host.devices[index])]
    for index in gpus:
        if _PART.search(host.devices[index].name):
            expected = "a whole GPU: each has one process"
            raise InvalidValue("device", host.devices[index].name, expected, where=where)
    if not gpus:
        return dict.fromkeys(plain, "cpu")
    nodes = [host.devices[index].name.rpartition("/")[0] for index in gpus]
    return {index: f"cuda:{nodes[:rank].count(nodes[rank])}" for rank, index in enumerate(gpus)}


def _is_core(device: Device) -> bool:
    return device.backend == "cpu" or device.name.startswith("cpu")
