"""What an error of a GPU means: whether this process can go on with it, and what to say beside the error's own text."""

from __future__ import annotations

from rlplace import cuda
from rlplace.errors import RunnerError

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
