"""Pinning threads to cores, intra-op thread counts, and a C library that keeps freed memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8


def pin_current_thread(cores: Sequence[int]) -> None:
    """Pins the calling thread to `cores`; does nothing where the system cannot or `cores` is empty."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, set(cores))


def usable_cores() -> tuple[int, ...]:
    """The cores that this process may run on, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def set_intra_op_threads(count: int) -> None:
    """Makes the calling thread run its ops with `count` threads; other threads keep theirs.

    `torch.set_num_threads` sets MKL's count for the whole process, so OpenMP's and MKL's own per-thread settings are
    used where they can be found.
    """
    import torch

    openmp, mkl = _libraries()
    if openmp is None:
        torch.set_num_threads(count)
        return
    torch.get_num_threads()  # PyTorch sets a new thread's count at its first use: let it, then override
    openmp.omp_set_num_threads(ctypes.c_int(count))
    if mkl is not None:
        mkl.MKL_Set_Num_Threads_Local(ctypes.c_int(count))


SPINS_S = 0.01
"""How long the threads of an OpenMP team look for their next work in a loop, at most, before they sleep."""


def await_quiet_teams() -> None:
    """Waits until teams of before have gone to sleep: until then they take the cores of the step that is timed next.

    Steps of 10 ms on two cores took 15 ms when they began right after a step of a team.
    """
    time.sleep(SPINS_S)


@contextlib.contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """While active, the calling thread runs its ops with `count` threads."""
    import torch

    before = torch.get_num_threads()
    set_intra_op_threads(count)
    try:
        yield
    finally:
        set_intra_op_threads(before)


@contextlib.contextmanager
def one_thread_here() -> Iterator[None]:
    """While active, the calling thread runs its own ops alone, and NumPy solves linear systems with one thread.

    GNU OpenMP stops spinning between parallel regions once a process has more threads in teams than cores: a team that
    the main thread made in passing would slow every gang. Beside another busy process, a system of 300 unknowns takes
    OpenBLAS ten times as long with two threads as with one, and its last bits depend on their number.
    """
    blas = _openblas()
    blas_before = blas[0]() if blas else 0
    if blas:
        blas[1](1)
    try:
        with intra_op_threads(1):
            yield
    finally:
        if blas:
            blas[1](blas_before)


@functools.cache
def _libraries() -> tuple[ctypes.CDLL | None, ctypes.CDLL | None]:
    import torch

    folder = Path(torch.__file__).parent / "lib"
    loaded = [*folder.glob("libgomp*.so*"), *folder.parent.parent.glob("torch.libs/libgomp*.so*")]
    openmp = ctypes.CDLL(str(loaded[0])) if loaded else None
    library = folder / "libtorch_cpu.so"
    mkl = ctypes.CDLL(str(library)) if library.exists() else None
    return openmp, mkl if hasattr(mkl, "MKL_Set_Num_Threads_Local") else None


@functools.cache
def _openblas() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """Reads and sets the number of threads of the OpenBLAS in NumPy's wheel; None where there is another library."""
    import numpy as np

    for path in Path(np.__file__).parent.parent.glob("numpy.libs/libscipy_openblas*"):
        library = ctypes.CDLL(str(path))
        for suffix in ("64_", ""):
            if hasattr(library, name := f"scipy_openblas_set_num_threads{suffix}"):
                return getattr(library, name.replace("_set_", "_get_")), getattr(library, name)
    return None


@functools.cache
def keep_freed_memory() -> bool:
    """Tells glibc to keep freed memory and never to map large blocks one by one; returns whether it listened.

    Otherwise every large output of every step is mapped, zeroed and unmapped again by the kernel, which dominates large
    ops on a CPU. It holds for the whole process, so eager PyTorch measured beside a placement has it too.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
        return all(
            libc.mallopt(option, value) == 1
            for option, value in (
                (_M_MMAP_MAX, 0),
                (_M_TRIM_THRESHOLD, 2**31 - 1),
                (_M_TOP_PAD, 64 << 20),
                (_M_ARENA_MAX, 1),
            )
        )
    except (OSError, AttributeError):
        return False
