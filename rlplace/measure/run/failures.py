"""What an error of a GPU means: whether this process can go on with it, and what to say beside the error's own text.

`limited_memory`: a process takes no more of each GPU than its host says that there is.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator

import torch

from rlplace import cuda
from rlplace.errors import RunnerError
from rlplace.measure.hosts.host import Host
from rlplace.measure.placed.channels import torch_device

LOST = "the GPU cannot be used by this process any more; start again"
LATE = "launches run ahead, so an earlier op may be at fault: CUDA_LAUNCH_BLOCKING=1 in the environment tells"
_LIBRARIES = ("cuda error", "cublas_status", "cudnn_status", "cufft_", "cusolver_status", "cusparse_status", "nccl")


def is_lost(error: BaseException) -> bool:
    """Whether `error` leaves this process without its GPUs.

    A `RunnerError` tells by its cause: without one it quotes another process, whose GPU is not ours.
    """
    cause = error.__cause__ if isinstance(error, RunnerError) else error
    return cause is not None and (cuda.is_sticky(cause) or cuda.is_gone(cause))


def is_late(cause: BaseException) -> bool:
    """Whether a GPU or a library of it reported `cause`, maybe after other ops had been launched."""
    text = str(cause).lower()
    return cuda.is_sticky(cause) or (not cuda.is_out_of_memory(cause) and any(word in text for word in _LIBRARIES))


def advice(cause: BaseException) -> str:
    """What follows the text of `cause`: that the GPU is lost, that another op may be at fault; mostly nothing."""
    said = [LOST] if cuda.is_sticky(cause) else []
    said += [LATE] if is_late(cause) else []
    return "".join(f"; {each}" for each in said)


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
