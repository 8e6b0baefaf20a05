"""`limited_memory`: a process takes no more of each GPU than its host says that there is."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator

import torch

from rlplace import cuda
from rlplace.measure.hosts.host import Host
from rlplace.measure.run.crew.streams import torch_device


def gpu_capacities(host: Host) -> dict[torch.device, int]:
    """Bytes for tensors on each physical GPU: `memory_bytes` without `context_bytes`, summed over its parts."""
    capacities: dict[torch.device, int] = defaultdict(int)
    for device in host.devices:
        if device.backend == "cuda":
            capacities[torch_device(device)] += max(device.memory_bytes - device.context_bytes, 0)
    return dict(capacities)


@contextlib.contextmanager
def limited_memory(host: Host) -> Iterator[None]:
    """While active, allocations beyond what `host` says fail as out of memory, whoever makes them in this process.

    So a host file that says 8 GB is true on a GPU of 80 GB. Of cores nothing is limited.
    """
    capacities = gpu_capacities(host)
    for place, num_bytes in capacities.items():
        cuda.limit_memory(place, num_bytes)
    if capacities:  # what PyTorch keeps from before could be used beyond the limit
        cuda.give_back_memory()
    try:
        yield
    finally:
        for place in capacities:
            try:
                cuda.limit_memory(place, cuda.UNLIMITED)
            except RuntimeError as error:  # of a lost GPU: nothing is allocated there any more
                if not cuda.is_sticky(error):
                    raise
