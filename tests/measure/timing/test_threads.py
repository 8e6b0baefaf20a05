"""Threads that keep to their cores and to their own number of intra-op threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from rlplace.measure.timing.threads import (
    _openblas,
    keep_freed_memory,
    one_thread_here,
    pin_current_thread,
    set_intra_op_threads,
    usable_cores,
)

T = TypeVar("T")


def in_a_thread(function: Callable[[], T]) -> T:
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join(timeout=600)
    return found[0]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system cannot pin threads")
def test_pinning_is_for_one_thread_alone_and_no_cores_means_anywhere() -> None:
    before = os.sched_getaffinity(0)
    core = usable_cores()[-1]

    def pinned() -> set[int]:
        pin_current_thread((core,))
        return os.sched_getaffinity(0)

    assert in_a_thread(pinned) == {core}
    assert os.sched_getaffinity(0) == before
    assert usable_cores() == tuple(sorted(before))

    def unpinned() -> tuple[int, ...]:
        pin_current_thread(())
        return usable_cores()

    assert in_a_thread(unpinned) == usable_cores()


def test_systems_without_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    pin_current_thread((0,))
    assert usable_cores() == (0, 1, 2)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == (0,)


def test_intra_op_threads_are_for_one_thread_alone() -> None:
    def count(wanted: int) -> int:
        set_intra_op_threads(wanted)
        torch.ones(10).sum()
        return torch.get_num_threads()

    before = torch.get_num_threads()
    assert in_a_thread(lambda: count(1)) == 1
    assert in_a_thread(lambda: count(2)) == 2
    assert torch.get_num_threads() == before


def test_a_thread_computes_the_same_whatever_its_count() -> None:
    left, right = torch.ones(64, 64), torch.eye(64)

    def product(threads: int) -> torch.Tensor:
        set_intra_op_threads(threads)
        return left @ right

    assert torch.equal(in_a_thread(lambda: product(1)), in_a_thread(lambda: product(2)))


def test_keeping_freed_memory_answers_whether_it_could() -> None:
    """In a process of its own: it holds for as long as that lives."""
    code = "from rlplace.measure.timing.threads import keep_freed_memory as k; print(k(), k())"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert answer.stdout in ("True True\n", "False False\n")


def test_other_c_libraries_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes

    def missing(name: str) -> object:
        raise OSError(name)

    keep_freed_memory.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert keep_freed_memory() is False
    keep_freed_memory.cache_clear()


def test_linear_systems_are_solved_with_one_thread_here_and_as_before_afterwards() -> None:
    blas = _openblas()
    if blas is None:
        pytest.skip("NumPy has another library than the OpenBLAS of its wheels")
    count, set_count = blas
    before = count()
    try:
        set_count(2)
        with one_thread_here():
            assert count() == 1
            with one_thread_here():
                assert count() == 1
            assert count() == 1
        assert count() == 2
    finally:
        set_count(before)
