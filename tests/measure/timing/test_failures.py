"""What is said beside an error of a GPU."""

from __future__ import annotations

import pytest

from rlplace.cuda import LATE, LOST, advice, is_late, is_lost
from rlplace.errors import RunnerError

STICKY = RuntimeError("CUDA error: an illegal memory access was encountered")
LIBRARY = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`")
MEMORY = RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")


def chained(cause: Exception) -> RunnerError:
    error = RunnerError(f"op 'mm' on cuda:0: {cause}")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("cause", "is_lost_after", "late", "says"),
    [
        (STICKY, True, True, f"; {LOST}; {LATE}"),
        (LIBRARY, False, True, f"; {LATE}"),
        (MEMORY, False, False, ""),
        (ValueError("boom"), False, False, ""),
    ],
)
def test_what_an_error_means(cause: Exception, is_lost_after: bool, late: bool, says: str) -> None:
    assert is_lost(cause) is is_lost(chained(cause)) is is_lost_after
    assert is_late(cause) is late
    assert advice(cause) == says


def test_the_gpu_of_another_process_is_not_ours() -> None:
    assert not is_lost(RunnerError(f"replica 1 failed: {STICKY}"))
